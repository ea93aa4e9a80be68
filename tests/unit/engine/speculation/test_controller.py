"""How many guesses a step verifies: the best by its own model, within its budget and its time."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.speculation.controller import Drafting, PlainStep, choose, least_value
from headway.perf.filter import BREAKPOINTS, NUM_PARTS
from headway.perf.model import NOTHING, Prior, StepModel, Work


class Known(StepModel):
    """A step cost whose curve and units are given: seconds at 1, 2, 4 … tokens, then units."""

    def __init__(self, curve: list[float], units: list[float], windows: tuple[int, ...] = (0,)):
        super().__init__(windows=windows)
        given = [1 << at for at in range(len(curve))]
        self._parts = [*np.interp(BREAKPOINTS, given, curve).tolist(), *units]
        assert len(self._parts) == NUM_PARTS


STEADY = Known([0.01, 0.011, 0.013, 0.017, 0.025, 0.041], [1e-4, 1e-5, 1e-8, 1e-7])


def of_decodes(starts: list[int]) -> Work:
    return Work(len(starts), len(starts), sum(starts), sum(starts))


def plain(starts: list[int], work: Work | None = None, budget=99, max_s=inf) -> PlainStep:
    """A step of decodes, and of more where `work` says so."""
    decodes = of_decodes(starts) if starts else NOTHING
    return PlainStep(starts, decodes, work or decodes, budget, max_s)


def rate(cost, values, starts, counts, beside=None, drafting=None):
    """Expected tokens a second of decodes that verify so many guesses each."""
    decodes = of_decodes(starts)
    beside = work = beside or decodes
    for start, count in zip(starts, counts, strict=True):
        work = cost.with_drafts(work, start, count)
    seconds = cost.seconds(decodes) + cost.seconds(work) - cost.seconds(beside)
    seconds += drafting_seconds(counts, drafting)
    tokens = len(values) + sum(sum(chances[:n]) for chances, n in zip(values, counts))
    return tokens / seconds


def drafting_seconds(counts, drafting):
    """All guesses in one pass, or one pass for each depth."""
    return drafting.seconds(max(counts, default=0)) if drafting is not None else 0.0


def best_of_all(cost, values, starts, budget, beside=None, drafting=None):
    """The best rate of all choices, tried one by one."""
    choices = product(*(range(len(chances) + 1) for chances in values))
    return max(
        rate(cost, values, starts, counts, beside, drafting)
        for counts in choices
        if sum(counts) <= budget
    )


@st.composite
def costs(draw):
    """Curves with dear and free stretches, as learning may leave them."""
    steps = draw(st.lists(st.sampled_from([0.0, 1e-4, 1e-3, 5e-3, 3e-2]), min_size=8, max_size=8))
    curve = [1e-3 + sum(steps[:at]) for at in range(len(steps))]
    context = draw(st.sampled_from([1e-12, 1e-8, 1e-6, 1e-5]))
    return Known(curve, [1e-4, draw(st.sampled_from([1e-6, 1e-4])), context, 1e-7], (0, 8))


@st.composite
def decodes(draw, most_decodes=4, most_guesses=4):
    """(chances of each decode's guesses, where they begin)"""
    count = draw(st.integers(1, most_decodes))
    values = []
    for _ in range(count):
        shares = draw(st.lists(st.floats(0, 1), max_size=most_guesses))
        chance, chances = 1.0, []
        for share in shares:
            chance *= share
            chances.append(chance)
        values.append(chances)
    starts = draw(st.lists(st.integers(1, 3000), min_size=count, max_size=count))
    return values, starts


WORKS = st.sampled_from([None, Work(3, 1, 50, 80), Work(60, 2, 5000, 900)])
DRAFTING = st.sampled_from(
    [
        *(None, Drafting(1e-3), Drafting(5e-3), Drafting(1e-4, ask_s=2e-3)),
        *(Drafting(1e-3, at_once=True), Drafting(5e-3, at_once=True)),
    ]
)
AT_ONCE = DRAFTING.filter(lambda drafting: drafting is None or drafting.at_once)


def added(work: Work, starts: list[int]) -> Work:
    """The decodes and what is beside them."""
    return Work(*(a + b for a, b in zip(work, of_decodes(starts), strict=True)))


@given(costs(), decodes(3, 3), st.integers(0, 9), WORKS, AT_ONCE)
@settings(max_examples=100)
def test_no_choice_is_better(cost, given, budget, beside, drafting):
    """With prompts beside, a context that costs, heads that draft, and a curve of any shape."""
    values, starts = given
    beside = added(beside, starts) if beside else None
    counts = choose(values, plain(starts, beside, budget), cost, drafting).counts
    assert sum(counts) <= budget
    assert all(0 <= n <= len(chances) for n, chances in zip(counts, values, strict=True))
    found = rate(cost, values, starts, counts, beside, drafting)
    best = best_of_all(cost, values, starts, budget, beside, drafting)
    none = rate(cost, values, starts, [0] * len(values), beside)
    if best > (1 + 1e-6) * none:
        assert found == pytest.approx(best, rel=1e-6)
    else:
        assert not any(counts) or found > (1 - 1e-6) * none


@given(costs(), decodes(3, 3), DRAFTING)
@settings(max_examples=50)
def test_draft_tokens_raise_the_rate_by_the_least_speedup(cost, given, drafting):
    values, starts = given
    counts = choose(values, plain(starts, None, 9), cost, drafting, min_speedup=1.1).counts
    found = rate(cost, values, starts, counts, None, drafting)
    none = rate(cost, values, starts, [0] * len(values))
    assert not any(counts) or found > (1.1 - 1e-6) * none


@given(costs(), decodes(12, 8), st.integers(0, 60), st.floats(0.5, 1.5), DRAFTING)
@settings(max_examples=50)
def test_never_worse_than_none_and_within_what_is_allowed(cost, given, budget, longer, drafting):
    values, starts = given
    work = of_decodes(starts)
    none_s = cost.seconds(work)
    most_s = longer * none_s
    counts = choose(values, plain(starts, None, budget, most_s), cost, drafting).counts
    assert sum(counts) <= budget
    none = [0] * len(values)
    assert rate(cost, values, starts, counts) >= rate(cost, values, starts, none) * (1 - 1e-9)
    if any(counts):
        for start, count in zip(starts, counts, strict=True):
            work = cost.with_drafts(work, start, count)
        assert cost.seconds(work) + drafting_seconds(counts, drafting) <= most_s * (1 + 1e-9)


@given(costs(), decodes(8, 6), st.floats(1, 3), DRAFTING)
@settings(max_examples=50)
def test_more_acceptance_never_gives_fewer(cost, given, times, drafting):
    """All chances grown alike, as a better draft grows them."""
    values, starts = given
    top = max([1e-9, *(chance for chances in values for chance in chances)])
    small = [[chance / top / times for chance in chances] for chances in values]
    large = [[chance / top for chance in chances] for chances in values]
    few, many = (choose(v, plain(starts), cost, drafting).counts for v in (small, large))
    assert sum(few) <= sum(many)


@given(costs(), decodes(6, 8), st.integers(0, 40), WORKS)
@settings(max_examples=100)
def test_no_chosen_draft_tokens_are_worth_less_than_the_least_in_the_mean(cost, given, n, beside):
    values, starts = given
    step = plain(starts, added(beside, starts) if beside else None, n)
    counts = choose(values, step, cost).counts
    chosen = [value for each, count in zip(values, counts) for value in each[:count]]
    if chosen:
        assert sum(chosen) / len(chosen) >= least_value(step, cost, sum(counts)) * (1 - 1e-9)


def test_the_speedup_is_that_of_the_rate():
    values, starts = [[0.9, 0.8]] * 2, [100] * 2
    choice = choose(values, plain(starts), STEADY)
    times = rate(STEADY, values, starts, choice.counts) / rate(STEADY, values, starts, [0, 0])
    assert choice.speedup == pytest.approx(times) and times > 1.5
    assert choose([[], []], plain(starts), STEADY).speedup == 1


def test_it_looks_behind_a_dear_row():
    """The second token takes 10 ms more, the third to the sixteenth nothing: all or none."""
    cost = Known([0.01, 0.02, 0.02, 0.02, 0.02, 0.4], [1e-6, 1e-9, 1e-12, 1e-9])
    chances = [0.8**depth for depth in range(1, 16)]
    assert choose([chances[:1]], plain([9]), cost).counts == [0]
    assert choose([chances], plain([9]), cost).counts == [15]
    assert choose([chances], plain([9], budget=1), cost).counts == [0]


def test_who_copies_gets_guesses_and_who_does_not_gets_none():
    values = [[0.95, 0.9, 0.86, 0.82], [0.05, 0.003], [], [0.6, 0.2]]
    counts = choose(values, plain([100] * 4), STEADY).counts
    assert counts[0] == 4 and counts[1:3] == [0, 0]


def test_the_shorter_context_goes_first_where_context_is_dear():
    cost = Known([0.01, 0.012, 0.016], [1e-6, 1e-9, 1e-6, 1e-9])
    values = [[0.5, 0.25], [0.5, 0.25]]
    counts = choose(values, plain([9000, 90], budget=1), cost).counts
    assert counts == [0, 1]


def test_the_price_of_context_is_that_of_the_rate_that_is_reached():
    """10 ms without guesses, and room for one: 0.9 tokens in 2 ms more or 0.6 tokens in 0.6 ms.
    At 200 tokens/s the first is worth more; it gives 242 tokens/s, the second 245."""
    cost = Known([0.0074] * 3, [1e-9, 1e-9, 1e-6, 1e-9])
    starts = [599, 1999]
    assert choose([[0.6], [0.9]], plain(starts, budget=1), cost).counts == [1, 0]


def test_prompts_beside_do_not_make_guesses_cheap():
    """A step of 0.4 s of prompts: a guess kept one time in 30 saves a thirtieth of a decode's
    10 ms, and takes 1 ms, however long the step is."""
    cost = Known([0.01 + 0.001 * (1 << at) for at in range(12)], [1e-6, 1e-9, 1e-12, 1e-9])
    beside = added(Work(400, 1, 80_000, 400), [100])
    assert choose([[0.03]], plain([100], beside, 9), cost).counts == [0]
    assert choose([[0.3]], plain([100], beside, 9), cost).counts == [1]


def test_off_where_rows_cost_as_much_as_steps():
    """Many streams, products bind: a row costs what a token costs, and a guess is less."""
    cost = StepModel(Prior(weights_s=0.001, token_s=0.001))
    starts = [500] * 32
    values = [[0.6, 0.36, 0.2]] * 32
    assert choose(values, plain(starts), cost).counts == [0] * 32
    starts = [500]
    cost = StepModel(Prior(weights_s=0.013, token_s=0.0005))
    assert choose(values[:1], plain(starts), cost).counts == [3]


def test_a_drafting_model_drafts_fewer_the_more_it_costs():
    chances = [[0.8**depth for depth in range(1, 9)]] * 2
    starts = [100, 100]
    drafted = [
        choose(chances, plain(starts), STEADY, Drafting(each)).counts
        for each in (0.0, 1e-3, 3e-3, 2e-2)
    ]
    sums = [sum(counts) for counts in drafted]
    assert sums == sorted(sums, reverse=True) and sums[0] > sums[2] > sums[3] == 0


@pytest.mark.parametrize(
    ("values", "budget", "most_s"),
    [([], 9, inf), ([[], []], 9, inf), ([[0.9]], 0, inf), ([[0.0]], 9, inf), ([[0.9]], 9, 0.001)],
)
def test_nothing_to_choose(values, budget, most_s):
    starts = [5] * len(values)
    counts = choose(values, plain(starts, None, budget, most_s), STEADY).counts
    assert counts == [0] * len(values)
