"""What was computed is listed in the prefix cache: full blocks at once, the last one at the end.

Blocks of 4; an answer ends with 10 tokens computed, and the conversation goes on:

    first turn    [1 2 3 4] [5 6 7 8] [9 9 · ·]     the third is listed as 9 9
    next turn     [1 2 3 4] [5 6 7 8] [9 9 2 2]     it begins with a copy of that, and goes on at 2;
                                                    9 9 2 2 is listed in place of 9 9

So a block that can be found is never written to, and slots behind what it is listed for may hold
anything: guesses that were wrong, or what a step computes that is in flight.
"""

from headway.core.plan import NULL_BLOCK
from headway.engine.chain import Chain
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
    chain, states = sequence.keys(size), kv.states
    for at in range(begin, end):
        blocks = [
            table[at] if states is None or states.lists(sequence, group, at) else NULL_BLOCK
            for group, table in enumerate(sequence.block_tables)
        ]
        _list(kv, sequence, blocks, chain, at, size)
    sequence.num_remembered = end


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
    if kv.dealt is not None or NULL_BLOCK not in blocks:
        _list(kv, sequence, blocks, sequence.keys(kv.block_size), at, count)


def _list(
    kv: KVCache, sequence: Sequence, blocks: list[int], chain: Chain, at: int, count: int
) -> None:
    """List a block of each group, but the null block, for `count` tokens at this place.

    Nobody reads a full one of a group that sees the next token's block alone, but who goes on
    within it: it goes first there.
    """
    key, parent, tokens = chain.link(at, count)
    cost = 1 + kv.attention_cost * at * kv.block_size
    owner = sequence.request.principal.block_owner()
    for group, (pool, block) in enumerate(zip(kv.pools, blocks, strict=True)):
        if block != NULL_BLOCK:
            is_read = count < kv.block_size or kv.windows[group] != OPEN_WINDOW
            uses = count / kv.block_size if is_read else 0.0
            pool.insert(block, Cached(key, parent, tokens, cost, owner, uses))
            if kv.tiers is not None:
                kv.tiers.found(group, block)
