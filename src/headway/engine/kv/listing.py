"""Listing of computed blocks in the prefix cache: full ones at once, the last one at the end.

Blocks of 4; an answer ends with 10 tokens computed, and the conversation continues:

    first turn    [1 2 3 4] [5 6 7 8] [9 9 · ·]     the third is listed as 9 9
    next turn     [1 2 3 4] [5 6 7 8] [9 9 2 2]     it starts with a copy of it, and continues at 2;
                                                    9 9 2 2 is listed in place of 9 9

So a listed block is never written to, and slots after its listed tokens may contain anything:
rejected draft tokens, or the results of a step in flight.
"""

from headway.core.plan import NULL_BLOCK
from headway.engine.kv.cache import KVCache
from headway.engine.kv.prefix import Cached, is_worth_copying
from headway.engine.kv.tiers import OPEN_WINDOW
from headway.engine.sequence import Sequence


def list_full(kv: KVCache, sequence: Sequence) -> None:
    """List the computed full blocks of `sequence`; of equal ones the first stays listed."""
    size = kv.block_size
    begin, end = sequence.num_listed, min(sequence.computed, sequence.num_exact) // size
    if begin >= end or not kv.indexes or sequence.is_forgotten or any(sequence.dropped):
        return
    links, states = sequence.keys(size).links(begin, end), kv.states
    sequence.num_listed, tables = end, sequence.block_tables
    if kv.is_one_table and kv.tiers is None:
        cost, owner = kv.attention_cost, sequence.request.principal.block_owner()
        contents = [
            Cached(*link, 1 + cost * at * size, owner) for at, link in enumerate(links, begin)
        ]
        kv.pools[0].insert_all(tables[0][begin:end], contents)
        return
    for at, link in enumerate(links, begin):
        blocks = [table[at] for table in tables]
        if states is not None:
            listed = [states.lists(sequence, group, at) for group in range(len(tables))]
            blocks = [b if is_listed else NULL_BLOCK for b, is_listed in zip(blocks, listed)]
        _list(kv, sequence, blocks, link, at, size)


def release_and_list(kv: KVCache, sequence: Sequence, *, is_sound: bool) -> None:
    """Release all blocks of `sequence`; if it `is_sound`, the partial last block is listed.

    It is sound if no step that should write or copy its blocks was lost.
    """
    if is_sound:
        list_partial(kv, sequence)
    kv.release(sequence)


def list_partial(kv: KVCache, sequence: Sequence) -> None:
    """List the partially filled last block of `sequence`, for its computed tokens.

    A model with states lists none, because no block has the state after a token within a block.
    """
    at, count = divmod(sequence.computed, kv.block_size)
    if not kv.indexes or kv.states is not None or sequence.is_forgotten or any(sequence.dropped):
        return
    is_known = sequence.num_listed == at and sequence.computed <= sequence.num_exact
    if (
        not is_known
        or not is_worth_copying(count, kv.block_size)
        or len(sequence.block_tables[0]) <= at
    ):
        return
    blocks = [table[at] for table in sequence.block_tables]
    if kv.split is not None or NULL_BLOCK not in blocks:
        _list(kv, sequence, blocks, sequence.keys(kv.block_size).link(at, count), at, count)


def _list(
    kv: KVCache,
    sequence: Sequence,
    blocks: list[int],
    link: tuple[bytes, bytes, bytes],
    at: int,
    count: int,
) -> None:
    """List a block of each group, but the null block, for `count` tokens at this place.

    In a group that sees only the block of the next token, a full block is read only by sequences
    that continue within it: there it is evicted first.
    """
    size, tiers = kv.block_size, kv.tiers
    cost = 1 + kv.attention_cost * at * size
    owner = sequence.request.principal.block_owner()
    for group, block in enumerate(blocks):
        if block != NULL_BLOCK:
            is_read = count < size or kv.windows[group] != OPEN_WINDOW
            uses = count / size if is_read else 0.0
            kv.pools[group].insert(block, Cached(*link, cost, owner, uses))
            if tiers is not None:
                tiers.on_listed(group, block)


def export_full(kv: KVCache, sequence: Sequence) -> None:
    """Export the computed full blocks of `sequence` to the engine that will continue it.

    A group that sees nothing behind a full block (`OPEN_WINDOW`) exports none.
    """
    if any(sequence.dropped):
        return
    assert kv.tiers is not None
    chain, owner = sequence.keys(kv.block_size), sequence.request.principal.block_owner()
    end = sequence.computed // kv.block_size
    for group, (table, window) in enumerate(zip(sequence.block_tables, kv.windows, strict=True)):
        for at in range(sequence.num_exported, end if window != OPEN_WINDOW else 0):
            place = group, sequence.parcel_id, table[at]
            kv.tiers.leaving.add(*place, chain.key(at), owner)
    sequence.num_exported = max(sequence.num_exported, end)
