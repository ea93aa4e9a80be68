"""The speculator as a whole: what it does over many steps."""

from headway.core.plan import Sample
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import Prior, StepCost, work_of
from headway.engine.sequence import Sequence
from headway.engine.speculation.speculation import Speculation


def copying_sequence() -> Sequence:
    """One that repeats itself, so that each guess of it is right."""
    request = Request(1, [1, 2, 3, 4, 5] * 8, SamplingParams(temperature=0))
    return Sequence(1, request, 0, num_groups=1, stop_ids=frozenset(), max_len=100_000, seed=0)


def test_rows_that_seemed_dear_are_tried_again():
    """Their price is learned only from steps that have them, so a few are spent on it."""
    prior = Prior(weights_s=0.01, token_s=0.01)
    cost, machine = StepCost(prior), StepCost(Prior(weights_s=0.01, token_s=1e-5))
    speculation = Speculation(SpeculationConfig(sources=("lookup",)), cost)
    sequence = copying_sequence()
    sequence.computed = len(sequence.tokens) - 1
    counts = []
    for _ in range(3000):
        beside = work_of([sequence.computed], (0,))
        found = speculation.plan([sequence], beside, 512, float("inf"))
        drafts = found.get(1)
        count = len(drafts.token_ids) if drafts else 0
        work = cost.with_drafts(beside, sequence.computed + 1, count) if count else beside
        cost.learn(work, machine.seconds(work))
        counts.append(count)
        kept = [1 + (len(sequence.tokens) + at) % 5 for at in range(count + 1)]
        sequence.take(Sample(1, kept), 0.0)
        sequence.computed = len(sequence.tokens) - 1
        if drafts:
            speculation.came(sequence, drafts, Sample(1, kept))
        if count > 3:
            break
    assert counts[-1] > 3, "it never learned that rows are cheap"
