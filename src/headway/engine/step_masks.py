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
    ruled: dict[int, Ruled] = {}
    for row in plan.scheduled:
        is_due = row.sample or row.path
        sequence = scheduler.by_id(row.sequence_id) if is_due else None
        if sequence is not None and sequence.grammar is not None:
            ruled.setdefault(row.sequence_id, (sequence, []))[1].append(row.drafts)
    return grammars.begin(list(ruled.values())) if ruled else None
