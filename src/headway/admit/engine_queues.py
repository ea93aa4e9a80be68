"""The queues before the engines of one model, one for each, and the choice of an engine.

A request goes to the engine where its first token is predicted soonest. Cached prefixes shorten the
predicted wait, so a conversation stays on its engine. To keep one popular prefix from drawing every
request to one engine, no engine is chosen that holds more than `MAX_SHARE` times its share
(consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2018). Worked example,
three engines with 4, 4 and 8 requests, mean 5.3, and 5.7 with the new request:

    waits 0.30, 0.30 and 0.05 s   the third has the prefix, but 8 > 1.25 x 5.7: the first
    with 4, 4 and 6 requests      6 < 1.25 x 5: the third
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.prefixes import ComputedPrefixes
from headway.core.records import StepRecord

MAX_SHARE = 1.25
NEAR_RATIO, NEAR_S = 1.1, 0.005
"""A wait within this ratio plus these seconds of the shortest counts as equal: forecasts err by
more."""


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """An engine that accepts requests: predicted seconds to the first token, requests it holds."""

    wait_s: float
    num_requests: int


def choose_engine(candidates: Sequence[EngineCandidate]) -> int:
    """Return the index of the best engine; among equal waits the one with the fewest requests."""
    fair = MAX_SHARE * (1 + sum(each.num_requests for each in candidates)) / len(candidates)
    allowed = [n for n, each in enumerate(candidates) if each.num_requests <= fair]
    shortest_s = min(candidates[n].wait_s for n in allowed)
    near = [n for n in allowed if candidates[n].wait_s <= NEAR_RATIO * shortest_s + NEAR_S]
    return min(near, key=lambda n: candidates[n].num_requests)


@dataclass(slots=True)
class EngineQueue:
    """The queue before one engine, the prefixes it has computed, and the requests it holds.

    `is_up` is false while the engine is down. `starts_requests` is false for a decode engine, which
    continues requests that a prefill engine started; new requests go there only if no other is up.
    """

    forecast: Forecast
    prefixes: ComputedPrefixes | None
    num_requests: int = 0
    is_up: bool = True
    starts_requests: bool = True

    def set_prompts(
        self, entry: QueueEntry, lengths: list[int], pages: list[list[int]] | None
    ) -> None:
        """Set the prompt lengths of `entry`, less what this engine has cached."""
        cached = None
        if self.prefixes is not None and pages is not None:
            cached = [*map(self.prefixes.num_cached, pages, lengths)]
        self.forecast.set_prompts(entry, lengths, cached)


class EngineQueues:
    """The queues of all engines of a model; an entry is in the queue of its `engine`."""

    def __init__(self, queues: list[EngineQueue]) -> None:
        self.by_engine = queues
        self.has_prefixes = any(queue.prefixes is not None for queue in queues)
        """Whether computed prefixes are remembered."""

    @property
    def entries(self) -> Iterator[QueueEntry]:
        """All waiting entries, of every engine."""
        for queue in self.by_engine:
            yield from queue.forecast.entries

    @property
    def accepting(self) -> list[int]:
        """The engines that accept new requests; all of them where every engine is down."""
        every = range(len(self.by_engine))
        up = [n for n in every if self.by_engine[n].is_up] or list(every)
        return [n for n in up if self.by_engine[n].starts_requests] or up

    def queue_of(self, entry: QueueEntry) -> EngineQueue:
        """Return the queue that the entry is in."""
        return self.by_engine[entry.engine]

    def count(self, **like: object) -> int:
        """Count the waiting prompts of entries with these fields: count(user="alice")."""
        return sum(queue.forecast.count(**like) for queue in self.by_engine)

    # ── events of a request ─────────────────────────────────────────────────────────────────

    def enter(self, entry: QueueEntry) -> None:
        """Add a request; until its prompts are known it is in the queue with the fewest."""
        entry.engine = min(self.accepting, key=lambda n: self.by_engine[n].num_requests)
        queue = self.queue_of(entry)
        queue.num_requests += 1
        queue.forecast.enter(entry)

    def assign(self, entry: QueueEntry, lengths: list[int], pages: list[list[int]] | None) -> None:
        """Choose the engine for a request, by the queues and the cached prefixes.

        `pages` holds the `page_hashes` of each prompt, None where they are not known.
        """
        accepting = self.accepting
        if len(accepting) > 1:
            candidates = []
            for number in accepting:
                queue = self.by_engine[number]
                queue.set_prompts(entry, lengths, pages)
                num_others = queue.num_requests - (number == entry.engine)
                candidates.append(EngineCandidate(queue.forecast.wait_s(entry), num_others))
            self._transfer(entry, accepting[choose_engine(candidates)])
        self.queue_of(entry).set_prompts(entry, lengths, pages)

    def leave(self, entry: QueueEntry) -> None:
        """Remove a request that has ended."""
        queue = self.queue_of(entry)
        queue.num_requests -= 1
        queue.forecast.leave(entry)

    def _transfer(self, entry: QueueEntry, engine: int) -> None:
        old, new = self.queue_of(entry), self.by_engine[engine]
        old.num_requests -= 1
        new.num_requests += 1
        old.forecast.transfer(entry, new.forecast)
        entry.engine = engine

    # ── events of an engine ─────────────────────────────────────────────────────────────────

    def on_record(self, record: StepRecord) -> None:
        """Count a step of an engine."""
        self.by_engine[record.engine].forecast.on_record(record)

    def on_engine_ready(self, engine: int, kv_tokens: int) -> None:
        """Accept requests for an engine that starts with empty KV memory for `kv_tokens`."""
        queue = self.by_engine[engine]
        queue.is_up = True
        if queue.prefixes is not None:
            queue.prefixes.reset(kv_tokens)

    def on_engine_down(self, engine: int) -> None:
        """Accept no requests for an engine that has died."""
        self.by_engine[engine].is_up = False

    def on_failover(self, engine_id: int, engine: int) -> None:
        """Transfer a request, waiting or running, to the engine that answers it from now on."""
        for queue in self.by_engine:
            entry = queue.forecast.entry_of(engine_id)
            if entry is not None:
                self._transfer(entry, engine)
                return

    def on_handover(self, engine_id: int, engine: int) -> None:
        """Transfer a request with a first token to the decode engine that continues it.

        While other prompts of the request wait, the entry stays in the queue of those.
        """
        for queue in self.by_engine:
            entry = queue.forecast.entry_of(engine_id)
            if entry is not None and entry not in queue.forecast.entries:
                self._transfer(entry, engine)

    def on_roles(self, starts_requests: list[bool]) -> None:
        """Set which engines start requests; the others continue them."""
        for queue, starts in zip(self.by_engine, starts_requests, strict=True):
            queue.starts_requests = starts

    def check_integrity(self) -> None:
        """Assert that each entry is in the queue of its engine, and the counts of the queues."""
        for number, queue in enumerate(self.by_engine):
            queue.forecast.check_integrity()
            assert all(entry.engine == number for entry in queue.forecast.entries)
            assert queue.num_requests >= 0
