"""Blocks for other paths of one sequence, for a step: guesses verified beside each other."""

from headway.core.plan import BlockCopy, BlocksByGroup
from headway.engine.kv.cache import KVCache
from headway.engine.sequence import Sequence


def branch(
    kv: KVCache, sequence: Sequence, num_tokens: int, path: int
) -> tuple[list[list[int]], list[BlockCopy]] | None:
    """Blocks of its own for another path of `num_tokens`, from the one written next.

    By group the blocks, and the copies of what that one holds already; None, with nothing
    taken, where a group has no room.
    """
    first, rest = divmod(sequence.computed, kv.block_size)
    count = kv.blocks_for(num_tokens) - first
    if not kv.has_room([count] * len(kv.pools)):
        return None
    blocks = [[pool.take() for _ in range(count)] for pool in kv.pools]
    copies = [
        BlockCopy(sequence.sequence_id, first, group, table[first], own[0], path)
        for group, (table, own) in enumerate(zip(sequence.block_tables, blocks, strict=True))
        if rest
    ]
    return blocks, copies


def adopt(kv: KVCache, sequence: Sequence, start: int, blocks: BlocksByGroup) -> None:
    """Let the blocks of a path take the place of its own, from the one of token `start` on."""
    first = start // kv.block_size
    give_back(kv, [table[first:] for table in sequence.block_tables])
    for table, own in zip(sequence.block_tables, blocks, strict=True):
        table[first:] = own
    sequence.unsettle()


def give_back(kv: KVCache, blocks: BlocksByGroup) -> None:
    """Give back blocks by group, of which one reference each was taken."""
    for pool, own in zip(kv.pools, blocks, strict=True):
        for block in own:
            pool.release(block)
