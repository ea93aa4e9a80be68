"""Which blocks of host memory hold whose keys and values. The bytes live in the runtime.

Given the number of blocks by KV group it hands out ids 0 … n - 1, for all groups of a sequence or
for none; a sequence owns its blocks alone. Worked example, 4 and 2 blocks, sequence 7 has 2 and 1
to keep and sequence 8 has 3 and 1:

    take(7, [2, 1])   [[0, 1], [0]]
    take(8, [3, 1])   None: the first group has 2 left; nothing is taken
    release(7)        both groups are free again
"""


class HostBlocks:
    """A free list by group, and an owner for each block that is not in it."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.num_blocks = num_blocks
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self.owned: dict[int, list[list[int]]] = {}
        """By sequence id: its blocks by group."""

    @property
    def num_used(self) -> int:
        """Blocks that are owned, over all groups."""
        return sum(self.num_blocks) - sum(map(len, self._free))

    def has_room(self, counts: list[int]) -> bool:
        """Whether every group has so many free blocks; never where there is no host memory."""
        return bool(self._free) and all(
            len(free) >= count for free, count in zip(self._free, counts, strict=True)
        )

    def take(self, sequence_id: int, counts: list[int]) -> list[list[int]] | None:
        """So many blocks by group for this sequence, or None, with nothing taken."""
        assert sequence_id not in self.owned, "it has blocks already"
        if not self.has_room(counts):
            return None
        blocks = [
            [free.pop() for _ in range(count)]
            for free, count in zip(self._free, counts, strict=True)
        ]
        self.owned[sequence_id] = blocks
        return blocks

    def release(self, sequence_id: int) -> None:
        """All blocks of this sequence are free."""
        for free, blocks in zip(self._free, self.owned.pop(sequence_id), strict=True):
            free.extend(reversed(blocks))

    def check_integrity(self, tables: dict[int, list[list[int]]]) -> None:
        """Assert that each block is free or owned once, and owned as `tables` say, by sequence."""
        assert self.owned == tables, "the owners of host blocks differ from the sequences"
        for group, count in enumerate(self.num_blocks):
            owned = [block for tables in self.owned.values() for block in tables[group]]
            everything = sorted(owned + self._free[group])
            assert everything == list(range(count)), "a host block leaked, or is twice"
