"""Traffic that changes while guesses rest: a look tells of what came since the one before."""

import random
from math import inf

import numpy as np
import pytest

from guessing import ask
from headway.core.plan import Sample, StepResult
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, work_of
from headway.engine.knots import KNOTS
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, num_alike
from headway.engine.speculation.lookup import Lookup
from headway.engine.speculation.speculation import Speculation

STREAMS, CHOOSE_S = 16, 6e-4
MACHINE = {1: 10, 4: 11, 8: 13, 16: 22, 32: 36, 64: 72, 16384: 20000}
"""By number of rows milliseconds of a step, in which choosing takes `CHOOSE_S`."""


def cost_of_machine() -> StepCost:
    cost = StepCost()
    of_tokens = 1e-3 * np.interp(KNOTS, [*MACHINE], [*MACHINE.values()])
    cost.take_parts(np.concatenate([of_tokens, [1e-3, 3e-4, 1e-9, 1e-9]]))
    return cost


class Traffic:
    """So many streams; what comes is what is known beforehand."""

    def __init__(self, seed: int) -> None:
        self.rng, self.next_id = random.Random(seed), 0
        self.cost = cost_of_machine()
        config = SpeculationConfig(sources=("lookup", "suffixes"))
        self.speculation = Speculation(config, self.cost)
        self.running: list[tuple[Sequence, list[int]]] = []

    def begin(self, copies: bool) -> None:
        prompt = [self.rng.randrange(10_000) for _ in range(60)]
        answer = [self.rng.randrange(10_000) for _ in range(50)]
        if copies:
            answer = prompt[8:58]
        request = Request(self.next_id, prompt, SamplingParams(temperature=0))
        sequence = Sequence(
            self.next_id, request, 0, num_groups=1, stop_ids=frozenset(), max_len=110, seed=0
        )
        self.next_id += 1
        sequence.take(Sample(0, answer[:1]), 0.0)
        self.running.append((sequence, answer))

    def end(self, over: list[Sequence]) -> None:
        for sequence in over:
            sequence.state = FINISHED
            self.speculation.left(sequence)
        self.running = [pair for pair in self.running if pair[0].state != FINISHED]

    def step(self, copies: bool) -> int:
        """How many guesses it verified."""
        while len(self.running) < STREAMS:
            self.begin(copies)
        decodes = [sequence for sequence, _ in self.running]
        for sequence in decodes:
            sequence.computed = len(sequence.tokens) - 1
        work = work_of([sequence.computed for sequence in decodes], (0,))
        found = ask(self.speculation, decodes, work, 512, inf)
        self.speculation.planned(0, CHOOSE_S)
        num_guessed = 0
        for sequence, answer in self.running:
            drafts = found.get(sequence.sequence_id, NO_DRAFTS)
            following = answer[sequence.num_generated :]
            kept = num_alike(drafts.token_ids, following[:-1])
            num_guessed += len(drafts.token_ids)
            sample = Sample(sequence.sequence_id, following[: kept + 1])
            sequence.take(sample, 0.0)
            self.speculation.came(sequence, drafts, sample)
        self.end([s for s, answer in self.running if s.num_generated >= len(answer)])
        self.speculation.ended(StepResult(0, []), 0)
        return num_guessed


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_found_within_twenty_steps(seed: int):
    """Behind answers that repeat nothing, all streams begin to copy at once, where guesses gain.

    The first look tells of them: were it the one behind it, half as much would be guessed at most.
    """
    traffic = Traffic(seed)
    for _ in range(40 + seed):
        traffic.step(copies=False)
    assert traffic.speculation.rests.is_resting
    traffic.end([sequence for sequence, _ in traffic.running])
    guessed = [traffic.step(copies=True) for _ in range(30)]
    assert sum(guessed[:20]) > 10 * STREAMS, guessed
    assert sum(guessed[20:]) > sum(guessed[:10])


def test_lookup_says_what_it_would_have_said():
    """The same as where later tokens had not come, whatever it was asked before."""
    rng = random.Random(0)
    for _ in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(4, 60))]
        late, at, known = Lookup(tokens), 0, 0
        while (at := at + rng.randrange(1, 9)) < len(tokens):
            known = max(at, known)
            fresh = Lookup(tokens[:known])
            asked = late.guess(5, at)
            assert len(asked.token_ids) == (5 if asked.match else 0)
            late.check_integrity()
            if asked.match < 8:
                assert asked == fresh.guess(5)
