"""Block tables whose blocks are spread over ranks: one group per rank, with a pool of its own.

The table of a group has the null block where another rank has the block. Splits of 2 blocks, 2
ranks, a sequence of 5 blocks:

    rank 0    [a b 0 0 c]
    rank 1    [0 0 d e 0]

A key of the prefix cache belongs to a place in a sequence, so only one rank may list it.
"""

from collections.abc import Container
from collections.abc import Sequence as TypingSequence

from headway.core.plan import NULL_BLOCK
from headway.engine.kv.pool import BlockPool
from headway.engine.kv.prefix import Hit, PrefixIndex
from headway.engine.sequence import Sequence
from headway.spec.context_shards import ContextShards


class AnyRank(Container[bytes]):
    """Keys that at least one rank lists."""

    def __init__(self, indexes: TypingSequence[PrefixIndex]) -> None:
        self._indexes = indexes

    def __contains__(self, key: object) -> bool:
        return any(key in index.block_of for index in self._indexes)


def still_needed(
    split: ContextShards, pools: list[BlockPool], sequence: Sequence, hit: Hit | None, whole: int
) -> list[int]:
    """Return as `KVCache.still_needed`, for a sequence whose tokens take `whole` blocks."""
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
    """Return by rank the blocks that `count` more from `begin` on take, and the copied one."""
    blocks = split.counts(begin, begin + count)
    if copies:
        blocks[split.owner(first_written)] += 1
    return blocks


def take(
    split: ContextShards | None, pool: BlockPool, group: int, begin: int, count: int
) -> list[int]:
    """Return the next `count` entries of a table: blocks where they are on this rank."""
    if split is None:
        return [pool.take() for _ in range(count)]
    places = range(begin, begin + count)
    return [pool.take() if split.owner(at) == group else NULL_BLOCK for at in places]


def listed_keys(
    split: ContextShards | None, indexes: TypingSequence[PrefixIndex]
) -> TypingSequence[Container[bytes]]:
    """Return by group the keys that can be found."""
    if split is None:
        return [index.block_of for index in indexes]
    return [AnyRank(indexes)] * len(indexes)


def blocks_of(split: ContextShards | None, index: PrefixIndex, keys: list[bytes]) -> list[int]:
    """Return the blocks of these keys; the null block where another rank has it."""
    if split is None:
        return [index.block_of[key] for key in keys]
    return [index.block_of.get(key, NULL_BLOCK) for key in keys]
