"""The group of states: which block of a sequence holds what its layers know of all its tokens.

The state behind token t lies in the block of the table where t's keys would, so it is a window of
two tokens: the next token finds there what the one before it left, and what is not the newest is
given back. But a block is a whole state, so most entries are the null block: a sequence takes its
block along to where its newest token is. It leaves it behind where others may begin, which is at a
*checkpoint*, behind a full block. So a state that can be found is never written to again. Worked
example, blocks of 4, a checkpoint each 2 blocks, a prompt of 18 tokens in chunks of 9:

    9 computed    [0 5 6]           5: behind token 7, the checkpoint; 6: behind token 8
    18 computed   [0 0 0 7 6]       5 is given back, and listed; 7: behind token 15
    22 computed   [0 0 0 0 0 6]     7 too
    another       [0 0 0 7]         16 tokens found: it reads 7, and writes to a block of its own

Besides, there is one behind the last full block of a prompt, and where another prompt went on
otherwise than one that came before: its keys and values were found further than its states.
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
    """The group's index, and the number of blocks from one checkpoint to the next; 0: none."""

    group: int
    every: int
    block_size: int

    @classmethod
    def of(cls, config: CacheConfig, num_groups: int) -> Self | None:
        """Where the model keeps states, which is the last group then."""
        if not config.state_every:
            return None
        every = config.state_every if config.prefix_cache else 0
        return cls(num_groups - 1, every, config.block_size)

    def lists(self, sequence: Sequence, group: int, at: int) -> bool:
        """Whether others may find this block of a group: of states, where there is a checkpoint."""
        return group != self.group or self.is_checkpoint(sequence, at)

    def is_checkpoint(self, sequence: Sequence, at: int) -> bool:
        """Whether the state behind the block at this place of the table is kept for others."""
        if not self.every:
            return False
        last = (sequence.num_prompt - 1) // self.block_size - 1
        return (at + 1) % self.every == 0 or at == last or at == sequence.parts_at

    def note_parting(
        self,
        sequence: Sequence,
        chain: Chain,
        count: int,
        most: int,
        here: TypingSequence[Container[bytes]],
    ) -> None:
        """Let a newcomer leave a state where keys and values are found, beyond its `count` blocks
        that all groups hold."""
        held = count
        while held < most and all(chain.key(held) in keys for keys in here[: self.group]):
            held += 1
        sequence.parts_at = held - 1 if held > count else -1

    @staticmethod
    def is_own(sequence: Sequence, pool: BlockPool) -> bool:
        """Return whether the newest block has one reference: the sequence may move it along."""
        table = sequence.block_tables[-1]
        return bool(table) and pool.references[table[-1]] == 1

    def num_new(self, sequence: Sequence, pool: BlockPool, needed: int, copied: bool) -> int:
        """Blocks that `needed` more entries of the table take, where one is `copied` before."""
        return copied + (needed > 0 and not copied and not self.is_own(sequence, pool))

    def extend(self, sequence: Sequence, pool: BlockPool, needed: int) -> list[int]:
        """`needed` more entries of the table: the last is the block that is written to.

        Where no block is free a checkpoint is left out.
        """
        if not needed:
            return []
        table = sequence.block_tables[self.group]
        begin = len(table)
        if self.is_own(sequence, pool) and not (self._stays(sequence, pool) and pool.num_free):
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

    def _stays(self, sequence: Sequence, pool: BlockPool) -> bool:
        """Whether the newest block can be found, or will be when this chunk has passed its end."""
        table = sequence.block_tables[self.group]
        begun = sequence.computed % self.block_size > 0
        return pool.is_listed(table[-1]) or (begun and self.is_checkpoint(sequence, len(table) - 1))


def whole_tables(states: States | None, sequence: Sequence) -> list[list[int]]:
    """The block tables as a runtime that does not know `sequence` has to have them."""
    tables = [list(table) for table in sequence.block_tables]
    if states is not None and sequence.computed:
        read = (sequence.computed - 1) // states.block_size
        if tables[-1][read] == NULL_BLOCK:  # taken along to the end: it is read from there
            tables[-1][read] = tables[-1][-1]
    return tables
