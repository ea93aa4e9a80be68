"""Interface of structured output for the engine: waiting requests, and the masks of a step.

It compiles the grammars of new requests in the background and returns them when they are ready
(`ready`), and computes the masks of each step (`begin`).
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Listing
from math import inf

from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.core.plan import StepPlan
from headway.engine.grammar.builder import Builder, CompileTicket
from headway.engine.grammar.masks import MaskMaker, Ruled, StepMasks
from headway.engine.grammar.state import Compiled
from headway.engine.grammar.vocabulary import VocabularySource
from headway.engine.sequence import Sequence


class Grammars:
    """Grammars of an engine; nothing is loaded before the first request with a grammar."""

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
        """Called, from another thread, when a grammar is compiled or refused."""
        self.builder = Builder(source, clock=self.clock, on_done=self._tell, **limits)  # type: ignore[arg-type]
        self._threads = threads
        self._masks: MaskMaker | None = None
        self._waiting: dict[int, CompileTicket] = {}
        self._news = threading.Event()

    def _tell(self) -> None:
        self._news.set()
        self.on_news()

    def prepare(self) -> None:
        """Do in advance what the first grammar would wait for, if that takes long."""
        self.builder.prepare()

    # ── requests that wait for their grammar ────────────────────────────────────────────────

    def compile(self, request_id: int, grammar: Grammar, salt: str = "") -> Compiled | None:
        """Return the compiled grammar; None if the request must wait until `ready` names it."""
        ticket = self.builder.build(grammar, salt)
        if ticket.compiled is not None:
            return ticket.compiled
        self._waiting[request_id] = ticket
        return None

    def forget(self, request_id: int) -> None:
        """Drop a request that no longer waits."""
        self._waiting.pop(request_id, None)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests whose grammar is in compilation."""
        return len(self._waiting)

    @property
    def has_ready(self) -> bool:
        """Return whether a request's grammar is done."""
        return any(ticket.done for ticket in self._waiting.values())

    def ready(self) -> list[tuple[int, Compiled | RequestError]]:
        """Return the requests whose grammars are done, each with the grammar or its error."""
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
        """Sleep until a grammar is compiled or refused, if a request waits for one."""
        while self._waiting and not self.has_ready:
            self._news.clear()
            if not self.has_ready and not self._news.wait(min(timeout_s, 60.0)):
                return

    # ── steps ───────────────────────────────────────────────────────────────────────────────

    def begin(self, ruled: Listing[Ruled]) -> StepMasks:
        """Start computing the masks of `ruled`, sequences with their draft tokens."""
        if self._masks is None:
            self._masks = MaskMaker(self.builder.digits, self._threads, self.clock)
        return self._masks.begin(ruled)

    def close(self) -> None:
        """Stop threads and processes."""
        self.builder.close()
        if self._masks is not None:
            self._masks.close()


def begin_masks(
    plan: StepPlan, find: Callable[[int], Sequence | None], grammars: Grammars | None
) -> StepMasks | None:
    """Start computing the masks of the rows whose sample a grammar rules.

    `find` returns the sequence of an id.
    """
    if grammars is None:
        return None
    ruled: list[Ruled] = []
    for row in plan.scheduled:
        sequence = find(row.sequence_id) if row.sample else None
        if sequence is not None and sequence.grammar is not None:
            ruled.append((sequence, row.drafts))
    return grammars.begin(ruled) if ruled else None
