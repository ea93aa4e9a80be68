"""Dropping an owner's blocks in all tiers, and abandoning a restore that failed."""

from collections.abc import Iterable

from headway.engine.kv.cache import KVCache
from headway.engine.sequence import Sequence


def forget_owner(kv: KVCache, owner: bytes, sequences: Iterable[Sequence]) -> None:
    """Drop the blocks of `owner`, or of owners whose names begin with it.

    Blocks that its `sequences` still compute are not listed either.
    """
    for sequence in sequences:
        if sequence.request.principal.block_owner().startswith(owner):
            sequence.is_forgotten = True
    for pool in kv.pools:
        pool.forget_owner(owner)
    if kv.tiers is not None:
        kv.tiers.forget(owner)


def give_up_restore(kv: KVCache, sequence: Sequence) -> None:
    """Release the blocks of a failed restore; the sequence will not try another one."""
    kv.release(sequence)
    sequence.takes_restores, sequence.restored = False, {}
