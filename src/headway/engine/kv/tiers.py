"""Tiers below the device's KV memory: where a prefix is found, and whether to restore it.

This module decides, the runtime moves the bytes. Evicted blocks may be in host memory
(`host_tier.py`), full blocks on a disk (`disk_tier.py`), those of a handed-over sequence in the
engine that it comes from (`handover.py`). A cached prefix is restored if that is predicted to be
faster than computing it, by rates learned from earlier reads. Worked example, headway-tiny, 1,500
tokens of 1,536 bytes:

    computed   1,500 x 0.13 ms              195 ms
    restored   1 ms + 2.3 MB / 0.7 GB/s     4.3 ms, from a disk

A key counts as held as soon as its block is submitted. If the runtime has something else, or
nothing, it reports that, and the waiting sequence computes the tokens instead.
"""

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass
from functools import partial

from headway.config.cache_config import CacheConfig
from headway.core.clock import Clock
from headway.core.parcel import ENGINE
from headway.core.plan import NULL_BLOCK, Moved, TierNews, Transfer
from headway.core.records import StepRecord, TierUse
from headway.engine.chain import Chain
from headway.engine.kv.disk_tier import DiskTier
from headway.engine.kv.host import HostBlocks
from headway.engine.kv.host_tier import HostTier
from headway.engine.kv.peer import PeerExports
from headway.engine.kv.pool import BlockPool
from headway.engine.kv.prefix import (
    Cached,
    Hit,
    PrefixIndex,
    Read,
    Tier,
    blocks_held,
    find_partial_below,
    first_visible,
    live_of,
    with_gap,
)
from headway.perf.model import StepModel
from headway.perf.rates import CopyRate, ReadRate

DEVICE = "device"
OPEN_WINDOW = 1
"""The open block is a window of one token: the block that contains it."""
ENGINE_BYTE_S = 1 / 1e9
"""Seconds per byte from another engine over a socket, until it was measured."""
READ_LIMIT_FACTOR, MIN_READ_LIMIT_S = 2.0, 0.5
"""A read is given up after this multiple of its predicted time, and at least these seconds."""


@dataclass(slots=True)
class AnyOf(Container[bytes]):
    """Keys that at least one of several containers holds."""

    several: list[Container[bytes]]

    def __contains__(self, key: object) -> bool:
        return any(key in one for one in self.several)


class Tiers:
    """Tiers below `pools`, the fastest first; `host` and `disk` may be None.

    A block of each KV group takes `block_bytes`; `are_open` marks groups that see only the block of
    the next token; `chunk` is the maximum number of prompt tokens of a step.
    """

    def __init__(
        self,
        pools: list[BlockPool],
        block_bytes: tuple[int, ...],
        cost: StepModel,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        are_open: TypingSequence[bool],
        block_size: int,
        chunk: int,
    ) -> None:
        self.pools, self.block_bytes, self.cost = pools, block_bytes, cost
        self.host, self.disk = host, disk
        self.are_open, self.block_size, self.chunk = are_open, block_size, chunk
        self.engine_rate = ReadRate(ENGINE_BYTE_S)
        self.leaving = PeerExports()
        """Blocks to export to other engines."""
        self.num_failed = 0
        self.restore_s: dict[str, float] = {}
        for group, pool in enumerate(pools):
            pool.on_evicted = partial(self.evicted, group)

    # ── writing ─────────────────────────────────────────────────────────────────────────────

    def on_listed(self, group: int, block: int) -> None:
        """Offer a block that was listed, or reused, to the disk."""
        index = self.pools[group].index
        cached = None if index is None else index.cached[block]
        if self.disk is not None and cached is not None and self._is_read(group, cached):
            self.disk.offer(group, block, cached.key)

    def evicted(self, group: int, block: int, cached: Cached) -> None:
        """Offer a block that is about to be reused to host memory."""
        if self.host is not None and self._is_read(group, cached):
            self.host.evicted(group, block, cached)

    def _is_read(self, group: int, cached: Cached) -> bool:
        """Return whether a prompt with this prefix reads the block.

        A full block of an open group is never read.
        """
        return not (self.are_open[group] and cached.num_tokens == self.block_size)

    @property
    def has_due(self) -> bool:
        """Return whether an engine without other work has blocks to submit now."""
        return bool(self.leaving) or (self.disk is not None and self.disk.has_due)

    @property
    def due_at_s(self) -> float:
        """Return when the rate allows the next write; infinite if none waits."""
        return self.disk.due_at_s if self.disk is not None else float("inf")

    def spills(self, next_id: Callable[[], int], *, is_idle: bool) -> list[Transfer]:
        """Return the transfers that write blocks in this step."""
        out = self.leaving.spills(next_id)
        if self.host is not None:
            out += self.host.spills(next_id)
        if self.disk is not None:
            out += self.disk.spills(next_id, is_idle=is_idle)
        return out

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def find(
        self,
        chain: Chain,
        num_cached: int,
        most: int,
        indexes: TypingSequence[PrefixIndex],
        windows: TypingSequence[int],
        sink_blocks: TypingSequence[int],
        source: Tier | None = None,
        *,
        partly: bool = True,
    ) -> Hit | None:
        """Return a longer prefix than `num_cached` tokens, of `most`, with the help of the tiers.

        `source` is an additional tier of this sequence. With `partly` it may end within a block.
        None if there is none, or if computing is predicted to be faster, with all tiers and with
        the fastest alone.
        """
        tiers: list[Tier] = [tier for tier in (self.host, source, self.disk) if tier is not None]
        while tiers:
            hit = self._find_in(
                tiers, chain, num_cached, most, indexes, windows, sink_blocks, partly
            )
            if hit is None:
                return None
            if self.read_s(hit.reads) < self.recompute_s(hit.num_tokens, num_cached):
                return hit
            tiers.pop().doubt()
        return None

    def _find_in(
        self,
        tiers: list[Tier],
        chain: Chain,
        num_cached: int,
        most: int,
        indexes: TypingSequence[PrefixIndex],
        windows: TypingSequence[int],
        sink_blocks: TypingSequence[int],
        partly: bool,
    ) -> Hit | None:
        size = self.block_size
        either = [
            AnyOf([index.block_of, *(tier.held[group] for tier in tiers)])
            for group, index in enumerate(indexes)
        ]
        deep = blocks_held(chain, most // size, either, size, windows, sink_blocks)
        keys, end = [chain.key(at) for at in range(deep)], deep * size
        begun = find_partial_below(chain, deep, most - end, either, size) if partly else None
        if begun is not None:
            keys.append(begun[0])
            end += begun[1]
        if end <= num_cached:
            return None
        first_live = [first_visible(end, window) // size for window in windows]
        tables: list[list[int]] = []
        reads: list[Read] = []
        for group, index in enumerate(indexes):
            first, num_sinks = first_live[group], sink_blocks[group]
            places = live_of(list(range(len(keys))), first, num_sinks)
            own = [index.block_of.get(keys[at], NULL_BLOCK) for at in places]
            tables.append(with_gap(own, first, num_sinks))
            for at, block in zip(places, own, strict=True):
                if block == NULL_BLOCK:
                    tier = next(tier for tier in tiers if keys[at] in tier.held[group])
                    reads.append(Read(group, at, keys[at], tier))
        return Hit(
            num_tokens=end,
            tables=tables,
            first_live=first_live,
            is_partial=begun is not None and any(table[-1] != NULL_BLOCK for table in tables),
            reads=reads,
            restored=self._restored(reads, num_cached, end),
        )

    def _restored(self, reads: list[Read], num_cached: int, end: int) -> dict[str, int]:
        """Return tier → tokens from `num_cached` to `end`; of several tiers the slowest counts."""
        slowest: dict[int, Read] = {}
        for read in reads:
            other = slowest.get(read.at)
            size = self.block_bytes[read.group]
            if other is None or read.tier.read_s(size) > other.tier.read_s(size):
                slowest[read.at] = read
        restored: dict[str, int] = {}
        for at in sorted(slowest):
            first, last = at * self.block_size, (at + 1) * self.block_size
            count = min(last, end) - max(first, num_cached)
            if count > 0:
                name = slowest[at].tier.name
                restored[name] = restored.get(name, 0) + count
        return restored

    def reuse(self, hit: Hit) -> None:
        """Pin and count the blocks of a hit that a new sequence starts with.

        Its host blocks are pinned until they are copied. Its device blocks count as used again,
        except a partial one: a fuller one will take its place.
        """
        for read in hit.reads:
            if self.host is not None and read.tier is self.host:
                self.host.blocks.pin(read.group, read.key)
        for group, table in enumerate(hit.tables):
            for block in table[: len(table) - hit.is_partial]:
                if block != NULL_BLOCK:
                    self.on_listed(group, block)

    def recompute_s(self, end: int, start: int) -> float:
        """Return the predicted seconds to compute tokens `start` … `end` - 1."""
        return self.cost.predict_prefill_s(end - start, start, self.chunk)

    def bytes_of(self, reads: Iterable[Read]) -> int:
        """Return the bytes of these reads."""
        return sum(self.block_bytes[read.group] for read in reads)

    def read_s(self, reads: Iterable[Read]) -> float:
        """Return the predicted seconds of these reads, one tier after the other."""
        num_bytes: dict[str, int] = {}
        tiers: dict[str, Tier] = {}
        for read in reads:
            tiers[read.tier.name] = read.tier
            size = self.block_bytes[read.group]
            num_bytes[read.tier.name] = num_bytes.get(read.tier.name, 0) + size
        return sum(tier.read_s(num_bytes[name]) for name, tier in tiers.items())

    def limit_s(self, reads: Iterable[Read], recompute_s: float = 0.0) -> float:
        """Return the seconds after which reads are given up: far beyond their predicted time.

        It is at least the time to compute the tokens, so a first token takes at most twice as long
        as without tiers.
        """
        return max(READ_LIMIT_FACTOR * self.read_s(reads), MIN_READ_LIMIT_S, recompute_s)

    def take(self, moved: Iterable[Moved], news: TierNews | None) -> None:
        """Take what the runtime has moved, and what the disk has stored or lost."""
        for one in moved:
            if one.direction == "in":
                self.num_failed += not one.moved_bytes
                self.restore_s[one.peer] = self.restore_s.get(one.peer, 0.0) + one.seconds
                rate = self._rate_of(one.peer)
                if rate is not None:
                    rate.observe(one)
        if news is not None and self.disk is not None:
            self.disk.take(news)

    def _rate_of(self, peer: str) -> ReadRate | None:
        if peer.startswith(ENGINE):
            return self.engine_rate
        return self.disk.rate if self.disk is not None else None

    def tell(self, record: StepRecord) -> None:
        """Add to `record` what each tier holds, and the failed reads since the last record."""
        keys = [pool.num_cached for pool in self.pools]
        uses = [self._use(DEVICE, keys)]
        for tier in (self.host, self.disk):
            if tier is not None:
                uses.append(self._use(tier.name, [len(each) for each in tier.held]))
        record.kv_tiers = tuple(uses)
        record.num_failed_reads, self.num_failed = self.num_failed, 0
        record.restore_s, self.restore_s = self.restore_s, {}
        if self.disk is not None:
            record.num_bad_blocks, self.disk.num_bad = self.disk.num_bad, 0

    def _use(self, name: str, keys: list[int]) -> TierUse:
        """Return the bytes of these numbers of keys by KV group."""
        return TierUse(name, sum(n * size for n, size in zip(keys, self.block_bytes, strict=True)))

    # ── dropping ────────────────────────────────────────────────────────────────────────────

    def forget(self, owner: bytes) -> None:
        """Drop the blocks of `owner`; a disk erases them, and reports the erased keys."""
        if self.host is not None:
            self.host.blocks.forget(owner)
        if self.disk is not None:
            self.disk.forgotten.append(owner)

    def take_forgotten(self) -> list[bytes]:
        """Return the owners to erase that the runtime does not know yet."""
        return self.disk.take_forgotten() if self.disk is not None else []


def make_tiers(
    pools: list[BlockPool],
    config: CacheConfig,
    cost: StepModel,
    clock: Clock,
    chunk: int,
    host_blocks: HostBlocks,
    copy_rate: CopyRate,
) -> Tiers:
    """Return the tiers below `pools` that the settings enable."""
    host = disk = None
    if config.host_blocks and not config.state_every:  # states go there when they are preempted
        host = HostTier(
            host_blocks,
            config.block_bytes,
            cost,
            copy_rate,
            block_size=config.block_size,
            chunk=chunk,
        )
    if config.disk_bytes:
        disk = DiskTier(
            pools,
            config.block_bytes,
            cost,
            clock,
            write_bytes_s=config.disk_write_bytes_s,
            block_size=config.block_size,
            chunk=chunk,
        )
    return Tiers(
        pools,
        config.block_bytes,
        cost,
        host=host,
        disk=disk,
        are_open=[window == OPEN_WINDOW for window in config.windows] + [True] * config.open_blocks,
        block_size=config.block_size,
        chunk=chunk,
    )
