"""All KV groups of a model: each sequence has one block table per group.

Given a sequence and how many tokens it will have computed, `extend` makes room in every group or in
none. A block that several sequences refer to is immutable: the first to write into it gets a copy.
Worked example, blocks of 4, a prompt of 6 tokens sampled twice (n = 2):

    parent   [a b]         6 tokens computed, its first answer token goes to slot 2 of b
    child    [a b]         fork at 5: shares both, and computes token 5 again for its own sample
    child writes slot 1 of b  → copy b to c: child [a c], parent [a b]
"""

from collections.abc import Iterable

from headway.core.plan import BlockCopy
from headway.engine.kv.pool import BlockPool
from headway.engine.sequence import Sequence


class KVCache:
    """Block pools by group, and the operations on a sequence's block tables."""

    def __init__(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        self.block_size = block_size
        self.pools = [BlockPool(count) for count in num_blocks]

    @property
    def usage(self) -> float:
        """Share of the blocks in use, of the fullest group."""
        return max(pool.num_used / (pool.num_blocks - 1) for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks in use over all groups."""
        return sum(pool.num_used for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`: 17 tokens in blocks of 16 → 2."""
        return -(-num_tokens // self.block_size)

    def has_room(self, num_blocks: int) -> bool:
        """Whether every group has this many free blocks."""
        return all(pool.num_free >= num_blocks for pool in self.pools)

    def extend(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[list[list[int]], list[BlockCopy]] | None:
        """Make room for the first `num_tokens` of `sequence`.

        Returns the new block ids per group and the copies to make, or None, with nothing changed,
        when a group has no room.
        """
        tables = sequence.block_tables
        needed = self.blocks_for(num_tokens) - len(tables[0])
        first_written = sequence.computed // self.block_size
        copies_needed = False
        if sequence.shares_blocks and first_written < len(tables[0]):
            copies_needed = any(
                pool.references[table[first_written]] > 1
                for pool, table in zip(self.pools, tables, strict=True)
            )
            sequence.shares_blocks = copies_needed
        if not self.has_room(max(needed, 0) + copies_needed):
            return None
        copies = self._unshare(sequence, first_written) if copies_needed else []
        new: list[list[int]] = []
        for pool, table in zip(self.pools, tables, strict=True):
            blocks = [pool.take() for _ in range(needed)]
            table.extend(blocks)
            new.append(blocks)
        return new, copies

    def _unshare(self, sequence: Sequence, index: int) -> list[BlockCopy]:
        """Give `sequence` a block of its own at `index` where it shares it with others.

        Only the block written next can be shared and partly filled; those before it are full and
        stay shared, those after it do not exist yet.
        """
        copies = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
            source = table[index]
            if pool.references[source] > 1:
                table[index] = pool.take()
                pool.release(source)
                copies.append(BlockCopy(sequence.sequence_id, index, group, source, table[index]))
        sequence.shares_blocks = False
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child` share the blocks that hold the first `num_tokens` of `parent`."""
        assert num_tokens <= parent.computed and not any(child.block_tables)
        count = self.blocks_for(num_tokens)
        for pool, source, target in zip(
            self.pools, parent.block_tables, child.block_tables, strict=True
        ):
            for block in source[:count]:
                pool.share(block)
            target.extend(source[:count])
        child.computed = num_tokens
        child.shares_blocks = parent.shares_blocks = count > 0

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of `sequence`; nothing of it is computed any more."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            for block in reversed(table):
                pool.release(block)
            table.clear()
        sequence.computed = 0
        sequence.shares_blocks = False

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that pools and block tables agree, and that tables hold what is computed."""
        sequences = list(sequences)
        for group, pool in enumerate(self.pools):
            pool.check_integrity([sequence.block_tables[group] for sequence in sequences])
        for sequence in sequences:
            for table in sequence.block_tables:
                assert len(table) >= self.blocks_for(sequence.computed), "computed without a block"
