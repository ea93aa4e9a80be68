"""All that the engine sees of structured output: requests that wait, and the masks of a step.

Given where the vocabulary lies, it compiles the grammars of newcomers in the background and hands
them back when they are ready (`ready`), and makes the masks of each step (`begin`).
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Listing
from math import inf

from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.engine.grammar.builder import Builder, CompileTicket
from headway.engine.grammar.masks import MaskMaker, Ruled, StepMasks
from headway.engine.grammar.state import Compiled
from headway.engine.grammar.vocabulary import VocabularySource


class Grammars:
    """Compiles, waits and masks; costs nothing until the first request with a grammar."""

    def __init__(
        self,
        source: VocabularySource,
        *,
        threads: int = 1,
        clock: Clock | None = None,
        **limits: float,
    ) -> None:
        self.clock = clock or SystemClock()
        self.on_news: Callable[[], None] = lambda: None
        """Told, from another thread, when a grammar is ready or refused."""
        self.builder = Builder(source, clock=self.clock, on_done=self._tell, **limits)  # type: ignore[arg-type]
        self._threads = threads
        self._masks: MaskMaker | None = None
        self._waiting: dict[int, CompileTicket] = {}
        self._news = threading.Event()

    def _tell(self) -> None:
        self._news.set()
        self.on_news()

    def prepare(self) -> None:
        """Do now what the first grammar would wait for, where that takes long."""
        self.builder.prepare()

    # ── requests that wait for their grammar ────────────────────────────────────────────────

    def compile(self, request_id: int, grammar: Grammar, salt: str = "") -> Compiled | None:
        """The compiled grammar, or None when the request has to wait until `ready` names it."""
        ticket = self.builder.build(grammar, salt)
        if ticket.compiled is not None:
            return ticket.compiled
        self._waiting[request_id] = ticket
        return None

    def forget(self, request_id: int) -> None:
        """The request is gone."""
        self._waiting.pop(request_id, None)

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._waiting)

    @property
    def has_ready(self) -> bool:
        """Whether a request need not wait any more."""
        return any(ticket.done for ticket in self._waiting.values())

    def ready(self) -> list[tuple[int, Compiled | RequestError]]:
        """The requests that need not wait any more, with what became of their grammars."""
        if not self._waiting:
            return []
        done = [(id, ticket) for id, ticket in self._waiting.items() if ticket.done]
        outcomes: list[tuple[int, Compiled | RequestError]] = []
        for request_id, ticket in done:
            del self._waiting[request_id]
            outcome = ticket.compiled or ticket.error
            assert outcome is not None
            outcomes.append((request_id, outcome))
        return outcomes

    def wait(self, timeout_s: float = inf) -> None:
        """Sleep until a grammar is ready or refused, when there is one to wait for."""
        while self._waiting and not self.has_ready:
            self._news.clear()
            if not self.has_ready and not self._news.wait(min(timeout_s, 60.0)):
                return

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def begin(self, ruled: Listing[Ruled]) -> StepMasks:
        """Start on the masks of `ruled`, sequences with their drafts."""
        if self._masks is None:
            self._masks = MaskMaker(self.builder.digits, self._threads, self.clock)
        return self._masks.begin(ruled)

    def close(self) -> None:
        """End threads and processes."""
        self.builder.close()
        if self._masks is not None:
            self._masks.close()
