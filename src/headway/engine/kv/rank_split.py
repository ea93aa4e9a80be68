"""Block tables whose blocks lie on several ranks: one group for each rank, with a pool of its own.

The table of a group has the null block where another rank's lies. Splits of 2 blocks, 2 ranks, a
sequence of 5 blocks:

    rank 0    [a b 0 0 c]
    rank 1    [0 0 d e 0]

A key of the prefix cache is that of a place in a sequence, so one rank alone may list it.
"""

from collections.abc import Container
from collections.abc import Sequence as TypingSequence

from headway.core.plan import NULL_BLOCK
from headway.engine.kv.pool import BlockPool
from headway.engine.kv.prefix import Hit, PrefixIndex
from headway.engine.sequence import Sequence
from headway.spec.context_shards import ContextShards


class Anywhere(Container[bytes]):
    """The keys that some rank lists."""

    def __init__(self, indexes: TypingSequence[PrefixIndex]) -> None:
        self._indexes = indexes

    def __contains__(self, key: object) -> bool:
        return any(key in index.block_of for index in self._indexes)


def still_needed(
    split: ContextShards, pools: list[BlockPool], sequence: Sequence, hit: Hit | None, whole: int
) -> list[int]:
    """`KVCache.still_needed` of one whose tokens take `whole` blocks in all."""
    if hit is None:
        return split.counts(min(len(sequence.block_tables[0]), whole), whole)
    begin = len(hit.tables[0])
    needed = split.counts(min(begin, whole), whole)
    for group, (pool, table) in enumerate(zip(pools, hit.tables, strict=True)):
        needed[group] += sum(pool.references[block] == 0 for block in table)
    if hit.is_partial:
        needed[split.owner(begin - 1)] += 1
    return needed


def counts(
    split: ContextShards, begin: int, count: int, copies: bool, first_written: int
) -> list[int]:
    """By rank the blocks that `count` more from `begin` on take, and the one that is copied."""
    blocks = split.counts(begin, begin + count)
    if copies:
        blocks[split.owner(first_written)] += 1
    return blocks


def take(
    split: ContextShards | None, pool: BlockPool, group: int, begin: int, count: int
) -> list[int]:
    """The next `count` entries of a table: blocks, where they are this rank's."""
    if split is None:
        return [pool.take() for _ in range(count)]
    places = range(begin, begin + count)
    return [pool.take() if split.owner(at) == group else NULL_BLOCK for at in places]


def listed(
    split: ContextShards | None, indexes: TypingSequence[PrefixIndex]
) -> TypingSequence[Container[bytes]]:
    """By group the keys that are found."""
    if split is None:
        return [index.block_of for index in indexes]
    return [Anywhere(indexes)] * len(indexes)


def blocks_of(split: ContextShards | None, index: PrefixIndex, keys: list[bytes]) -> list[int]:
    """The blocks of these keys; the null block where one lies on another rank."""
    if split is None:
        return [index.block_of[key] for key in keys]
    return [index.block_of.get(key, NULL_BLOCK) for key in keys]
