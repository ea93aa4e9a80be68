"""Speculation: draft tokens of what comes next, and which of them a step verifies.

    drafts       what the scheduler asks of a speculator, and what it hears back
    step         the draft tokens of one step, from the plan to the accepted count
    adaptive     proposers, acceptance, controller and backoff at work
    proposers/   where draft tokens come from
    acceptance   the probability that the k-th draft token is accepted
    controller   how many draft tokens of each sequence bring the most tokens a second
    backoff      when to stop asking, and when to probe again

The runtime samples behind each draft token what it would sample anyway
(`core.plan.ScheduledSequence`): draft tokens change how fast tokens come and never which. Nothing
here knows of tensors.
"""

from headway.config.speculation_config import SpeculationConfig
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator
from headway.engine.speculation.step import DraftTracker
from headway.perf.model import StepModel

__all__ = [
    "NO_DRAFTS",
    "Drafts",
    "AdaptiveSpeculator",
    "Speculator",
    "DraftTracker",
    "make_speculator",
]


def make_speculator(config: SpeculationConfig, cost: StepModel) -> AdaptiveSpeculator | None:
    """Return the speculator of these settings; None without proposers."""
    return AdaptiveSpeculator(config, cost) if config.sources else None
