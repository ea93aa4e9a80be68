"""Builder that compiles grammars on a thread of its own and caches them, up to a size in bytes.

A cached grammar is returned at once, others as a `CompileTicket` that is done a few milliseconds
later; the engine goes on meanwhile. Each new grammar is first tried in a child process that can be
killed (`trial.py`), so that no ticket waits for ever.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLTokenizer

from headway.core.clock import Clock
from headway.core.errors import HeadwayError, RequestError
from headway.core.grammar import Grammar
from headway.engine.grammar.compiler import compile_grammar, num_words
from headway.engine.grammar.digits import DigitLimit, has_numbers
from headway.engine.grammar.state import Compiled
from headway.engine.grammar.trial import GrammarTrial
from headway.engine.grammar.vocabulary import VocabularySource, load_vocabulary

log = logging.getLogger(__name__)

COMPILE_LIMIT_S = 0.5
"""Limit of processor time in the trial; the engine's own compilation takes as long again. Real
schemas take 1 to 10 ms, one of 250 kB takes 140."""
CACHE_BYTES = 64 * 2**20
BASE_BYTES, BYTES_PER_CHARACTER = 256 * 1024, 160
"""Estimated size of a compiled grammar; 300 real schemas took about a third of it."""
LARGE_VOCABULARY = 8192
"""Number of tokens from which on the vocabulary is built at the start: it takes half a second for
49,152, in which the interpreter is blocked and no request would get a token."""
Key = tuple[str, str, str]
"""(cache salt, kind, text): compilation times reveal nothing about grammars of other users."""


class CompileTicket:
    """A grammar in compilation: done when it has `compiled` or an `error`."""

    __slots__ = ("compiled", "error", "grammar", "key")

    def __init__(self, grammar: Grammar, key: Key) -> None:
        self.grammar = grammar
        self.key = key
        self.compiled: Compiled | None = None
        self.error: RequestError | None = None

    @property
    def done(self) -> bool:
        return self.compiled is not None or self.error is not None


class Builder:
    """Compiles grammars on one thread, in the order of requests."""

    def __init__(
        self,
        source: VocabularySource,
        *,
        clock: Clock,
        on_done: Callable[[], None],
        limit_s: float = COMPILE_LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._source = source
        self._clock = clock
        self._on_done = on_done
        self._trial = GrammarTrial(source, limit_s, clock)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[Key, Compiled] = OrderedDict()
        self._building: dict[Key, CompileTicket] = {}
        self._queue: queue.SimpleQueue[CompileTicket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._vocabulary: LLTokenizer | None = None
        self._digits: DigitLimit | None = None
        self._durations_s: list[float] = []

    def prepare(self) -> None:
        """Build a large vocabulary, and start the trial process, before the first grammar."""
        if self._source.vocab_size < LARGE_VOCABULARY:
            return
        try:
            self._load_vocabulary()
            self._trial.launch()
        except (HeadwayError, OSError) as error:
            log.warning("grammars cannot be compiled: %s", error)

    def build(self, grammar: Grammar, salt: str = "") -> CompileTicket:
        """Return the ticket for `grammar`, already done if the salt's cache has it."""
        key = (salt, *grammar.key)
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
                ticket = CompileTicket(grammar, key)
                ticket.compiled = compiled
                return ticket
            building = self._building.get(key)
            if building is None:
                building = CompileTicket(grammar, key)
                self._building[key] = building
                self._queue.put(building)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        return building

    @property
    def digits(self) -> DigitLimit:
        """Return the digit limit of masks; available after the first compilation."""
        assert self._digits is not None
        return self._digits

    @property
    def cached_bytes(self) -> int:
        """Return the estimated bytes of the cached grammars."""
        with self._lock:
            return sum(compiled.num_bytes for compiled in self._cache.values())

    def __len__(self) -> int:
        return len(self._cache)

    def take_durations(self) -> list[float]:
        """Return the seconds of each compilation since the last call, failed ones included."""
        if not self._durations_s:
            return []
        with self._lock:
            durations_s, self._durations_s = self._durations_s, []
        return durations_s

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            started_s = self._clock.now_s()
            try:
                self._compile(ticket)
            except RequestError as error:
                ticket.error = error
            except Exception as error:
                log.exception("compiling a grammar failed")
                ticket.error = unavailable(error)
            with self._lock:
                self._building.pop(ticket.key, None)
                self._durations_s.append(self._clock.now_s() - started_s)
            self._on_done()

    def _load_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = load_vocabulary(self._source)
            self._digits = DigitLimit(self._vocabulary, num_words(self._vocabulary.vocab_size))
        return self._vocabulary

    def _compile(self, ticket: CompileTicket) -> None:
        vocabulary = self._load_vocabulary()
        grammar = self._trial.check(ticket.grammar)
        template, first_mask = compile_grammar(vocabulary, grammar)
        size = BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.text) + len(first_mask)
        numbers = has_numbers(ticket.grammar)
        compiled = Compiled(
            template, first_mask, size, self._source.vocab_size, has_numbers=numbers
        )
        self._keep(ticket.key, compiled)
        ticket.compiled = compiled

    def _keep(self, key: Key, compiled: Compiled) -> None:
        """Add `compiled` to the cache and evict the least recently used."""
        with self._lock:
            self._cache[key] = compiled
            held = sum(one.num_bytes for one in self._cache.values())
            while held > self._cache_bytes:
                _, dropped = self._cache.popitem(last=False)
                held -= dropped.num_bytes

    def close(self) -> None:
        """Stop the thread and the trial process."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._trial.close()


def unavailable(cause: Exception) -> RequestError:
    """Return the 503 for a grammar whose compilation failed without its fault."""
    reason = cause.cause if isinstance(cause, HeadwayError) else "the log says why."
    return RequestError(
        f"Grammars cannot be compiled: {reason}", code="overloaded", status=503, retry_after_s=5
    )
