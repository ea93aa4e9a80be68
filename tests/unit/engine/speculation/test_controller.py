"""How many guesses a step verifies: the best by its own model, within its budget and its time."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.cost import NOTHING, Prior, StepCost, Work
from headway.engine.knots import KNOTS
from headway.engine.learning import NUM_PARTS
from headway.engine.speculation.controller import (
    FREE,
    RIGHT,
    Drafting,
    PlainStep,
    Reach,
    choose,
)


class Known(StepCost):
    """A step cost whose curve and units are given: seconds at 1, 2, 4 … tokens, then units."""

    def __init__(self, curve: list[float], units: list[float], windows: tuple[int, ...] = (0,)):
        super().__init__(windows=windows)
        given = [1 << at for at in range(len(curve))]
        self._parts = [*np.interp(KNOTS, given, curve).tolist(), *units]
        assert len(self._parts) == NUM_PARTS


STEADY = Known([0.01, 0.011, 0.013, 0.017, 0.025, 0.041], [1e-4, 1e-5, 1e-8, 1e-7])


def of_decodes(starts: list[int]) -> Work:
    return Work(len(starts), len(starts), sum(starts), sum(starts))


def plain(starts: list[int], work: Work | None = None, budget=99, most_s=inf) -> PlainStep:
    """A step of decodes, and of more where `work` says so."""
    decodes = of_decodes(starts) if starts else NOTHING
    return PlainStep(starts, decodes, work or decodes, budget, most_s)


def rate(cost, values, starts, counts, beside=None, drafting=FREE):
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
    depth = max(counts, default=0)
    return (drafting.seconds(depth) if depth else 0) + sum(counts) * drafting.row_s


def best_of_all(cost, values, starts, budget, beside=None, drafting=FREE):
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
        *(FREE, Drafting(1e-3, 1e-4), Drafting(0.0, 1e-3), Drafting(5e-3, 0.0)),
        *(Drafting(1e-4, 1e-5, ask_s=2e-3), Drafting(0.0, 1e-5, ask_s=1e-3)),
        *(Drafting(1e-3, 1e-4, at_once=True), Drafting(5e-3, 0.0, at_once=True)),
    ]
)


def added(work: Work, starts: list[int]) -> Work:
    """The decodes and what is beside them."""
    return Work(*(a + b for a, b in zip(work, of_decodes(starts), strict=True)))


@given(costs(), decodes(3, 3), st.integers(0, 9), WORKS, DRAFTING)
@settings(max_examples=100)
def test_no_choice_is_better(cost, given, budget, beside, drafting):
    """With prompts beside, a context that costs, a drafting model, and a curve of any shape."""
    values, starts = given
    beside = added(beside, starts) if beside else None
    counts = choose(values, plain(starts, beside, budget), cost, drafting)
    assert sum(counts) <= budget
    assert all(0 <= n <= len(chances) for n, chances in zip(counts, values, strict=True))
    found = rate(cost, values, starts, counts, beside, drafting)
    best = best_of_all(cost, values, starts, budget, beside, drafting)
    none = rate(cost, values, starts, [0] * len(values), beside)
    if best > (1 + 1e-6) * none:
        assert found == pytest.approx(best, rel=1e-6)
    else:
        assert not any(counts) or found > (1 - 1e-6) * none


@given(costs(), decodes(3, 3), DRAFTING.filter(lambda drafting: drafting != FREE))
@settings(max_examples=50)
def test_what_is_drafted_raises_the_rate_by_the_least_gain(cost, given, drafting):
    values, starts = given
    counts = choose(values, plain(starts, None, 9), cost, drafting, least_gain=0.1)
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
    counts = choose(values, plain(starts, None, budget, most_s), cost, drafting)
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
    few, many = (choose(v, plain(starts), cost, drafting) for v in (small, large))
    assert sum(few) <= sum(many)


@given(costs(), decodes(6, 8), st.integers(0, 40), WORKS)
@settings(max_examples=100)
def test_what_is_worth_less_than_the_least_is_never_taken(cost, given, budget, beside):
    """So whoever guesses no more than that need not be looked at: the choice is the same."""
    values, starts = given
    step = plain(starts, added(beside, starts) if beside else None, budget)
    least = Reach(step, cost, 8).least_taken
    worthy = [chances if chances and chances[0] > least else [] for chances in values]
    assert choose(worthy, step, cost) == choose(values, step, cost)


@given(costs(), st.integers(1, 40), st.integers(1, 8), st.floats(0, RIGHT))
@settings(max_examples=100)
def test_no_guesses_gain_more_than_is_told_before_anybody_is_asked(cost, count, depth, share):
    """Whatever their chances are, as long as none is likelier than any is."""
    starts, chances = [100] * count, [share ** (at + 1) for at in range(depth)]
    step = plain(starts, None, 999)
    values = [chances[: depth - at % 2] for at in range(count)]
    counts = choose(values, step, cost)
    gain = rate(cost, values, starts, counts) / rate(cost, values, starts, [0] * count) - 1
    assert gain <= Reach(step, cost, depth).most_gained() + 1e-9


def test_rows_that_take_what_a_token_takes_gain_next_to_nothing():
    """Of 32 sequences, were all guesses right; of one much."""
    context = {"attended_s": 1e-9, "read_s": 1e-9}
    dear = StepCost(Prior(0.01, 9e-4, any_sampled_s=1e-3, sampled_s=4e-4, **context))
    gains = [Reach(plain([100] * n, None, 999), dear, 8).most_gained() for n in (1, 4, 32)]
    assert gains[0] > 3 and gains[1] > 0.2 and gains[2] < 0.03
    assert Reach(plain([100]), dear, 8).most_gained(0.9) > gains[0], "wrong ones refill a pool"
    assert Reach(plain([100], budget=0), dear, 8).most_gained() == 0


def test_it_looks_behind_a_dear_row():
    """The second token takes 10 ms more, the third to the sixteenth nothing: all or none."""
    cost = Known([0.01, 0.02, 0.02, 0.02, 0.02, 0.4], [1e-6, 1e-9, 1e-12, 1e-9])
    chances = [0.8**depth for depth in range(1, 16)]
    assert choose([chances[:1]], plain([9]), cost) == [0]
    assert choose([chances], plain([9]), cost) == [15]
    assert choose([chances], plain([9], budget=1), cost) == [0]


def test_who_copies_gets_guesses_and_who_does_not_gets_none():
    values = [[0.95, 0.9, 0.86, 0.82], [0.05, 0.003], [], [0.6, 0.2]]
    counts = choose(values, plain([100] * 4), STEADY)
    assert counts[0] == 4 and counts[1:3] == [0, 0]


def test_the_shorter_context_goes_first_where_context_is_dear():
    cost = Known([0.01, 0.012, 0.016], [1e-6, 1e-9, 1e-6, 1e-9])
    values = [[0.5, 0.25], [0.5, 0.25]]
    counts = choose(values, plain([9000, 90], budget=1), cost)
    assert counts == [0, 1]


def test_the_price_of_context_is_that_of_the_rate_that_is_reached():
    """10 ms without guesses, and room for one: 0.9 tokens in 2 ms more or 0.6 tokens in 0.6 ms.
    At 200 tokens/s the first is worth more; it gives 242 tokens/s, the second 245."""
    cost = Known([0.0074] * 3, [1e-9, 1e-9, 1e-6, 1e-9])
    starts = [599, 1999]
    assert choose([[0.6], [0.9]], plain(starts, budget=1), cost) == [1, 0]


def test_prompts_beside_do_not_make_guesses_cheap():
    """A step of 0.4 s of prompts: a guess kept one time in 30 saves a thirtieth of a decode's
    10 ms, and takes 1 ms, however long the step is."""
    cost = Known([0.01 + 0.001 * (1 << at) for at in range(12)], [1e-6, 1e-9, 1e-12, 1e-9])
    beside = added(Work(400, 1, 80_000, 400), [100])
    assert choose([[0.03]], plain([100], beside, 9), cost) == [0]
    assert choose([[0.3]], plain([100], beside, 9), cost) == [1]


def test_off_where_rows_cost_as_much_as_steps():
    """Many streams, products bind: a row costs what a token costs, and a guess is less."""
    cost = StepCost(Prior(weights_s=0.001, token_s=0.001))
    starts = [500] * 32
    values = [[0.6, 0.36, 0.2]] * 32
    assert choose(values, plain(starts), cost) == [0] * 32
    starts = [500]
    cost = StepCost(Prior(weights_s=0.013, token_s=0.0005))
    assert choose(values[:1], plain(starts), cost) == [3]


def test_a_drafting_model_drafts_fewer_the_more_it_costs():
    chances = [[0.8**depth for depth in range(1, 9)]] * 2
    starts = [100, 100]
    drafted = [
        choose(chances, plain(starts), STEADY, Drafting(each, 0.0))
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
    counts = choose(values, plain(starts, None, budget, most_s), STEADY)
    assert counts == [0] * len(values)


def test_where_prompts_wait_a_token_saves_no_more_than_its_row():
    """There a row takes as long as a guess, which is less sure to be a token."""
    values, starts = [[0.9, 0.8]] * 4, [100] * 4
    calm = plain(starts)
    waits = calm._replace(prompts_wait=True)
    assert sum(choose(values, calm, STEADY)) == 8 and not any(choose(values, waits, STEADY))
    assert waits.worth_s(STEADY) < 0.6 * calm.worth_s(STEADY)


def test_beside_prompts_a_token_saves_what_the_step_takes_beyond_them():
    """Where each row adds as much whatever their number, that is a step of decodes; where the first
    rows are free, for weights are read meanwhile, it is less, and fewer guesses pay."""
    values, calm = [[0.9, 0.8]] * 4, plain([100] * 4)
    busy = [calm._replace(busy=share) for share in (0.0, 0.5, 1.0)]
    assert [sum(choose(values, each, STEADY)) for each in busy] == [8, 8, 8]
    assert busy[2].worth_s(STEADY) == pytest.approx(calm.worth_s(STEADY), rel=0.05)
    bound = StepCost(Prior(weights_s=0.01, token_s=5e-4, sampled_s=0.0))
    worth = [each.worth_s(bound) for each in busy]
    assert worth == sorted(worth, reverse=True) and 0.1 < worth[2] / worth[0] < 0.5
