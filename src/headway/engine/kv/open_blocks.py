"""Open blocks of a KV format that rounds a block when it is full: who holds one, and how long.

Between two steps each running sequence holds the block of its next token, if that is begun. A chunk
holds more only during its step: full ones are rounded and released. Worked example, blocks of 64, a
prompt of 300, 4 open blocks free:

    step 1    a chunk of 256    takes 4, releases 4
    step 2    a chunk of 44     takes 1, which it keeps until token 319
    3 free    the same prompt is computed in chunks of 192 and 108
"""

from collections.abc import Iterable

from headway.engine.kv.cache import KVCache
from headway.engine.sequence import Sequence


def limit_to_open_blocks(kv: KVCache, sequence: Sequence, count: int) -> int:
    """Return `count`, or as many next tokens as the free open blocks hold; at least one.

    70 tokens computed, 2 blocks free: 58 tokens in its own block and 128 in these.
    """
    if not kv.has_open:
        return count
    kv.drop_unseen(sequence)
    end = len(sequence.block_tables[-1]) + kv.pools[-1].num_free - sequence.shares_blocks
    return max(min(count, end * kv.block_size - sequence.computed), 1)


def release_full(kv: KVCache, sequences: Iterable[Sequence]) -> None:
    """Release the open blocks that a step has filled, once all that share them have started."""
    if kv.has_open:
        for sequence in sequences:
            if sequence.first_live[-1] < sequence.computed // kv.block_size:
                kv.drop_unseen(sequence)
