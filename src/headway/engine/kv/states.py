"""Group of recurrent states: which block of a sequence holds the state after which token.

The state after token t is in the table entry where t's keys would be, so it is a window of two
tokens: the next token reads what the one before it wrote, and older entries are released. But a
block is a whole state, so most entries are the null block: a sequence moves its block to the entry
of its newest token. It leaves a copy where others may start, at a *checkpoint* after a full block.
So a listed state is never written to again. Worked example, blocks of 4, a checkpoint every 2
blocks, a prompt of 18 tokens in chunks of 9:

    9 computed    [0 5 6]           5: after token 7, the checkpoint; 6: after token 8
    18 computed   [0 0 0 7 6]       5 is released, and listed; 7: after token 15
    22 computed   [0 0 0 0 0 6]     7 is released too
    another       [0 0 0 7]         16 tokens cached: it reads 7, and writes to a block of its own

There are also checkpoints after the last full block of a prompt, and where a prompt diverged from
an earlier one: its keys and values were found further than its states.
"""

from collections.abc import Container
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass
from typing import Self

from headway.config.cache_config import CacheConfig
from headway.core.plan import NULL_BLOCK
from headway.engine.chain import Chain
from headway.engine.kv.pool import BlockPool
from headway.engine.sequence import Sequence


@dataclass(slots=True)
class States:
    """The group's index, and the number of blocks between checkpoints; 0: none."""

    group: int
    every: int
    block_size: int

    @classmethod
    def of(cls, config: CacheConfig, num_groups: int) -> Self | None:
        """Return the group of states, which is the last one; None for a model without states."""
        if not config.state_every:
            return None
        every = config.state_every if config.prefix_cache else 0
        return cls(num_groups - 1, every, config.block_size)

    def lists(self, sequence: Sequence, group: int, at: int) -> bool:
        """Return whether others may find this block; of states only a checkpoint."""
        return group != self.group or self.is_checkpoint(sequence, at)

    def is_checkpoint(self, sequence: Sequence, at: int) -> bool:
        """Return whether the state after this entry of the table is kept for others."""
        if not self.every:
            return False
        last = (sequence.num_prompt - 1) // self.block_size - 1
        return (at + 1) % self.every == 0 or at == last or at == sequence.diverges_at

    def set_divergence(
        self,
        sequence: Sequence,
        chain: Chain,
        count: int,
        most: int,
        here: TypingSequence[Container[bytes]],
    ) -> None:
        """Set a checkpoint where the cached keys and values of a new sequence end, if that is
        beyond the `count` blocks that all groups hold."""
        held = count
        while held < most and all(chain.key(held) in keys for keys in here[: self.group]):
            held += 1
        sequence.diverges_at = held - 1 if held > count else -1

    @staticmethod
    def is_own(sequence: Sequence, pool: BlockPool) -> bool:
        """Return whether the newest block has one reference, so that the sequence may move it."""
        table = sequence.block_tables[-1]
        return bool(table) and pool.references[table[-1]] == 1

    def num_new(self, sequence: Sequence, pool: BlockPool, needed: int, copied: bool) -> int:
        """Return the blocks that `needed` more entries take, where one is `copied` before."""
        return copied + (needed > 0 and not copied and not self.is_own(sequence, pool))

    def extend(self, sequence: Sequence, pool: BlockPool, needed: int) -> list[int]:
        """Add `needed` entries to the table and return them; the last is the block to write.

        Without a free block a checkpoint is left out.
        """
        if not needed:
            return []
        table = sequence.block_tables[self.group]
        begin = len(table)
        if self.is_own(sequence, pool) and not (
            self._stays_listed(sequence, pool) and pool.num_free
        ):
            newest, table[-1] = table[-1], NULL_BLOCK
            if pool.is_listed(newest):
                pool.forget(newest)
        else:
            newest = pool.take()
        for at in range(begin, begin + needed - 1):
            stays = pool.num_free > 0 and self.is_checkpoint(sequence, at)
            table.append(pool.take() if stays else NULL_BLOCK)
        table.append(newest)
        return table[begin:]

    def _stays_listed(self, sequence: Sequence, pool: BlockPool) -> bool:
        """Return whether the newest block is listed, or will be after this chunk."""
        table = sequence.block_tables[self.group]
        begun = sequence.computed % self.block_size > 0
        return pool.is_listed(table[-1]) or (begun and self.is_checkpoint(sequence, len(table) - 1))


def whole_tables(states: States | None, sequence: Sequence) -> list[list[int]]:
    """Return the block tables for a runtime that does not know `sequence`."""
    tables = [list(table) for table in sequence.block_tables]
    if states is not None and sequence.computed:
        read = (sequence.computed - 1) // states.block_size
        if tables[-1][read] == NULL_BLOCK:  # the state was moved to the last entry
            tables[-1][read] = tables[-1][-1]
    return tables
