"""Traffic that changes while most steps ask for no draft tokens."""

import random
from math import inf

import numpy as np
import pytest

from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import PROBE_STEPS
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, common_prefix
from headway.perf.filter import BREAKPOINTS
from headway.perf.model import StepModel, Work, work_of

STREAMS, CHOOSE_S = 16, 6e-4
MACHINE = {1: 10, 4: 11, 8: 13, 16: 22, 32: 36, 64: 72, 16384: 20000}
"""By number of rows milliseconds of a step, in which choosing takes `CHOOSE_S`."""


def cost_of_machine() -> StepModel:
    cost = StepModel()
    of_tokens = 1e-3 * np.interp(BREAKPOINTS, [*MACHINE], [*MACHINE.values()])
    cost.set_parts(np.concatenate([of_tokens, [1e-3, 3e-4, 1e-9, 1e-9]]))
    return cost


class Traffic:
    """So many streams; what comes is what is known beforehand."""

    def __init__(self, seed: int) -> None:
        self.rng, self.next_id, self.num_asked = random.Random(seed), 0, 0
        self.cost = cost_of_machine()
        config = SpeculationConfig(sources=("lookup", "suffixes"))
        self.speculation = AdaptiveSpeculator(config, self.cost)
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
            self.speculation.forget(sequence)
        self.running = [pair for pair in self.running if pair[0].state != FINISHED]

    def learn(self, work: Work, found: dict[int, Drafts], num_kept: int) -> None:
        """Tell what the step took: as predicted, and choosing."""
        plain_s, count = (
            self.cost.seconds(work),
            sum(len(each.token_ids) for each in found.values()),
        )
        verify_s = self.cost.rows_s(work, count)[count]
        record = StepRecord(
            *(0, 0.0, STREAMS, 0, STREAMS + count, 0, 0, 0.0, 0),
            schedule_s=CHOOSE_S,
            execute_s=plain_s + verify_s,
            choose_s=CHOOSE_S,
            predicted_s=plain_s + verify_s,
            verify_s=verify_s,
            num_decode_tokens=STREAMS + count,
            num_drafts=count,
            num_kept_drafts=num_kept,
        )
        self.speculation.learn(record)

    def step(self, copies: bool) -> int:
        """How many guesses it verified."""
        while len(self.running) < STREAMS:
            self.begin(copies)
        decodes = [sequence for sequence, _ in self.running]
        for sequence in decodes:
            sequence.computed = len(sequence.tokens) - 1
        work = work_of([sequence.computed for sequence in decodes], (0,))
        found, is_asked = {}, False
        if self.speculation.is_due(len(decodes)):
            self.num_asked += 1
            found = self.speculation.plan(decodes, work, 512, inf)
            is_asked = True
        num_guessed = num_kept = 0
        for sequence, answer in self.running:
            drafts = found.get(sequence.sequence_id, NO_DRAFTS)
            following = answer[sequence.num_generated :]
            kept = common_prefix(drafts.token_ids, following[:-1])
            num_guessed += len(drafts.token_ids)
            num_kept += kept
            sample = Sample(sequence.sequence_id, following[: kept + 1])
            sequence.take(sample, 0.0)
            self.speculation.observe(sequence, drafts, sample)
        if is_asked and CHOOSE_S:
            self.learn(work, found, num_kept)
        self.end([s for s, answer in self.running if s.num_generated >= len(answer)])
        return num_guessed


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_found_within_a_probe(seed: int):
    """Behind answers that repeat nothing, all streams begin to copy at once, where that gains: seen
    at the next probe, 64 steps later at most, and in every step from then on."""
    traffic = Traffic(seed)
    for _ in range(200 + seed):
        traffic.step(copies=False)
    assert traffic.speculation.backoff.is_active
    traffic.end([sequence for sequence, _ in traffic.running])
    drafts = [traffic.step(copies=True) for _ in range(100)]
    first = next(at for at, count in enumerate(drafts) if count > STREAMS)
    assert first < 64 + PROBE_STEPS
    assert sum(count > 0 for count in drafts[first : first + 30]) > 20
    assert not traffic.speculation.backoff.is_active


@pytest.mark.parametrize(("choose_s", "most"), [(6e-4, 80), (6e-5, 270), (0.0, 400)])
def test_while_backed_off_most_steps_cost_nothing(choose_s: float, most: int, monkeypatch):
    """Of 400 steps that find nothing, the first 16 and some probes ask, more where it takes less:
    four thousandths of the time."""
    monkeypatch.setattr("test_change.CHOOSE_S", choose_s)
    traffic = Traffic(1)
    for _ in range(400):
        traffic.step(copies=False)
    assert 0.5 * most < traffic.num_asked <= most


def test_draft_tokens_that_save_less_than_choosing_takes_are_not_asked_for(monkeypatch):
    """Copies at 16 streams save some milliseconds a step: were choosing to take 20, none were."""
    monkeypatch.setattr("test_change.CHOOSE_S", 0.02)
    traffic = Traffic(2)
    for _ in range(200):
        traffic.step(copies=True)
    assert traffic.speculation.backoff.is_active and traffic.num_asked < 50
