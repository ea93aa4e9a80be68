"""What was computed is listed in the prefix cache: full blocks at once, the last one at the end.

Blocks of 4; an answer ends with 10 tokens computed, and the conversation goes on:

    first turn    [1 2 3 4] [5 6 7 8] [9 9 · ·]     the third is listed as 9 9
    next turn     [1 2 3 4] [5 6 7 8] [9 9 2 2]     it begins with a copy of that, and goes on at 2;
                                                    9 9 2 2 is listed in place of 9 9

So a block that can be found is never written to, and slots behind what it is listed for may hold
anything: guesses that were wrong, or what a step computes that is in flight.
"""

from headway.core.plan import NULL_BLOCK
from headway.engine.kv.cache import KVCache
from headway.engine.kv.prefix import Cached, is_of_use
from headway.engine.kv.tiers import OPEN_WINDOW
from headway.engine.sequence import Sequence


def insert(kv: KVCache, sequence: Sequence) -> None:
    """List the full blocks of `sequence` that are computed; the first of equals stays."""
    size = kv.block_size
    begin, end = sequence.num_remembered, min(sequence.computed, sequence.num_exact) // size
    if begin >= end or not kv.indexes or sequence.is_forgotten or any(sequence.dropped):
        return
    links, states = sequence.keys(size).links(begin, end), kv.states
    sequence.num_remembered, tables = end, sequence.block_tables
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


def let_go(kv: KVCache, sequence: Sequence, *, is_sound: bool) -> None:
    """Give back all blocks of `sequence`; if it `is_sound`, the last can be found, too: what it is
    said to have computed is there, for no step that was to write or copy it is missing."""
    if is_sound:
        insert_begun(kv, sequence)
    kv.release(sequence)


def insert_begun(kv: KVCache, sequence: Sequence) -> None:
    """List the block that `sequence` leaves half filled, for the tokens of it that are computed.

    Not where a model keeps states: the one behind a token within a block is in no block.
    """
    at, count = divmod(sequence.computed, kv.block_size)
    if not kv.indexes or kv.states is not None or sequence.is_forgotten or any(sequence.dropped):
        return
    is_known = sequence.num_remembered == at and sequence.computed <= sequence.num_exact
    if not is_known or not is_of_use(count, kv.block_size) or len(sequence.block_tables[0]) <= at:
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

    In a group that sees the next token's block alone a full block is read by those alone that
    continue within it: it is evicted first there.
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
