"""What holds for block tables between steps, as assertions."""

from collections.abc import Iterable
from collections.abc import Sequence as TypingSequence

from headway.engine.chain import Chain
from headway.engine.kv.prefix import PrefixIndex, first_visible
from headway.engine.sequence import Sequence


def check_tables(
    sequences: Iterable[Sequence], group: int, window: int, block_size: int, num_sinks: int
) -> None:
    """Assert that tables of `group` hold what is computed and still seen, and nothing before but
    the `num_sinks` first blocks."""
    for sequence in sequences:
        table, first_live = sequence.block_tables[group], sequence.first_live[group]
        assert not any(table[num_sinks:first_live]), "a block that was given back is still listed"
        if table or not sequence.host_tables:
            held = -(-sequence.computed // block_size) - sequence.dropped[group]
            assert len(table) >= held, "computed without a block"
        assert sequence.room <= len(table) * block_size, "room without a block"
        assert not (sequence.room and sequence.shares_blocks), "room in a block of others"
        first_visible_block = first_visible(sequence.computed, window) // block_size
        assert first_live <= first_visible_block, "a block was given back that is still seen"


def check_listed(
    sequence: Sequence, chain: Chain, indexes: TypingSequence[PrefixIndex], block_size: int
) -> None:
    """Assert that the blocks of `sequence` are listed under its own tokens, or not at all.

    Where a part of the prompt is kept, they are not.
    """
    assert sequence.num_remembered <= sequence.computed // block_size
    full = sequence.computed // block_size
    tables = zip(indexes, sequence.block_tables, sequence.dropped, strict=True)
    for index, table, dropped in tables:
        if dropped:
            assert not any(index.cached[block] for block in table), "what was chosen is listed"
            continue
        index.check_table(table, chain, full, shared=sequence.shares_blocks)
