"""Steps in which nobody is asked for guesses: where these save less than choosing takes."""

import pytest

from headway.engine.speculation.rests import (
    AT_START,
    CYCLE,
    HOPELESS,
    IN_VAIN,
    LEAST_GAIN,
    LEAST_HOPE,
    LOOKS,
    PATIENCE,
    Look,
    NeverRests,
    Rests,
)

RESTED = CYCLE - LOOKS
CHOOSE_S, STEP_S = 0.001, 0.016


def looks(rests: Rests, saved_s: float, num_steps: int, step_s: float = STEP_S) -> list[Look]:
    """What each of so many steps does, where guesses save so many seconds of a step."""
    found = []
    for _ in range(num_steps):
        found.append(rests.next(4))
        if found[-1] is not Look.RESTS:
            rests.chose(saved_s, step_s)
        rests.took(CHOOSE_S if found[-1] is not Look.RESTS else 0.0)
    return found


def test_guesses_that_pay_are_asked_for_in_each_step():
    assert set(looks(Rests(), 10 * CHOOSE_S, 100)) == {Look.ASKS}


def test_where_they_save_little_most_steps_have_none():
    rests, unpaid = Rests(), 0
    looks(rests, 10 * CHOOSE_S, 8)
    while rests.next(4) is Look.ASKS:
        unpaid = unpaid + 1 if rests.is_doubtful else 0
        rests.chose(CHOOSE_S, STEP_S)
        rests.took(CHOOSE_S)
    assert unpaid == PATIENCE - 1, "the last that paid was the one before these and another"
    found = [Look.RESTS, *looks(rests, CHOOSE_S, 2 * CYCLE - 1)]
    assert found == 2 * [*[Look.RESTS] * RESTED, Look.ASKS, Look.LAST]


def test_before_any_has_paid_a_few_are_tried_and_then_only_those_that_save_much():
    """What their rows take is known by steps that have them; the start costs no more than that."""
    rests, said = Rests(), []
    for _ in range(AT_START + 1):
        assert rests.next(4) is Look.ASKS
        said.append(rests.chose(0.01 * STEP_S, STEP_S))
        rests.took(CHOOSE_S)
    assert said == [True] * AT_START + [False]
    assert looks(rests, 0.01 * STEP_S, CYCLE) == [*[Look.RESTS] * RESTED, Look.ASKS, Look.LAST]
    assert not rests.chose(0.15 * STEP_S, STEP_S)
    assert rests.chose(0.5 * STEP_S, STEP_S) and rests.chose(0.0, STEP_S), "they have paid"


def test_who_found_nothing_at_the_start_may_try_later():
    rests = Rests()
    looks(rests, 0.0, AT_START + 2 * CYCLE)
    assert rests.is_resting and rests.chose(0.01 * STEP_S, STEP_S)


def test_where_they_save_as_much_as_a_step_is_unsure_most_steps_have_none():
    """Twice what choosing takes, and less than a twentieth of the step."""
    assert Look.RESTS in looks(Rests(), 2 * CHOOSE_S, 100, 50 * CHOOSE_S)
    assert Look.RESTS not in looks(Rests(), 2 * CHOOSE_S, 100, 5 * CHOOSE_S)


def test_where_choosing_takes_three_thousandths_of_a_step_all_steps_look():
    """A short answer among others that guesses bring nothing would be over before the next look."""
    assert set(looks(Rests(), 0.0, 100, 1.01 * CHOOSE_S / IN_VAIN)) == {Look.ASKS}
    assert Look.RESTS in looks(Rests(), 0.0, 100, 0.9 * CHOOSE_S / IN_VAIN)


@pytest.mark.parametrize(("parts", "cycle"), [(2, 4), (3, 6), (7, 14), (8, 16), (100, 16)])
def test_looks_take_three_thousandths_of_the_time_as_far_as_one_in_sixteen_allows(parts, cycle):
    """The less choosing takes, the sooner is seen who begins to copy."""
    step_s = CHOOSE_S / IN_VAIN / (parts - 0.01)
    found = looks(Rests(), 0.0, 200, step_s)[-5 * cycle :]
    assert len(found) - found.count(Look.RESTS) == 5 * LOOKS
    share = 5 * LOOKS * CHOOSE_S / (len(found) * step_s)
    assert share <= 1.01 * IN_VAIN or cycle == CYCLE


def test_where_choosing_takes_no_time_all_steps_look():
    """As on the clock of a simulation, which stands still meanwhile."""
    rests = Rests()
    for _ in range(3 * CYCLE):
        assert rests.next(4) is Look.ASKS
        rests.chose(0.0, STEP_S)
        rests.took(0.0)


def test_where_they_begin_to_save_much_all_steps_have_them_again():
    """Seen in the first step that looks: at most 14 behind the change."""
    rests = Rests()
    looks(rests, 0.0, 1 + PATIENCE + CYCLE)
    found = looks(rests, 0.02, RESTED + 20)
    assert found[RESTED:] == [Look.ASKS] * 20


def test_at_rest_only_guesses_that_end_it_are_verified():
    """Those that save a hundredth of a step are foretold no better than that."""
    rests = Rests()
    looks(rests, STEP_S, AT_START)
    assert rests.next(4) is Look.ASKS and rests.chose(0.01 * STEP_S, STEP_S)
    looks(rests, 0.0, 4 * CYCLE)
    assert rests.is_resting and not rests.chose(0.01 * STEP_S, STEP_S)
    assert rests.chose(STEP_S, STEP_S) and not rests.is_resting


def test_what_takes_time_to_make_has_to_gain_more_at_rest():
    """So much that it would be verified: what is drafted and then left was for nothing."""
    rests = Rests()
    before = rests.least_gain
    looks(rests, STEP_S, AT_START)
    looks(rests, 0.0, 4 * CYCLE)
    assert rests.least_gain > 2 * before
    assert not rests.chose(0.9 * rests.least_gain * STEP_S, STEP_S)
    looks(rests, 0.0, CYCLE)
    assert rests.chose(1.1 * rests.least_gain * STEP_S, STEP_S)


def test_nobody_is_asked_where_guesses_gain_nothing_were_they_all_right():
    """And what that took says nothing of what choosing takes."""
    rests = Rests()
    looks(rests, 0.0, AT_START - 1)
    rests.next(4)
    assert rests.hopes(0.2, 4) and rests.look is Look.ASKS
    assert not rests.hopes(0.01, 4) and rests.look is Look.RESTS
    for _ in range(100):
        rests.took(0.0)
    assert looks(rests, CHOOSE_S, HOPELESS + 1) == [Look.RESTS] * HOPELESS + [Look.ASKS]
    assert not rests.hopes(0.01, 4)
    assert rests.next(5) is Look.RESTS and rests.next(3) is Look.ASKS, "there are fewer rows"
    assert Look.RESTS in looks(rests, CHOOSE_S, PATIENCE), "choosing seemed free"


def test_where_none_has_paid_of_late_guesses_have_to_be_able_to_gain_more():
    rests = Rests()
    looks(rests, 0.0, AT_START + 2)
    assert rests.is_resting and not rests.hopes(0.9 * LEAST_HOPE, 4)
    rests = Rests()
    looks(rests, STEP_S, 3)
    assert rests.hopes(0.9 * LEAST_HOPE, 4) and not rests.hopes(0.9 * LEAST_GAIN, 4)


def test_without_a_drafters_guesses_to_verify_a_cycle_has_one_look():
    for drafter, most in ((False, 1), (True, 2)):
        rests, found = Rests(), []
        looks(rests, 0.0, AT_START + 2)
        for _ in range(4 * CYCLE):
            found.append(rests.next(4))
            if found[-1] is not Look.RESTS:
                rests.chose(0.0, STEP_S)
                rests.asked(drafter)
            rests.took(CHOOSE_S if found[-1] is not Look.RESTS else 0.0)
        assert found.count(Look.ASKS) in (3, 4, 5)
        assert found.count(Look.LAST) == (0 if most == 1 else found.count(Look.ASKS))


def test_it_is_known_of_each_step_whether_it_rests_without_hope():
    """Not of one in which nobody decodes: its prompts are verified alone."""
    rests = Rests()
    rests.next(4)
    assert not rests.is_hopeless and not rests.hopes(0.01, 4) and rests.is_hopeless
    for _ in range(HOPELESS):
        assert rests.next(4) is Look.RESTS and rests.is_hopeless
    rests.next(4)
    assert not rests.is_hopeless and not rests.hopes(0.01, 4)
    rests.next(0)
    assert not rests.is_hopeless
    rests.next(4)
    assert rests.is_hopeless
    rests.next(3)
    assert not rests.is_hopeless


def test_steps_of_prompts_alone_say_nothing_of_what_choosing_takes():
    """Nothing was chosen in them, and that took no time."""
    rests = Rests()
    assert Look.RESTS not in looks(rests, CHOOSE_S, AT_START)
    for _ in range(100):
        assert rests.next(0) is Look.RESTS
        rests.took(0.0)
    assert Look.RESTS in looks(rests, CHOOSE_S, 2), "choosing seemed free"


def test_who_never_rests_takes_whatever_pays():
    rests = NeverRests()
    assert set(looks(rests, 0.0, 3 * CYCLE)) == {Look.ASKS}
    assert rests.next(0) is Look.RESTS
    assert rests.hopes(0.0, 4) and rests.chose(-1.0, STEP_S)
