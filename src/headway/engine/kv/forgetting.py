"""What is given up: an owner's blocks, in memory and below, and a restore that did not come."""

from collections.abc import Iterable

from headway.engine.kv.cache import KVCache
from headway.engine.sequence import Sequence


def forget_owner(kv: KVCache, owner: bytes, sequences: Iterable[Sequence]) -> None:
    """Forget what belongs to `owner`, or to those whose names begin so.

    What its `sequences` still compute is not listed either.
    """
    for sequence in sequences:
        if sequence.request.principal.block_owner().startswith(owner):
            sequence.is_forgotten = True
    for pool in kv.pools:
        pool.forget_owner(owner)
    if kv.tiers is not None:
        kv.tiers.forget(owner)


def give_up_restore(kv: KVCache, sequence: Sequence) -> None:
    """What was to be restored did not come: all goes back, and none is asked for again."""
    kv.release(sequence)
    sequence.takes_restores, sequence.restored = False, {}
