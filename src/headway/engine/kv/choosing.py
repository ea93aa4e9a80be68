"""Groups whose layers keep a part of a prompt's KV: when a table shrinks, and its need for blocks.

The prompt is computed and its blocks are listed as usual. With the next token the table of each
such group is replaced by one that is `sequence.dropped` blocks shorter and holds the kept tokens
and all later ones; the prompt's own blocks are released, and stay findable until they are evicted.
Worked example, blocks of 4, a prompt of 18 tokens that shrinks by 2 blocks:

    18 computed   [3 8 1 5 2]          token 17 is in block 2, slot 1
    19 computed   [9 4 7]              10 tokens are kept; token 18 is in block 7, slot 2
    23 computed   [9 4 7 6]            token 22: entry 22 // 4 - 2, slot 2

So for one step a sequence holds both tables, and must find room for both when it starts. A
preempted sequence computes its prompt, chooses the same tokens again, and computes its answer after
them.
"""

from dataclasses import dataclass, field
from typing import Self

from headway.config.cache_config import CacheConfig
from headway.config.kv_keep import blocks_dropped
from headway.core.plan import BlockCopy, Shrink
from headway.engine.kv.pool import BlockPool
from headway.engine.sequence import Sequence


@dataclass(slots=True)
class Choosing:
    """The groups that choose, and the tables that shrink with the plan in preparation."""

    groups: tuple[int, ...]
    block_size: int
    shrinks: list[Shrink] = field(default_factory=list)

    @classmethod
    def of(cls, config: CacheConfig) -> Self | None:
        """Return the groups that choose, or None."""
        return cls(config.choosing, config.block_size) if config.choosing else None

    def take(self) -> list[Shrink]:
        """Return the shrinks of this plan, for the runtime."""
        shrinks, self.shrinks = self.shrinks, []
        return shrinks

    def num_to_drop(self, sequence: Sequence) -> int:
        """Return by how many blocks its tables have yet to shrink; 0 if they have, or never do."""
        if sequence.kv_keep >= 1 or any(sequence.dropped):
            return 0
        return blocks_dropped(sequence.kv_keep, sequence.chooses_at, self.block_size)

    def cut(self, sequence: Sequence, count: int) -> int:
        """Limit `count` to the end of the part to choose from, where the table shrinks."""
        missing = sequence.chooses_at - sequence.computed
        return min(count, missing) if missing > 0 and self.num_to_drop(sequence) else count

    def num_due(self, sequence: Sequence) -> int:
        """Return `num_to_drop` if all tokens to choose from are computed, else 0."""
        return self.num_to_drop(sequence) if sequence.computed >= sequence.chooses_at else 0

    def most_blocks(self, sequence: Sequence, everything: int) -> list[int]:
        """Return by group the maximum of blocks, if its tokens take `everything`."""
        num_to_drop = self.num_to_drop(sequence)
        blocks = [everything - count for count in sequence.dropped]
        for group in self.groups if num_to_drop else ():
            blocks[group] += -(-sequence.chooses_at // self.block_size) - num_to_drop
        return blocks

    def extend(
        self, pools: list[BlockPool], sequence: Sequence, num_tokens: int
    ) -> tuple[list[list[int]], list[BlockCopy]] | None:
        """Return as `KVCache.extend`, for tables shorter than their tokens, or shrinking now."""
        due, first = self.num_due(sequence), sequence.computed // self.block_size
        needed = self._needed(sequence, num_tokens, due)
        copied = self._copied(pools, sequence, first, due)
        if any(
            pool.num_free < count + (group in copied)
            for group, (pool, count) in enumerate(zip(pools, needed, strict=True))
        ):
            return None
        sequence.shares_blocks = False
        copies = [
            unshare(sequence, group, first - sequence.dropped[group], pools[group])
            for group in copied
        ]
        new = [
            [pool.take() for _ in range(count)] for pool, count in zip(pools, needed, strict=True)
        ]
        for group in self.groups if due else ():
            new[group] = self._shrink(pools[group], sequence, group, due, new[group])
        for table, blocks in zip(sequence.block_tables, new, strict=True):
            table.extend(blocks)
        return new, copies

    def _needed(self, sequence: Sequence, num_tokens: int, due: int) -> list[int]:
        """Return by group the blocks to take; a table that shrinks takes all its blocks anew."""
        everything = -(-num_tokens // self.block_size)
        pairs = zip(sequence.block_tables, sequence.dropped, strict=True)
        needed = [max(everything - dropped - len(table), 0) for table, dropped in pairs]
        for group in self.groups if due else ():
            needed[group] = everything - due
        return needed

    def _copied(
        self, pools: list[BlockPool], sequence: Sequence, first: int, due: int
    ) -> list[int]:
        """Return the groups in which the block to write is shared with other sequences."""
        if not sequence.shares_blocks:
            return []
        groups = []
        for group, (pool, table) in enumerate(zip(pools, sequence.block_tables, strict=True)):
            at = first - sequence.dropped[group]
            is_new = due and group in self.groups
            if not is_new and at < len(table) and pool.is_immutable(table[at]):
                groups.append(group)
        return groups

    def _shrink(
        self, pool: BlockPool, sequence: Sequence, group: int, due: int, blocks: list[int]
    ) -> list[int]:
        """Replace the table by the first of `blocks`; returns the others."""
        table, at = sequence.block_tables[group], sequence.chooses_at
        whole = -(-at // self.block_size)
        assert len(table) == whole, "the table has blocks after the part to choose from"
        chosen = blocks[: whole - due]
        self.shrinks.append(Shrink(sequence.sequence_id, group, at, list(table), chosen))
        for block in reversed(table):
            pool.release(block)
        table[:], sequence.dropped[group] = chosen, due
        return blocks[whole - due :]


def unshare(sequence: Sequence, group: int, index: int, pool: BlockPool) -> BlockCopy:
    """Replace the block at `index` of a table by an own one; returns the copy to make."""
    table = sequence.block_tables[group]
    source, table[index] = table[index], pool.take()
    pool.release(source)
    return BlockCopy(sequence.sequence_id, index, group, source, table[index])


def unshare_block(sequence: Sequence, index: int, pools: list[BlockPool]) -> list[BlockCopy]:
    """Replace the blocks of `sequence` at `index` that others need; returns the copies to make.

    Only the block written next can be shared and partly filled; those before it are full and stay
    shared, those after it do not exist yet.
    """
    immutable = [
        pool.is_immutable(t[index]) for pool, t in zip(pools, sequence.block_tables, strict=True)
    ]
    sequence.shares_blocks = False
    return [unshare(sequence, group, index, pools[group]) for group, k in enumerate(immutable) if k]
