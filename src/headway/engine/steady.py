"""Decodes that go on as before: a row each, and one token more that is known (`steady_until`).

One whose block is full needs another, and is steady again as soon as it has it. Worked example,
blocks of 4, and an answer of which 7 tokens are computed:

    computed 7   steady        its token fills the block: that is listed, and nobody is asked
    computed 8   needs room    it takes a block with its row, and is steady until 12
    computed 9   steady
"""

from itertools import compress

from headway.core.plan import BlocksByGroup, ScheduledSequence, StepPlan
from headway.engine.kv import KVCache
from headway.engine.overlap import Overlap
from headway.engine.sequence import Sequence
from headway.engine.speculation import StepDrafts

Grown = list[tuple[int, BlocksByGroup]]
"""(Place among the decodes, new blocks) of those that took room with their rows."""


def asks_nobody(drafts: StepDrafts, overlap: Overlap) -> bool:
    """Whether nobody guesses, and no step is planned ahead of another."""
    return drafts.speculator is None and not overlap.depth


def grow(kv: KVCache, sequence: Sequence) -> BlocksByGroup | None:
    """New blocks for the next token of one that was steady up to it, and is steady again with
    them; None where it was not, or where there is no block."""
    if not 0 < sequence.steady_until == sequence.computed:
        return None
    room = kv.extend(sequence, sequence.computed + 1)
    if room is None:
        return None
    sequence.settle(kv.block_size if kv.indexes else 0)
    return room[0]


def add_rows(
    plan: StepPlan, steady: list[Sequence], grown: Grown, kv: KVCache
) -> list[ScheduledSequence]:
    """Add the next token of each to the plan; returns the rows that are looked at when they are
    computed: those that fill a block, or are the last but one of the answer."""
    nothing_new = kv.nothing_new
    rows = [
        ScheduledSequence(s.sequence_id, s.computed, [s.tokens[-1]], nothing_new, True)
        for s in steady
    ]
    for place, blocks in grown:
        rows[place].new_blocks = blocks
    plan.scheduled += rows
    return list(compress(rows, [s.computed + 1 >= s.steady_until for s in steady]))


def goes_on(sequence: Sequence) -> bool:
    """Whether one that was steady up to the token that filled its block is not over with the
    next."""
    return sequence.steady_until > 0 and len(sequence.tokens) + 1 < sequence.max_len
