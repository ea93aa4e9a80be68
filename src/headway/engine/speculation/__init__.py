"""Guesses of what comes next, and which of them a step verifies.

    drafts      what the scheduler asks of whoever guesses, and what it hears back
    lookup      what followed the end of a sequence where it stood in it before
    suffixes    the same in past answers, by cache salt

The runtime samples behind each guess what it would sample anyway (`core.plan.ScheduledSequence`):
guesses change how fast tokens come and never which. Nothing here knows of tensors.
"""

from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, Speculator

__all__ = ["NO_DRAFTS", "Drafts", "Speculator"]
