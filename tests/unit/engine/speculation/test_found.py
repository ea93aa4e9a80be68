"""What the drafter is worth beside guesses that cost nothing."""

import pytest

from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import Prior, StepCost, work_of
from headway.engine.speculation.asking import Asking
from headway.engine.speculation.candidates import Candidate, Guessing
from headway.engine.speculation.controller import Drafting, PlainStep, choose
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.found import BROKE_OFF, UNKNOWN, WENT_ON, Expected, Found
from headway.engine.speculation.price import DraftPrice
from headway.engine.speculation.speculation import Speculation

DRAFTED = [0.9, 0.81, 0.73, 0.66]


def copies() -> Found:
    """Whatever goes on brings five tokens, and what broke off one."""
    found = Found()
    for _ in range(300):
        found.saw(WENT_ON, 5, 5, 4)
        found.saw(BROKE_OFF, 1, 2, 4)
        found.saw(UNKNOWN, 0, 0, None)
    return found


def test_what_goes_on_leaves_nothing_to_the_drafter():
    """Of a guess that surely goes on nothing is left to it; of one that breaks off most."""
    found = copies()
    share, expected = found.beside([1.0, 1.0], 1)
    assert share < 0.01
    assert [round(number, 1) for number in expected] == [5.0, 5.0]
    share, expected = found.beside([0.0], 1)
    assert round(share, 2) == 0.75
    assert [round(number, 1) for number in expected] == [1.0, 2.0]
    share, expected = found.beside([], 0)
    assert (round(share, 2), expected) == (1.0, Expected(0.0, 0.0))


def test_what_is_drafted_where_answers_end_is_for_nobody():
    """Half of the guesses that break off do so where the answer ends: of those nothing is left."""
    found = copies()
    for number in range(300):
        found.became(BROKE_OFF)
        found.became(WENT_ON)
        if number % 2:
            found.ended(BROKE_OFF)
    whole, expected = copies().beside([0.0], 1)
    share, fewer = found.beside([0.0], 1)
    assert 0.4 * whole < share < 0.6 * whole and fewer.tokens < expected.tokens
    assert found.beside([1.0], 1)[0] == copies().beside([1.0], 1)[0]


def test_those_that_nobody_looked_at_are_counted_at_once():
    one_by_one, at_once = copies(), copies()
    for _ in range(37):
        one_by_one.became(UNKNOWN)
    one_by_one.ended(UNKNOWN)
    at_once.passed(30)
    at_once.passed(0)
    at_once.passed(7)
    at_once.ended(UNKNOWN)
    assert at_once.beside([], 0)[0] == pytest.approx(one_by_one.beside([], 0)[0])
    assert at_once.beside([], 0)[0] < copies().beside([], 0)[0]


def test_a_guess_that_is_an_end_token_ends_the_answer_if_it_is_right():
    candidate = Candidate(Drafts([7, 8, 2]), [0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    ends = frozenset([2])
    assert [candidate.chance_of_end(count, ends) for count in (0, 1, 2, 3)] == [0, 0, 0, 0.7]


def test_what_is_found_now_and_then_leaves_the_rest_as_good():
    """Half of the time more tokens are found and else none: drafted ones are verified in the other
    half, and are worth a row there as before; only drafting itself has to pay twice."""
    found = Found()
    for _ in range(300):
        found.saw(UNKNOWN, 8, 8, 4)
        found.saw(UNKNOWN, 0, 0, 4)
    share, _ = found.beside([], 0)
    assert 0.45 < share < 0.55
    cost = StepCost(Prior(weights_s=0.01, token_s=1e-3, sampled_s=0.0))
    work = work_of([100] * 4, (0,))
    plain = PlainStep([101] * 4, work, work, 64)
    drafting = Drafting(pass_s=1e-4)
    always = choose([DRAFTED] * 4, plain, cost, drafting)
    assert sum(choose([DRAFTED] * 4, plain, cost, drafting, [share] * 4)) >= sum(always) > 0
    dear = Drafting(pass_s=1e-4, ask_s=5e-3)
    assert any(choose([DRAFTED] * 4, plain, cost, dear))
    assert not any(choose([DRAFTED] * 4, plain, cost, dear, [0.1] * 4))


def test_time_in_which_tokens_are_found_is_dear():
    """A millisecond of drafting brings half a token: worth it beside one token in ten milliseconds,
    not beside six in twelve."""
    cost = StepCost(Prior(weights_s=0.01, token_s=2e-4, sampled_s=0.0))
    work = work_of([100], (0,))
    plain = PlainStep([101], work, work, 64)
    drafting = Drafting(pass_s=1e-3)
    assert choose([[0.4]], plain, cost, drafting) == [1]
    assert choose([[0.4]], plain._replace(found=Expected(5.0, 5.0)), cost, drafting) == [0]


def test_asking_counts_what_is_found_beside():
    """The same through who decides when the drafter is asked."""
    config = SpeculationConfig(sources=("lookup", "draft"), draft_share=0.1)
    cost = StepCost(Prior(weights_s=0.01, token_s=2e-4, sampled_s=0.0))
    asking = Asking(DraftPrice(cost, config.draft_share), cost)
    work = work_of([100], (0,))
    plain = PlainStep([101], work, work, 64)
    assert any(asking.counts([DRAFTED], plain))
    share, expected = copies().beside([0.98, 0.97], 1)
    assert asking.counts([DRAFTED], plain._replace(found=expected), [share]) == [0]


def test_what_does_not_pay_is_not_counted_as_found(monkeypatch):
    """A guess that is right, and that nobody would verify, is left to the drafter."""
    speculation = Speculation(SpeculationConfig(sources=("lookup",)), StepCost())
    told = []
    monkeypatch.setattr(speculation.found, "saw", lambda *seen: told.append(seen))
    for num_paying in (0, 2, 4):
        state = Guessing({})
        state.found = Candidate(Drafts([5, 6, 7, 8]), [0.3] * 4, [0.3] * 4)
        state.num_paying = num_paying
        speculation._score_found(state, [5, 6, 7, 9], 3)
    assert told == [(UNKNOWN, 0, 0, 3), (UNKNOWN, 2, 2, 3), (UNKNOWN, 3, 4, 3)]
