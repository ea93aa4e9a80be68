"""Which rank holds which keys and values where a context is dealt over ranks by position.

A context is cut into splits of 512 tokens, as attention cuts it anyway, and split s lies on rank
s mod `ranks`. Blocks of 16, 2 ranks: rank 0 has the blocks 0 … 31 and 64 … 95 of a sequence, rank 1
those between. So each rank has the sums of whole splits, and merged in the order of the splits they
are those of one rank.
"""

from dataclasses import dataclass, replace

from headway.spec import KVGroupSpec

SPLIT_TOKENS = 512
"""`split_tokens` of native/attention_split.inl."""


@dataclass(frozen=True, slots=True)
class ContextShards:
    """Blocks of `block_size` tokens on `ranks` ranks."""

    ranks: int
    block_size: int

    def owner(self, at: int) -> int:
        """The rank of the block at this place of a table."""
        return at * self.block_size // SPLIT_TOKENS % self.ranks

    def counts(self, begin: int, end: int) -> list[int]:
        """By rank how many of the blocks `begin` … `end` - 1 it has.

        >>> ContextShards(2, 256).counts(1, 6)
        [3, 2]
        """
        before, through = self._first(begin), self._first(end)
        return [b - a for a, b in zip(before, through, strict=True)]

    def _first(self, count: int) -> list[int]:
        """By rank how many of the first `count` blocks it has."""
        each = SPLIT_TOKENS // self.block_size
        rounds, left = divmod(count, each * self.ranks)
        return [rounds * each + min(max(left - rank * each, 0), each) for rank in range(self.ranks)]

    def longest(self, rank: int, count: int) -> int:
        """The blocks of the longest context of which `rank` has `count` at the most.

        >>> ContextShards(2, 256).longest(0, 3), ContextShards(2, 256).longest(1, 2)
        (5, 6)
        """
        each = SPLIT_TOKENS // self.block_size
        rounds, left = divmod(count, each)
        return rounds * each * self.ranks + rank * each + left


def shard_kv_groups(groups: tuple[KVGroupSpec, ...], ranks: int) -> tuple[KVGroupSpec, ...]:
    """The KV groups of all ranks: of the one that a model has, each rank's part."""
    if ranks == 1:
        return groups
    (group,) = groups
    return tuple(replace(group, rank=rank, ranks=ranks) for rank in range(ranks))
