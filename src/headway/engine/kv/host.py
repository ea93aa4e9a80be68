"""Which blocks of host memory hold whose keys and values. The bytes live in the runtime.

Given the number of blocks by KV group it hands out ids 0 … n - 1, for all groups of a sequence or
for none; a preempted sequence owns its blocks alone. What is free may be lent to blocks that left
the device's memory, which are found there under their keys until the room is needed. Worked
example, 4 and 2 blocks, sequence 7 has 2 and 1 to keep and sequence 8 has 3 and 1:

    take(7, [2, 1])   [[0, 1], [0]]
    take(8, [3, 1])   None: the first group has 2 left; nothing is taken
    lend(0, key)      2: what was evicted lies there
    take(9, [2, 1])   [[3, 2], [1]]: block 2 is the sequence's now, and `key` is found no more
    release(7)        both groups have 2 and 1 to give again
"""

from collections import OrderedDict
from typing import NamedTuple


class LentBlock(NamedTuple):
    """A host block that holds what left the device's memory, and whose that is."""

    block: int
    owner: bytes


class HostBlocks:
    """A free list by group, and for each block that is not in it an owner or a key."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.num_blocks = num_blocks
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self.owned: dict[int, list[list[int]]] = {}
        """By sequence id: its blocks by group."""
        self.lent: list[OrderedDict[bytes, LentBlock]] = [OrderedDict() for _ in num_blocks]
        """By group, by key; what was of use longest ago comes first."""
        self._pins: list[dict[int, int]] = [{} for _ in num_blocks]
        """By group: the blocks that are being read, and how often."""
        self._dropped: list[set[int]] = [set() for _ in num_blocks]
        """By group: of those the ones that are found no more."""

    @property
    def num_used(self) -> int:
        """Blocks that sequences own, over all groups."""
        return sum(len(blocks) for tables in self.owned.values() for blocks in tables)

    def has_room(self, counts: list[int]) -> bool:
        """Whether every group has so many blocks to give; never where there is no host memory."""
        return bool(self._free) and all(
            self._num_available(group) >= count for group, count in enumerate(counts)
        )

    def _num_available(self, group: int) -> int:
        num_read = len(self._pins[group]) - len(self._dropped[group])
        return len(self._free[group]) + len(self.lent[group]) - num_read

    def take(self, sequence_id: int, counts: list[int]) -> list[list[int]] | None:
        """So many blocks by group for this sequence, or None, with nothing taken."""
        assert sequence_id not in self.owned, "it has blocks already"
        if not self.has_room(counts):
            return None
        blocks = [
            [self._take_one(group) for _ in range(count)] for group, count in enumerate(counts)
        ]
        self.owned[sequence_id] = blocks
        return blocks

    def _take_one(self, group: int) -> int:
        if self._free[group]:
            return self._free[group].pop()
        lent, pins = self.lent[group], self._pins[group]
        key = next(key for key, (block, _) in lent.items() if block not in pins)
        return lent.pop(key).block

    def release(self, sequence_id: int) -> None:
        """All blocks of this sequence are free."""
        for free, blocks in zip(self._free, self.owned.pop(sequence_id), strict=True):
            free.extend(reversed(blocks))

    # ── under keys ──────────────────────────────────────────────────────────────────────────

    def lend(self, group: int, key: bytes, owner: bytes = b"") -> int | None:
        """A block to keep `key` in, free or of what was of use longest ago; None: no room."""
        if not self._num_available(group):
            return None
        block = self._take_one(group)
        self.lent[group][key] = LentBlock(block, owner)
        return block

    def touch(self, group: int, key: bytes) -> None:
        """What is kept under `key` was of use just now."""
        self.lent[group].move_to_end(key)

    def pin(self, group: int, key: bytes) -> int:
        """The block of `key`, which stays as it is until it is unpinned."""
        block = self.lent[group][key].block
        self._pins[group][block] = self._pins[group].get(block, 0) + 1
        self.touch(group, key)
        return block

    def block_of(self, group: int, key: bytes) -> int:
        """Where `key` is, which is pinned."""
        return self.lent[group][key].block

    def unpin(self, group: int, block: int) -> None:
        """A read of `block` is over."""
        pins = self._pins[group]
        pins[block] -= 1
        if not pins[block]:
            del pins[block]
            if block in self._dropped[group]:
                self._dropped[group].remove(block)
                self._free[group].append(block)

    def drop(self, group: int, key: bytes) -> None:
        """Forget `key`; its block is free when no transfer reads it."""
        lent = self.lent[group].pop(key, None)
        if lent is not None:
            read = lent.block in self._pins[group]
            (self._dropped[group].add if read else self._free[group].append)(lent.block)

    def forget(self, owner: bytes) -> None:
        """Forget what belongs to `owner`, or to those whose names begin so."""
        for group, lent in enumerate(self.lent):
            for key in [key for key, each in lent.items() if each.owner.startswith(owner)]:
                self.drop(group, key)

    def check_integrity(self, tables: dict[int, list[list[int]]]) -> None:
        """Assert that each block is free, lent, read or owned once, and owned as `tables` say."""
        assert self.owned == tables, "the owners of host blocks differ from the sequences"
        for group, count in enumerate(self.num_blocks):
            owned = [block for tables in self.owned.values() for block in tables[group]]
            lent = [each.block for each in self.lent[group].values()]
            dropped = self._dropped[group]
            everything = sorted([*owned, *self._free[group], *lent, *dropped])
            assert everything == list(range(count)), "a host block leaked, or is twice"
            assert self._pins[group].keys() <= {*lent, *dropped}, "a block that is read was given"
            assert dropped <= self._pins[group].keys(), "a dropped block has no reader"
