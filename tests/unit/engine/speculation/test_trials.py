"""Steps that are run for what they tell: more guesses than seem to pay, and none though they do."""

from headway.engine.cost import Prior, StepCost, Work
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.trials import PLAIN_ONCE, Trials

FLAT = StepCost(Prior(weights_s=0.01, token_s=1e-5))
"""A machine on which rows cost little."""


def varied(chance: float, num_steps: int) -> list[int]:
    """Step by step how many of two guesses of one sequence are verified."""
    trials, decodes, found = Trials(FLAT), Work(1, 1, 100, 100), []
    for _ in range(num_steps):
        counts = [2]
        trials.vary([[chance, chance**2]], counts, PlainStep([100], decodes, decodes, 8))
        found += counts
    return found


def test_where_guesses_gain_little_a_step_now_and_then_has_none():
    """What a step without takes is learned from steps without."""
    assert varied(0.1, 3 * PLAIN_ONCE).count(0) == 3


def test_a_trial_is_due_where_it_takes_three_thousandths_of_the_time_since_the_last():
    dear = StepCost(Prior(weights_s=0.01, token_s=0.01))
    trials, decodes = Trials(dear), Work(1, 1, 100, 100)
    plain, due = PlainStep([100], decodes, decodes, 8), []
    while not (due and due[-1]):
        due.append(trials.is_due(plain))
        trials.plain(plain)
    assert 900 < len(due) < 1100  # three rows take three steps
    counts = [0]
    assert trials.vary([[0.1] * 3], counts, plain) and counts == [3]
    assert not trials.is_due(plain)


def test_where_they_gain_much_all_steps_have_them():
    assert 0 not in varied(0.9, 3 * PLAIN_ONCE)
