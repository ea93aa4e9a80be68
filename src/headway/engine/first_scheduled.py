"""Counts of prompts that are scheduled for the first time."""

from headway.core.plan import StepPlan
from headway.engine.scheduler import Scheduler


def first_scheduled(
    plan: StepPlan, scheduler: Scheduler, now_s: float
) -> tuple[int, int, dict[str, int]]:
    """Return (prompt tokens scheduled for the first time, cached ones of these, and of the cached
    ones those restored from each lower tier).

    A fork's prompt is its parent's and counts once; a resumed sequence is not new.
    """
    computed = {row.sequence_id: row.start for row in plan.scheduled}
    queried = cached = 0
    restored: dict[str, int] = {}
    for new in plan.new:
        sequence = scheduler.by_id(new.sequence_id)
        if sequence is None or sequence.first_scheduled_s is not None:
            continue
        sequence.first_scheduled_s = now_s
        if sequence.index == 0:
            sequence.num_cached = remaining = min(computed[new.sequence_id], sequence.num_prompt)
            queried += sequence.num_prompt
            cached += sequence.num_cached
            for name, count in sequence.restored.items():
                restored[name] = restored.get(name, 0) + min(count, remaining)
                remaining -= min(count, remaining)
    return queried, cached, restored
