"""Which rows of a step a grammar rules, and the masks of these."""

from headway.core.plan import StepPlan
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.masks import Ruled, StepMasks
from headway.engine.scheduler import Scheduler


def begin_masks(
    plan: StepPlan, scheduler: Scheduler, grammars: Grammars | None
) -> StepMasks | None:
    """Start on the masks of the rows whose sample a grammar rules."""
    if grammars is None:
        return None
    ruled: list[Ruled] = []
    for row in plan.scheduled:
        sequence = scheduler.by_id(row.sequence_id) if row.sample else None
        if sequence is not None and sequence.grammar is not None:
            ruled.append((sequence, row.drafts))
    return grammars.begin(ruled) if ruled else None
