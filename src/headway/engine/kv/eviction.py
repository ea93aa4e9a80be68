"""Eviction order of cached blocks: a heap, and a table of policies.

A cached block without a reference gets a value when it is released; the smallest value is evicted
first. `floor` is the value of the last eviction, so a block released now has a higher value than an
equal one released long ago. `cost` is the cost of computing the block again, as a multiple of the
first block's:

    policy  value                  keeps
    lru     the time of release    blocks that were used last
    lfu     floor + uses           blocks used often, and not too long ago: LFU with dynamic aging
    cost    floor + uses · cost    the same, but prefers blocks deep in a long context, which
                                   attention makes expensive: Greedy-Dual-Size-Frequency

Source of the last two: Arlitt et al. 2000, *Evaluating content management techniques for Web proxy
caches*, for pages of one size. No block is evicted before its continuations, which could not be
found without it:

    a ─ b ─ c         a conversation; b has two continuations: c and d may go first, then b, then a
        └── d

A push, a pop and a removal take O(log n). Stale entries of the heap are skipped, and removed when
they are more than half.
"""

from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heappush

import msgspec

Value = Callable[[float, int, float, float], float]
"""(floor, time of release, uses, cost) → the value."""

POLICIES: dict[str, Value] = {
    "lru": lambda floor, tick, uses, cost: tick,
    "lfu": lambda floor, tick, uses, cost: floor + uses,
    "cost": lambda floor, tick, uses, cost: floor + uses * cost,
}
STALE_AT_LEAST = 64


class EvictionEntry(msgspec.Struct, eq=False, gc=False):
    """Block in the queue: its value, the time of its release, and its parent.

    There are as many as blocks, so they are hidden from the garbage collector.
    """

    value: float
    tick: int
    parent: Hashable


class EvictionQueue:
    """Keys of free cached blocks, each after its continuations."""

    __slots__ = ("_continued", "_entries", "_floor", "_heap", "_tick", "_value")

    def __init__(self, policy: str) -> None:
        self._value = POLICIES[policy]
        self._entries: dict[Hashable, EvictionEntry] = {}
        self._continued: dict[Hashable, int] = {}
        """Key → number of its continuations in the queue."""
        self._heap: list[tuple[float, int, Hashable]] = []
        self._floor = 0.0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: Hashable, parent: Hashable, uses: float, cost: float) -> None:
        """Add a released block; `parent` is the key of the block that it continues."""
        assert key not in self._entries
        tick = self._tick = self._tick + 1
        self._entries[key] = EvictionEntry(self._value(self._floor, tick, uses, cost), tick, parent)
        continued = self._continued
        continued[parent] = continued.get(parent, 0) + 1
        if key not in continued:
            self._offer(key)

    def remove(self, key: Hashable) -> None:
        """Remove a block that is in use again, or is no longer cached."""
        parent = self._entries.pop(key).parent
        remaining = self._continued[parent] - 1
        if remaining:
            self._continued[parent] = remaining
            return
        del self._continued[parent]
        if parent in self._entries:
            self._offer(parent)

    def pop(self) -> Hashable:
        """Remove and return the key of least value; the queue must not be empty."""
        while True:
            value, tick, key = heappop(self._heap)
            if self._is_offered(key, tick):
                self._floor = max(self._floor, value)
                self.remove(key)
                return key

    def _is_offered(self, key: Hashable, tick: int) -> bool:
        """Return whether the heap's entry is current and the key has no continuation queued."""
        entry = self._entries.get(key)
        return entry is not None and entry.tick == tick and key not in self._continued

    def _offer(self, key: Hashable) -> None:
        entry = self._entries[key]
        heappush(self._heap, (entry.value, entry.tick, key))
        if len(self._heap) > 2 * len(self._entries) + STALE_AT_LEAST:
            self._heap = [
                (entry.value, entry.tick, key)
                for key, entry in self._entries.items()
                if key not in self._continued
            ]
            heapify(self._heap)

    def check_integrity(self, keys: Iterable[Hashable]) -> None:
        """Assert that exactly `keys` are queued, and that each evictable one is in the heap."""
        assert set(keys) == set(self._entries), "the queue holds other blocks than are free"
        continued: dict[Hashable, int] = {}
        for entry in self._entries.values():
            continued[entry.parent] = continued.get(entry.parent, 0) + 1
        assert continued == self._continued, "continuations are counted wrongly"
        offered = {key for _, tick, key in self._heap if self._is_offered(key, tick)}
        assert offered == self._entries.keys() - continued.keys(), "a block can never go"
