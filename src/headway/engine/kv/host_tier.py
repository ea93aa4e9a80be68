"""Host tier of the prefix cache: evicted blocks are stored in host memory that preemption leaves.

`evicted` finds a place for a block that is about to be reused, and the runtime copies it before the
step writes anything. Preempted sequences have priority: they take lent blocks. On a CPU both
memories are the same, so the room would be as useful in `--kv-memory`, without copies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.plan import Transfer
from headway.engine.kv.host import HostBlocks
from headway.engine.kv.prefix import Cached
from headway.perf.model import StepModel
from headway.perf.rates import CopyRate

HOST = "host"
START_S = 0.0001
"""Seconds of a copy before its first byte."""
MIN_COMPUTE_RATIO = 20.0
"""A block is kept if computing it takes this many times longer than copying it."""


@dataclass(slots=True)
class HostSpills:
    """Blocks of one group that the next step copies before it writes."""

    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    owners: list[bytes] = field(default_factory=list)


class HostTier:
    """Evicted blocks that were used twice or are expensive to compute, in free blocks of `blocks`.

    `rate` has the seconds per byte between the two memories.
    """

    name = HOST

    def __init__(
        self,
        blocks: HostBlocks,
        block_bytes: tuple[int, ...],
        cost: StepModel,
        rate: CopyRate,
        *,
        block_size: int,
        chunk: int,
    ) -> None:
        self.blocks, self.block_bytes, self.rate = blocks, block_bytes, rate
        self.cost, self.block_size, self.chunk = cost, block_size, chunk
        self.held = blocks.lent
        self._leaving: dict[int, HostSpills] = {}

    def evicted(self, group: int, block: int, cached: Cached) -> None:
        """Store the content of `block`, which is about to be reused, if that is worthwhile."""
        key = cached.key
        if key in self.held[group]:
            self.blocks.touch(group, key)
        elif cached.uses > 1 or self.is_expensive(group):
            host_block = self.blocks.lend(group, key, cached.owner)
            if host_block is not None:
                leaving = self._leaving.setdefault(group, HostSpills())
                leaving.blocks.append(block)
                leaving.host_blocks.append(host_block)
                leaving.keys.append(key)
                leaving.owners.append(cached.owner)

    def spills(self, next_id: Callable[[], int]) -> list[Transfer]:
        """Return the transfers that copy evicted blocks, one per KV group."""
        out = [
            Transfer(
                next_id(), group, one.blocks, "out", HOST, one.host_blocks, one.keys, one.owners
            )
            for group, one in self._leaving.items()
        ]
        self._leaving = {}
        return out

    def is_expensive(self, group: int) -> bool:
        """Return whether computing a block takes far longer than copying it."""
        tokens_s = self.cost.predict_prefill_s(self.block_size, 0, self.chunk)
        return tokens_s >= MIN_COMPUTE_RATIO * self.block_bytes[group] * self.rate.byte_s

    def read_s(self, num_bytes: int) -> float:
        """Return the predicted seconds to copy these bytes back."""
        return START_S + num_bytes * self.rate.byte_s

    def doubt(self) -> None:
        """Record that a copy seemed too slow to start, so that the rate is measured again."""
        self.rate.doubt()
