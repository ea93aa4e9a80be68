"""Disk tier of the prefix cache: which blocks are written and when, and which are on the disk.

It writes listed blocks that were used twice or are expensive to compute, up to a rate in bytes per
second; with `through` it writes each block when it is full. The runtime writes and reads.
"""

from collections import deque
from collections.abc import Callable

from headway.core.clock import Clock
from headway.core.plan import TierNews, Transfer
from headway.engine.kv.pool import BlockPool
from headway.perf.model import StepModel
from headway.perf.rates import ReadRate

DISK = "disk"
MIN_COMPUTE_RATIO = 20.0
"""A block is expensive if computing it takes this many times longer than reading it."""
MAX_BLOCKS_PER_STEP = 64
"""Maximum blocks per step: 1.5 MB of headway-tiny, gathered in 0.3 ms."""
DELAY_S = 0.2
"""Seconds for which a busy engine collects blocks, because gathering has a fixed cost."""


class DiskTier:
    """Keys on the disk by KV group, and the queue of blocks to write.

    `write_bytes_s` is the maximum rate of writing; 0 writes through, without a limit.
    """

    name = DISK

    def __init__(
        self,
        pools: list[BlockPool],
        block_bytes: tuple[int, ...],
        cost: StepModel,
        clock: Clock,
        *,
        write_bytes_s: float,
        block_size: int,
        chunk: int,
    ) -> None:
        self.pools, self.block_bytes = pools, block_bytes
        self.cost, self.clock, self.chunk, self.block_size = cost, clock, chunk, block_size
        self.write_bytes_s = write_bytes_s
        self.held: list[set[bytes]] = [set() for _ in pools]
        self.rate = ReadRate()
        self.num_bad = 0
        self.forgotten: list[bytes] = []
        self._queue: deque[tuple[int, int, bytes]] = deque()
        self._since_s, self._credit, self._credited_s = 0.0, write_bytes_s, clock.now_s()

    @property
    def through(self) -> bool:
        """Return whether each block is written when it is full."""
        return not self.write_bytes_s

    def read_s(self, num_bytes: int) -> float:
        """Return the predicted seconds of a read."""
        return self.rate.read_s(num_bytes)

    def doubt(self) -> None:
        """Record that a read seemed too slow to start, so that the rate is measured again."""
        self.rate.doubt()

    def offer(self, group: int, block: int, key: bytes) -> None:
        """Queue `block`, which was listed or reused under `key`, as a candidate for writing."""
        if key in self.held[group]:
            return
        if not self._queue:
            self._since_s = self.clock.now_s()
        if len(self._queue) < 2 * len(self.pools) * self.pools[group].num_blocks:
            self._queue.append((group, block, key))

    @property
    def has_due(self) -> bool:
        """Return whether an engine without other work has blocks to write now."""
        return bool(self.forgotten) or (bool(self._queue) and self._earned() > 0)

    @property
    def due_at_s(self) -> float:
        """Return when the rate allows the next write; infinite with an empty queue."""
        if not self._queue:
            return float("inf")
        missing = -self._earned()
        return self.clock.now_s() + max(missing / (self.write_bytes_s or 1.0), 0.0)

    def _earned(self) -> float:
        if self.through:
            return 1.0
        now_s = self.clock.now_s()
        earned = (now_s - self._credited_s) * self.write_bytes_s
        self._credit = min(self._credit + earned, self.write_bytes_s)
        self._credited_s = now_s
        return self._credit

    def spills(self, next_id: Callable[[], int], *, is_idle: bool) -> list[Transfer]:
        """Return the transfers that write blocks in this step, at most one per KV group."""
        waited_s = self.clock.now_s() - self._since_s
        if not self._queue or not (
            is_idle or len(self._queue) >= MAX_BLOCKS_PER_STEP or waited_s > DELAY_S
        ):
            return []
        chosen: dict[int, Transfer] = {}
        count, credit = 0, self._earned()
        while self._queue and credit > 0 and count < MAX_BLOCKS_PER_STEP:
            group, block, key = self._queue.popleft()
            index = self.pools[group].index
            cached = index.cached[block] if index is not None else None
            if cached is None or cached.key != key or key in self.held[group]:
                continue
            if not (self.through or cached.uses > 1 or self.is_expensive(group)):
                continue
            if group not in chosen:
                chosen[group] = Transfer(next_id(), group, [], "out", DISK)
            chosen[group].blocks.append(block)
            chosen[group].keys.append(key)
            chosen[group].owners.append(cached.owner)
            self.held[group].add(key)
            count += 1
            if not self.through:
                credit -= self.block_bytes[group]
                self._credit = credit
        self._since_s = self.clock.now_s()
        return list(chosen.values())

    def is_expensive(self, group: int) -> bool:
        """Return whether computing a block takes far longer than reading it."""
        tokens_s = self.cost.predict_prefill_s(self.block_size, 0, self.chunk)
        return tokens_s >= MIN_COMPUTE_RATIO * self.block_bytes[group] * self.rate.byte_s

    def take(self, news: TierNews) -> None:
        """Update the keys that the disk has stored or lost."""
        for group, key in news.stored:
            if group < len(self.held):
                self.held[group].add(key)
        for group, key in news.lost:
            if group < len(self.held):
                self.held[group].discard(key)
        self.num_bad += news.num_bad

    def take_forgotten(self) -> list[bytes]:
        """Return the owners to erase that the runtime does not know yet."""
        forgotten, self.forgotten = self.forgotten, []
        return forgotten
