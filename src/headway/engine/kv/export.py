"""Blocks of a sequence that is to go on in another engine leave as they are full."""

from headway.engine.kv.cache import KVCache
from headway.engine.kv.tiers import OPEN_WINDOW
from headway.engine.sequence import Sequence


def export(kv: KVCache, sequence: Sequence) -> None:
    """The full blocks of `sequence` that are computed leave for who goes on with it.

    Not those of a group that sees nothing behind a full block (`OPEN_WINDOW`).
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
