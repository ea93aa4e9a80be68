"""KV blocks on a disk: what goes there, when, and what is there. The runtime writes and reads.

Given what `KVCache` lists it writes blocks that were used twice or are dear to compute, at most so
many bytes a second; with `through` each as it is full.
"""

from collections import deque
from collections.abc import Callable

from headway.core.clock import Clock
from headway.core.plan import TierNews, Transfer
from headway.engine.kv.pool import BlockPool
from headway.perf.model import StepModel
from headway.perf.rates import ReadRate

DISK = "disk"
DEAR = 20.0
"""A block is dear when computing it takes so many times longer than reading it."""
MOST_BLOCKS = 64
"""Blocks that one step hands over: 1.5 MB of headway-tiny, gathered in 0.3 ms."""
DELAY_S = 0.2
"""How long a busy engine collects blocks, for one gathering costs as much as several."""


class DiskTier:
    """What the disk holds by KV group, and the queue of what may go there.

    `write_bytes_s` limits the writing; 0 writes through, without a limit.
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
        """Whether each block is written as it is full."""
        return not self.write_bytes_s

    def read_s(self, num_bytes: int) -> float:
        """Predicted seconds of a read."""
        return self.rate.read_s(num_bytes)

    def doubt(self) -> None:
        """A read seemed too slow: nothing is measured then."""
        self.rate.doubt()

    def offer(self, group: int, block: int, key: bytes) -> None:
        """`block` is listed under `key`, or was found again: it may be worth writing."""
        if key in self.held[group]:
            return
        if not self._queue:
            self._since_s = self.clock.now_s()
        if len(self._queue) < 2 * len(self.pools) * self.pools[group].num_blocks:
            self._queue.append((group, block, key))

    @property
    def has_due(self) -> bool:
        """Whether an engine without other work has blocks to hand over now."""
        return bool(self.forgotten) or (bool(self._queue) and self._earned() > 0)

    @property
    def due_at_s(self) -> float:
        """When the limit lets the next block be written; infinite where none waits."""
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
        """The transfers that hand blocks over in this step, one for each KV group at most."""
        waited_s = self.clock.now_s() - self._since_s
        if not self._queue or not (
            is_idle or len(self._queue) >= MOST_BLOCKS or waited_s > DELAY_S
        ):
            return []
        chosen: dict[int, Transfer] = {}
        count, credit = 0, self._earned()
        while self._queue and credit > 0 and count < MOST_BLOCKS:
            group, block, key = self._queue.popleft()
            index = self.pools[group].index
            cached = index.cached[block] if index is not None else None
            if cached is None or cached.key != key or key in self.held[group]:
                continue
            if not (self.through or cached.uses > 1 or self.is_dear(group)):
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

    def is_dear(self, group: int) -> bool:
        """Whether computing a block takes far longer than reading it."""
        tokens_s = self.cost.prefill_s(self.block_size, 0, self.chunk)
        return tokens_s >= DEAR * self.block_bytes[group] * self.rate.byte_s

    def take(self, news: TierNews) -> None:
        """What the disk has come to hold or lost."""
        for group, key in news.kept:
            if group < len(self.held):
                self.held[group].add(key)
        for group, key in news.lost:
            if group < len(self.held):
                self.held[group].discard(key)
        self.num_bad += news.num_bad

    def take_forgotten(self) -> list[bytes]:
        """The owners that the runtime has yet to be told of."""
        forgotten, self.forgotten = self.forgotten, []
        return forgotten
