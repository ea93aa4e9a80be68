"""Guesses of what comes next, and which of them a step verifies.

    drafts      what the scheduler asks of whoever guesses, and what it hears back
    step        the guesses of one step, from the plan to what came of them
    sources     who guesses in each step, for that costs microseconds
    lookup      what followed the end of a sequence where it stood in it before
    suffixes    the same in past answers, by cache salt
    lookahead   what the model said behind wrong guesses, and a window of them
    acceptance  the chance that a guess is kept, from all requests and from its own
    shadow      scores guesses that nobody verified
    comparing   who is asked in a step, and the best candidate of each sequence
    controller  how many guesses of each sequence bring the most tokens a second
    overrun     how much longer steps with guesses take than is foretold
    asking      when the runtime's drafter is asked
    rehearsal   asks it before anybody needs its guesses

The runtime samples behind each guess what it would sample anyway (`core.plan.ScheduledSequence`):
guesses change how fast tokens come and never which. Nothing here knows of tensors.
"""

from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator
from headway.engine.speculation.rehearsal import Rehearsal
from headway.engine.speculation.speculation import Speculation
from headway.engine.speculation.step import StepDrafts

__all__ = [
    "NO_DRAFTS",
    "Drafts",
    "Rehearsal",
    "Speculation",
    "Speculator",
    "StepDrafts",
    "make_speculator",
]


def make_speculator(config: SpeculationConfig, cost: StepCost) -> Speculation | None:
    """What these settings say; None where nobody guesses, and a step is what it is without."""
    return Speculation(config, cost) if config.sources else None
