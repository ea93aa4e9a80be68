"""All KV groups of a model: each sequence has one block table per group.

Given a sequence and how many tokens it will have computed, `extend` makes room in every group or in
none. A block that several sequences refer to is immutable: the first to write into it gets a copy.
Worked example, blocks of 4, a prompt of 6 tokens sampled twice (n = 2):

    parent   [a b]         6 tokens computed, its first answer token goes to slot 2 of b
    child    [a b]         fork at 5: shares both, and computes token 5 again for its own sample
    child writes slot 1 of b  → copy b to c: child [a c], parent [a b]

A window group gives back what it can no longer see, before it takes more. With a window of 6 and
14 tokens computed, token 14 sees 9 … 14: blocks 0 and 1 are free, their entries the null block.

    full     [a b c d]
    window   [0 0 e f]     first_live 2
"""

from collections.abc import Iterable

from headway.core.plan import NULL_BLOCK, BlockCopy
from headway.engine.kv.pool import BlockPool
from headway.engine.sequence import Sequence


class KVCache:
    """Block pools by group, and the operations on a sequence's block tables.

    `windows` holds each group's window in tokens, 0 for full attention; `max_chunk` is the most
    tokens of one sequence that a step computes.
    """

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        block_size: int,
        windows: tuple[int, ...] = (),
        max_chunk: int = 1,
    ) -> None:
        self.block_size = block_size
        self.windows = windows or (0,) * len(num_blocks)
        self.max_chunk = max_chunk
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

    def still_needed(self, sequence: Sequence) -> list[int]:
        """Blocks by group that `sequence` will take, at its worst, to compute all it knows.

        A window group holds at most the window and one chunk: blocks of 4, a window of 6, chunks
        of 8 → (5 + 8) / 4, rounded up, and one for where they begin: 5.
        """
        missing = len(sequence.tokens) - sequence.computed
        everything = self.blocks_for(len(sequence.tokens))
        needed = []
        for group, window in enumerate(self.windows):
            most = everything
            if window:
                chunk = min(missing, self.max_chunk)
                most = min(everything, self.blocks_for(window - 1 + chunk) + 1)
            held = len(sequence.block_tables[group]) - sequence.first_live[group]
            needed.append(max(most - held, 0))
        return needed

    def has_room(self, needed: list[int]) -> bool:
        """Whether every group has this many free blocks."""
        return all(pool.num_free >= count for pool, count in zip(self.pools, needed, strict=True))

    def extend(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[list[list[int]], list[BlockCopy]] | None:
        """Make room for the first `num_tokens` of `sequence`.

        Returns the new block ids per group and the copies to make, or None, with nothing taken,
        when a group has no room.
        """
        self._drop_unseen(sequence)
        tables = sequence.block_tables
        needed = max(self.blocks_for(num_tokens) - len(tables[0]), 0)
        first_written = sequence.computed // self.block_size
        copies_needed = False
        if sequence.shares_blocks and first_written < len(tables[0]):
            copies_needed = any(
                pool.references[table[first_written]] > 1
                for pool, table in zip(self.pools, tables, strict=True)
            )
            sequence.shares_blocks = copies_needed
        if any(pool.num_free < needed + copies_needed for pool in self.pools):
            return None
        copies = self._unshare(sequence, first_written) if copies_needed else []
        new: list[list[int]] = []
        for pool, table in zip(self.pools, tables, strict=True):
            blocks = [pool.take() for _ in range(needed)]
            table.extend(blocks)
            new.append(blocks)
        return new, copies

    def _first_live(self, sequence: Sequence, window: int) -> int:
        """The first block that the next token to compute still sees."""
        return max(0, sequence.computed - window + 1) // self.block_size

    def _drop_unseen(self, sequence: Sequence) -> None:
        """Give back the blocks of window groups that no token to come will see."""
        for group, window in enumerate(self.windows):
            if window:
                table, pool = sequence.block_tables[group], self.pools[group]
                first_live = self._first_live(sequence, window)
                for index in range(sequence.first_live[group], first_live):
                    pool.release(table[index])
                    table[index] = NULL_BLOCK
                sequence.first_live[group] = first_live

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
        for group, pool in enumerate(self.pools):
            source, first_live = parent.block_tables[group], parent.first_live[group]
            for block in source[first_live:count]:
                pool.share(block)
            child.block_tables[group].extend(source[:count])
            child.first_live[group] = first_live
        child.computed = num_tokens
        child.shares_blocks = parent.shares_blocks = count > 0

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of `sequence`; nothing of it is computed any more."""
        for group, pool in enumerate(self.pools):
            table = sequence.block_tables[group]
            for block in reversed(table[sequence.first_live[group] :]):
                pool.release(block)
            table.clear()
            sequence.first_live[group] = 0
        sequence.computed = 0
        sequence.shares_blocks = False

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that pools and block tables agree, and that tables hold what is still seen."""
        sequences = list(sequences)
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            live = []
            for sequence in sequences:
                table, first_live = sequence.block_tables[group], sequence.first_live[group]
                live.append(table[first_live:])
                assert not any(table[:first_live]), "a block that was given back is still listed"
                assert len(table) >= self.blocks_for(sequence.computed), "computed without a block"
                seen = self._first_live(sequence, window) if window else 0
                assert first_live <= seen, "a block was given back that is still seen"
            pool.check_integrity(live)
