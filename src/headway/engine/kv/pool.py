"""Blocks of one KV group: a free list and reference counts.

Block ids are 1 … num_blocks - 1; id 0 is the null block, which is never taken. A block is free
exactly when no sequence refers to it. Worked example:

    BlockPool(4)    fresh 1 2 3
    take() → 1      references 1: 1
    share(1)        references 1: 2      a fork refers to it too
    release(1)      references 1: 1      still not free

Released blocks are taken first, newest first, then blocks that were never used. With a policy, a
free block with known content stays findable: `take` prefers the others, then evicts the one of
least value.
"""

from collections.abc import Callable, Iterable

from headway.core.plan import NULL_BLOCK
from headway.engine.kv.prefix import Cached, PrefixIndex, common_tokens


class BlockPool:
    """Reference-counted block ids of one KV group; with `policy` "" nothing stays findable.

    `chained` as in PrefixIndex.
    """

    __slots__ = ("_free", "_fresh", "index", "num_blocks", "on_evicted", "references")

    def __init__(self, num_blocks: int, policy: str = "", *, chained: bool = True) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.references[NULL_BLOCK] = 1
        self._free: list[int] = []
        """Released blocks that are not cached."""
        self._fresh = NULL_BLOCK + 1
        """The first block that was never used."""
        self.index = PrefixIndex(num_blocks, policy, chained=chained) if policy else None
        self.on_evicted: Callable[[int, Cached], None] = lambda block, cached: None
        """Called with a block that is about to be reused, and its former content."""

    @property
    def num_free(self) -> int:
        """Return the number of blocks without a reference, cached ones included."""
        cached = len(self.index.queue) if self.index is not None else 0
        return self.num_blocks - self._fresh + len(self._free) + cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Return the number of cached blocks, in use or free."""
        return len(self.index) if self.index is not None else 0

    def take(self) -> int:
        """Return a free block, now with one reference; the caller has checked `num_free`."""
        if self._free:
            block = self._free.pop()
        elif self._fresh < self.num_blocks:
            block = self._fresh
            self._fresh += 1
        else:
            assert self.index is not None, "no block is free"
            block, cached = self.index.evict()
            self.on_evicted(block, cached)
        self.references[block] = 1
        return block

    def take_some(self, count: int) -> list[int]:
        """Return `count` free blocks, at least one, each with one reference."""
        free, begin, end = self._free, self._fresh, self._fresh + count
        if len(free) >= count:
            blocks = free[: -count - 1 : -1]
            del free[-count:]
        elif not free and end <= self.num_blocks:
            blocks, self._fresh = list(range(begin, end)), end
        else:
            return [self.take() for _ in range(count)]
        references = self.references
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block in use."""
        assert self.references[block] > 0 and block != NULL_BLOCK
        self.references[block] += 1

    def reuse(self, block: int) -> None:
        """Add a reference to a cached block, in use or free."""
        assert self.index is not None
        cached = self.index.cached[block]
        assert cached is not None
        cached.uses += 1
        if self.references[block] == 0:
            self.index.queue.remove(cached.key)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference; without references the block is free."""
        references = self.references[block] - 1
        assert references >= 0 and block != NULL_BLOCK
        self.references[block] = references
        if references == 0 and (self.index is None or not self.index.released(block)):
            self._free.append(block)

    def release_all(self, blocks: list[int]) -> None:
        """Release each block, in this order."""
        references, unused = self.references, list[int]()
        for block in blocks:
            count = references[block] - 1
            assert count >= 0 and block != NULL_BLOCK
            references[block] = count
            if count == 0:
                unused.append(block)
        self._free += unused if self.index is None else self.index.released_all(unused)

    def insert_all(self, blocks: Iterable[int], contents: Iterable[Cached]) -> None:
        """Insert each; usually nothing is listed in its place."""
        index = self.index
        assert index is not None
        for block, cached in zip(blocks, contents, strict=True):
            if not index.add(block, cached, first=True):
                self.insert(block, cached)

    def insert(self, block: int, cached: Cached) -> None:
        """List `block`, which a sequence refers to, as `cached`.

        It is not listed if another block holds the same tokens or more. A listed block with only a
        prefix of its tokens is dropped.
        """
        assert self.index is not None
        newest = self.index.newest(cached.place)
        if newest is not None:
            alike = common_tokens(newest.packed, cached.packed)
            if alike == cached.num_tokens:
                return
            if alike == newest.num_tokens:
                self._drop(self.index, self.index.block_of[newest.key])
        self.index.add(block, cached)

    def _drop(self, index: PrefixIndex, block: int) -> None:
        """Unlist `block`, in use or free."""
        cached = index.cached[block]
        if self.references[block] == 0 and cached is not None:
            index.queue.remove(cached.key)
            self._free.append(block)
        index.drop(block)

    def forget(self, block: int) -> None:
        """Unlist a block in use."""
        assert self.references[block] > 0
        if self.index is not None and self.index.cached[block] is not None:
            self.index.drop(block)

    def forget_free(self) -> None:
        """Unlist all free blocks."""
        while self.index is not None and len(self.index.queue):
            self._free.append(self.index.evict()[0])

    def forget_owner(self, owner: bytes) -> None:
        """Unlist the blocks of `owner`, or of owners whose names begin with it."""
        index = self.index
        for block, cached in enumerate(index.cached if index is not None else ()):
            if index is not None and cached is not None and cached.owner.startswith(owner):
                self._drop(index, block)

    def is_immutable(self, block: int) -> bool:
        """Return whether others need `block` unchanged, so that a writer needs a copy."""
        return self.is_listed(block) or self.references[block] > 1

    def is_kept_by_others(self, block: int) -> bool:
        """Return whether `block` stays findable when one of its sequences ends."""
        return block == NULL_BLOCK or (self.references[block] > 1 and self.is_listed(block))

    def is_listed(self, block: int) -> bool:
        """Return whether `block` is cached."""
        return self.index is not None and self.index.cached[block] is not None

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that the counts are exactly the references held by `tables`."""
        held, num_fresh = [0] * self._fresh, self.num_blocks - self._fresh
        held[NULL_BLOCK] = 1
        for table in tables:
            for block in table:
                assert NULL_BLOCK != block < self._fresh, "a block that was never taken"
                held[block] += 1
        assert held == self.references[: self._fresh], "counts differ from the block tables"
        assert self.references.count(0) == held.count(0) + num_fresh, "a fresh block is in use"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not any(map(held.__getitem__, self._free)), "a block in use is free"
        cached = set()
        if self.index is not None:
            self.index.check_integrity(self.references)
            cached = {b for b in self.index.block_of.values() if held[b] == 0}
        assert not free & cached, "a cached block is listed among the others"
        assert len(free) + len(cached) == held.count(0), "a block leaked"
