"""The blocks of one KV group: a free list and a reference count each.

Given the number of blocks it hands out ids 1 … num_blocks - 1; id 0 is the null block, never given
out. It promises that a block is free exactly when nobody refers to it. Worked example:

    BlockPool(4)    free 1 2 3
    take() → 1      references 1: 1
    share(1)        references 1: 2      a fork refers to it too
    release(1)      references 1: 1      still not free
"""

from headway.core.plan import NULL_BLOCK


class BlockPool:
    """Reference-counted block ids of one KV group."""

    __slots__ = ("_free", "num_blocks", "references")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.references[NULL_BLOCK] = 1
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self) -> int:
        """A free block, now with one reference; the caller has checked `num_free`."""
        block = self._free.pop()
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block in use."""
        assert self.references[block] > 0 and block != NULL_BLOCK
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one frees the block."""
        references = self.references[block] - 1
        assert references >= 0 and block != NULL_BLOCK
        self.references[block] = references
        if references == 0:
            self._free.append(block)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that the counts are exactly the references held by `tables`."""
        held = [0] * self.num_blocks
        held[NULL_BLOCK] = 1
        for table in tables:
            for block in table:
                assert block != NULL_BLOCK, "the null block was given out"
                held[block] += 1
        assert held == self.references, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {b for b in range(self.num_blocks) if held[b] == 0}, "a block leaked"
