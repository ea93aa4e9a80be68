"""Which cached block goes first when a block is needed: a heap, and a table of policies.

A block without a reference that a prompt may still find is given a value when it is released;
the smallest value goes first. `floor` is the value of what went last, so whatever is released now
counts more than the same thing released long ago; `cost` is what computing the block again takes,
as a multiple of the first block's:

    policy  value                  keeps
    lru     the time of release    what was used last
    lfu     floor + uses           what was used often, and not too long ago: LFU with dynamic aging
    cost    floor + uses · cost    the same, and rather what is deep in a long context, which
                                   attention makes dearer: Greedy-Dual-Size-Frequency

Both of the last two are Arlitt et al. 2000, *Evaluating content management techniques for Web
proxy caches*, for pages of one size. No block goes before its continuations, which could not be
found without it:

    a ─ b ─ c         a conversation; b is continued twice, c and d may go first, then b, then a
        └── d

A push, a pop and a removal take O(log n); what has become stale in the heap is passed over, and
swept away when it is more than half.
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
    """A block in the queue: its value, when it was released, and what it continues.

    There are as many as blocks, so the garbage collector does not look at them.
    """

    value: float
    tick: int
    parent: Hashable


class EvictionQueue:
    """Keys of blocks that are free and cached, each behind its continuations."""

    __slots__ = ("_continued", "_entries", "_floor", "_heap", "_tick", "_value")

    def __init__(self, policy: str) -> None:
        self._value = POLICIES[policy]
        self._entries: dict[Hashable, EvictionEntry] = {}
        self._continued: dict[Hashable, int] = {}
        """By key: how many of its continuations are in the queue."""
        self._heap: list[tuple[float, int, Hashable]] = []
        self._floor = 0.0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: Hashable, parent: Hashable, uses: float, cost: float) -> None:
        """The block of `key`, which continues that of `parent`, was released."""
        assert key not in self._entries
        tick = self._tick = self._tick + 1
        self._entries[key] = EvictionEntry(self._value(self._floor, tick, uses, cost), tick, parent)
        continued = self._continued
        continued[parent] = continued.get(parent, 0) + 1
        if key not in continued:
            self._offer(key)

    def remove(self, key: Hashable) -> None:
        """The block is in use again, or holds nothing any more."""
        parent = self._entries.pop(key).parent
        remaining = self._continued[parent] - 1
        if remaining:
            self._continued[parent] = remaining
            return
        del self._continued[parent]
        if parent in self._entries:
            self._offer(parent)

    def pop(self) -> Hashable:
        """Take out the key of least value; the queue is not empty."""
        while True:
            value, tick, key = heappop(self._heap)
            if self._is_offered(key, tick):
                self._floor = max(self._floor, value)
                self.remove(key)
                return key

    def _is_offered(self, key: Hashable, tick: int) -> bool:
        """Whether the heap's entry is the key's last and nothing in the queue continues it."""
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
        """Assert that exactly `keys` are queued, and each that may go is on offer."""
        assert set(keys) == set(self._entries), "the queue holds other blocks than are free"
        continued: dict[Hashable, int] = {}
        for entry in self._entries.values():
            continued[entry.parent] = continued.get(entry.parent, 0) + 1
        assert continued == self._continued, "continuations are counted wrongly"
        offered = {key for _, tick, key in self._heap if self._is_offered(key, tick)}
        assert offered == self._entries.keys() - continued.keys(), "a block can never go"
