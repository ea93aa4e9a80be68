"""What a step that finds nothing asks of the sources, and that who begins to copy is seen."""

import random
from itertools import chain
from math import inf

import pytest

from guessing import ask
from headway.core.plan import Sample, StepResult
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import Prior, StepCost, work_of
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, num_alike
from headway.engine.speculation.rests import CYCLE, PATIENCE, NeverRests
from headway.engine.speculation.speculation import Speculation

CONTEXT = {"attended_s": 1e-9, "read_s": 1e-9}
DEAR = Prior(weights_s=0.01, token_s=9e-4, any_sampled_s=1e-3, sampled_s=4e-4, **CONTEXT)
"""A row takes nearly what a token of a sequence takes, where there are 16 and more."""
MIDDLING = Prior(weights_s=0.01, token_s=3e-4, any_sampled_s=1e-3, sampled_s=4e-4, **CONTEXT)
"""There a copy pays, and one right guess of two does not."""
PHRASE = list(range(100, 140))
CHOOSE_S = 0.001


class Traffic:
    """So many streams with a phrase in their prompts; `asked` are who was asked in each step."""

    def __init__(self, prior: Prior, streams: int, sources: tuple[str, ...] = ("lookup",)) -> None:
        config = SpeculationConfig(sources=sources)
        self.speculation = Speculation(config, StepCost(prior))
        self.rng, self.copied = random.Random(3), dict[int, int]()
        self.decodes = [
            Sequence(
                number,
                Request(number, [*PHRASE, 7, 8, 9], SamplingParams(temperature=0)),
                *(0,),
                num_groups=1,
                stop_ids=frozenset(),
                max_len=100_000,
                seed=0,
            )
            for number in range(streams)
        ]
        self.asked: list[list[int]] = []
        source = self.speculation.sources[0]
        guess = source.guess

        def told(sequence, most):
            self.asked[-1].append(sequence.sequence_id)
            return guess(sequence, most)

        source.guess = told

    def following(self, sequence: Sequence, copying: int) -> list[int]:
        """What comes: of the first `copying` streams the phrase, else what never stood there."""
        if sequence.sequence_id >= copying:
            return [self.rng.randrange(1000, 10**6) for _ in range(9)]
        begin = self.copied.get(sequence.sequence_id, 0)
        return [PHRASE[(begin + at) % len(PHRASE)] for at in range(9)]

    def step(self, copying: int = 0, only: int | None = None) -> int:
        """One step of the first `only` streams; the guesses that were verified."""
        decodes, speculation = self.decodes[:only], self.speculation
        for sequence in decodes:
            sequence.computed = len(sequence.tokens) - 1
        self.asked.append([])
        work = work_of([sequence.computed for sequence in decodes], (0,))
        found, num_guessed = ask(speculation, decodes, work, 512, inf), 0
        speculation.planned(0, CHOOSE_S)
        for sequence in decodes:
            drafts, coming = found.get(sequence.sequence_id, NO_DRAFTS), []
            coming = self.following(sequence, copying)
            kept = num_alike(drafts.token_ids, coming[:-1])
            sample = Sample(sequence.sequence_id, coming[: kept + 1])
            begun = self.copied.get(sequence.sequence_id, 0)
            self.copied[sequence.sequence_id] = begun + kept + 1
            num_guessed += len(drafts.token_ids)
            sequence.take(sample, 0.0)
            speculation.came(sequence, drafts, sample)
        speculation.ended(StepResult(0, []), 0)
        return num_guessed

    def rest(self) -> None:
        """Steps until guesses that bring nothing are looked for seldom."""
        for _ in range(PATIENCE + 2 * CYCLE):
            self.step()
        assert self.speculation.rests.is_resting


def test_nobody_is_asked_where_rows_take_what_tokens_take():
    """Not even in the first steps, but for a trial now and then; and all at once with few rows."""
    traffic = Traffic(DEAR, 32)
    for _ in range(PATIENCE):
        assert traffic.step(copying=32) == 0
    assert not any(traffic.asked)
    traffic.step(copying=32, only=2)
    assert sorted(traffic.asked[-1]) == [0, 1]


def test_rows_that_seem_too_dear_for_any_guess_are_tried_nevertheless():
    """They may be dear no more: then nobody would ever see it."""
    traffic = Traffic(DEAR, 32)
    for _ in range(600):
        if traffic.step(copying=32):
            break
    else:
        pytest.fail("no row was ever tried")


@pytest.mark.parametrize(("streams", "parts"), [(4, 2), (16, 2), (24, 3)])
def test_at_rest_some_of_the_sequences_are_asked_at_a_time(streams, parts):
    """Half of them, or eight; in looks that follow each other everybody."""
    traffic = Traffic(MIDDLING, streams)
    traffic.rest()
    del traffic.asked[:]
    for _ in range(2 * parts * CYCLE):
        traffic.step()
    looks = [sorted(asked) for asked in traffic.asked if asked]
    assert {len(asked) for asked in looks} == {streams // parts}
    for begin in range(0, len(looks) - parts + 1, parts):
        asked = chain.from_iterable(looks[begin : begin + parts])
        assert sorted(asked) == list(range(streams))


@pytest.mark.parametrize("streams", [4, 16])
def test_copies_are_seen_within_twenty_steps_though_half_are_asked(streams):
    """One that finds what pays has all asked in the same step."""
    traffic = Traffic(MIDDLING, streams)
    traffic.rest()
    guessed = [traffic.step(copying=streams) for _ in range(20)]
    assert any(guessed)
    first = next(at for at, number in enumerate(guessed) if number)
    assert len(set(traffic.asked[first - 20])) == streams
    for _ in range(10):
        traffic.step(copying=streams)
    assert all(traffic.asked[-10:]), "it looks in each step again"


def test_what_guesses_save_is_held_against_the_step_with_them():
    """Eight rows more make a step several times as long, and its seconds are as unsure."""
    traffic, told = Traffic(MIDDLING, 4), []

    class Told(NeverRests):
        def chose(self, saved_s: float, step_s: float) -> bool:
            told.append((saved_s, step_s))
            return True

    traffic.speculation.rests = Told()
    guessed = [traffic.step(copying=4) for _ in range(10)]
    assert max(guessed) >= 16
    plain_s = min(step_s for _, step_s in told)
    for number, (saved_s, step_s) in zip(guessed, told, strict=True):
        if number:
            assert step_s > plain_s + 0.9 * number * MIDDLING.sampled_s
            assert saved_s > 0


def test_one_that_copies_among_others_is_asked_in_every_other_cycle():
    """Half of 16 are, in one look of a cycle."""
    traffic = Traffic(MIDDLING, 16)
    traffic.rest()
    del traffic.asked[:]
    for _ in range(4 * CYCLE):
        traffic.step(copying=1)
    assert 2 <= sum(0 in asked for asked in traffic.asked) <= 3


def test_what_came_while_nobody_was_asked_is_not_looked_at():
    traffic = Traffic(MIDDLING, 4)
    traffic.rest()
    learned = []
    learn = traffic.speculation._learn
    traffic.speculation._learn = lambda *told: learned.append(told[0].sequence_id) or learn(*told)
    for _ in range(2 * CYCLE):
        traffic.step()
    asked = sum(map(len, traffic.asked[-2 * CYCLE :]))
    assert 0 < len(learned) <= 2 * asked


def test_shares_are_reckoned_once_a_step(monkeypatch):
    """Whoever is scored, all are before any guess is compared."""
    traffic = Traffic(MIDDLING, 16)
    for _ in range(3):
        traffic.step(copying=16)
    settled = []
    curve = traffic.speculation.acceptance._curve("lookup", 1, "")
    settle = type(curve)._settled
    monkeypatch.setattr(
        type(curve), "_settled", lambda self, tries: settled.append(1) or settle(self, tries)
    )
    curves = len(traffic.speculation.acceptance._curves)
    traffic.step(copying=16)
    assert len(settled) <= curves
