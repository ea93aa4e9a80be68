"""Host memory as a tier of the prefix cache: what is evicted goes where preempted ones left room.

Given a block that is about to be given out, `evicted` finds it a place, and the runtime copies it
before the step writes anything. Preempted sequences go first: they take what is lent. On a CPU both
memories are one, so the room would do as much as `--kv-memory`, without copies.
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
"""What a copy takes before its first byte."""
DEAR = 20.0
"""A block is kept that takes so many times longer to compute than to copy."""


@dataclass(slots=True)
class HostSpills:
    """Blocks of one group that the next step copies before it writes."""

    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    owners: list[bytes] = field(default_factory=list)


class HostTier:
    """Blocks that were used twice, or are dear to compute, in the free ones of `blocks`.

    `rate` tells what a byte takes between the two memories.
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
        """`block` is about to be given out; keep what it holds where that is of use."""
        key = cached.key
        if key in self.held[group]:
            self.blocks.touch(group, key)
        elif cached.uses > 1 or self.is_dear(group):
            host_block = self.blocks.lend(group, key, cached.owner)
            if host_block is not None:
                leaving = self._leaving.setdefault(group, HostSpills())
                leaving.blocks.append(block)
                leaving.host_blocks.append(host_block)
                leaving.keys.append(key)
                leaving.owners.append(cached.owner)

    def spills(self, next_id: Callable[[], int]) -> list[Transfer]:
        """The transfers that copy what was evicted, one for each KV group."""
        out = [
            Transfer(
                next_id(), group, one.blocks, "out", HOST, one.host_blocks, one.keys, one.owners
            )
            for group, one in self._leaving.items()
        ]
        self._leaving = {}
        return out

    def is_dear(self, group: int) -> bool:
        """Whether computing a block takes far longer than copying it."""
        tokens_s = self.cost.prefill_s(self.block_size, 0, self.chunk)
        return tokens_s >= DEAR * self.block_bytes[group] * self.rate.byte_s

    def read_s(self, num_bytes: int) -> float:
        """Predicted seconds to copy so many bytes back."""
        return START_S + num_bytes * self.rate.byte_s

    def doubt(self) -> None:
        """A copy seemed too slow: nothing is measured then."""
        self.rate.doubt()
