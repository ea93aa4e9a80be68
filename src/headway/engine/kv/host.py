"""Blocks of host memory: which sequence or key owns which. The bytes are in the runtime.

Block ids 0 … n - 1 by KV group are given to a sequence for all groups or for none; a preempted
sequence is the only owner of its blocks. Free blocks may be lent to blocks evicted from the device,
which are found there by key until the room is needed. Worked example, 4 and 2 blocks; sequence 7
needs 2 and 1, sequence 8 needs 3 and 1:

    take(7, [2, 1])   [[0, 1], [0]]
    take(8, [3, 1])   None: the first group has 2 left; nothing is taken
    lend(0, key)      2: an evicted block is stored there
    take(9, [2, 1])   [[3, 2], [1]]: block 2 is the sequence's now, and `key` is no longer found
    release(7)        both groups have 2 and 1 free again
"""

from collections import OrderedDict
from typing import NamedTuple


class LentBlock(NamedTuple):
    """Host block that stores a block evicted from the device, and the owner of its content."""

    block: int
    owner: bytes


class HostBlocks:
    """Free list by group, and an owner or a key for each block that is not free."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.num_blocks = num_blocks
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self.owned: dict[int, list[list[int]]] = {}
        """Sequence id → its blocks by group."""
        self.lent: list[OrderedDict[bytes, LentBlock]] = [OrderedDict() for _ in num_blocks]
        """By group, by key; least recently used first."""
        self._pins: list[dict[int, int]] = [{} for _ in num_blocks]
        """By group: blocks that are being read → number of reads."""
        self._dropped: list[set[int]] = [set() for _ in num_blocks]
        """By group: blocks being read whose keys were dropped."""

    @property
    def num_used(self) -> int:
        """Return the blocks that sequences own, over all groups."""
        return sum(len(blocks) for tables in self.owned.values() for blocks in tables)

    def has_room(self, counts: list[int]) -> bool:
        """Return whether every group has this many blocks; False without host memory."""
        return bool(self._free) and all(
            self._num_available(group) >= count for group, count in enumerate(counts)
        )

    def _num_available(self, group: int) -> int:
        num_read = len(self._pins[group]) - len(self._dropped[group])
        return len(self._free[group]) + len(self.lent[group]) - num_read

    def take(self, sequence_id: int, counts: list[int]) -> list[list[int]] | None:
        """Give a sequence blocks by group; None, with nothing taken, without room."""
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
        """Free all blocks of a sequence."""
        for free, blocks in zip(self._free, self.owned.pop(sequence_id), strict=True):
            free.extend(reversed(blocks))

    # ── blocks by key ───────────────────────────────────────────────────────────────────────

    def lend(self, group: int, key: bytes, owner: bytes = b"") -> int | None:
        """Return a block for `key`: a free one, or the least recently used; None without room."""
        if not self._num_available(group):
            return None
        block = self._take_one(group)
        self.lent[group][key] = LentBlock(block, owner)
        return block

    def touch(self, group: int, key: bytes) -> None:
        """Mark `key` as the most recently used."""
        self.lent[group].move_to_end(key)

    def pin(self, group: int, key: bytes) -> int:
        """Return the block of `key`, which stays unchanged until it is unpinned."""
        block = self.lent[group][key].block
        self._pins[group][block] = self._pins[group].get(block, 0) + 1
        self.touch(group, key)
        return block

    def block_of(self, group: int, key: bytes) -> int:
        """Return the block of a pinned `key`."""
        return self.lent[group][key].block

    def unpin(self, group: int, block: int) -> None:
        """End one read of `block`."""
        pins = self._pins[group]
        pins[block] -= 1
        if not pins[block]:
            del pins[block]
            if block in self._dropped[group]:
                self._dropped[group].remove(block)
                self._free[group].append(block)

    def drop(self, group: int, key: bytes) -> None:
        """Drop `key`; its block is free once no transfer reads it."""
        lent = self.lent[group].pop(key, None)
        if lent is not None:
            read = lent.block in self._pins[group]
            (self._dropped[group].add if read else self._free[group].append)(lent.block)

    def forget(self, owner: bytes) -> None:
        """Drop the keys of `owner`, or of owners whose names begin with it."""
        for group, lent in enumerate(self.lent):
            for key in [key for key, each in lent.items() if each.owner.startswith(owner)]:
                self.drop(group, key)

    def check_integrity(self, tables: dict[int, list[list[int]]]) -> None:
        """Assert that each block is free, lent, read or owned once, and owned as in `tables`."""
        assert self.owned == tables, "the owners of host blocks differ from the sequences"
        for group, count in enumerate(self.num_blocks):
            owned = [block for tables in self.owned.values() for block in tables[group]]
            lent = [each.block for each in self.lent[group].values()]
            dropped = self._dropped[group]
            everything = sorted([*owned, *self._free[group], *lent, *dropped])
            assert everything == list(range(count)), "a host block leaked, or is twice"
            assert self._pins[group].keys() <= {*lent, *dropped}, "a block that is read was given"
            assert dropped <= self._pins[group].keys(), "a dropped block has no reader"
