"""Steps in which nobody is asked for guesses: where these save less than choosing takes."""

from headway.engine.speculation.rests import CYCLE, PATIENCE, RESTED, Look, Rests

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
    found = looks(Rests(), CHOOSE_S, 1 + PATIENCE + 2 * CYCLE)[1:]
    assert set(found[:PATIENCE]) == {Look.ASKS}
    for begin in (PATIENCE, PATIENCE + CYCLE):
        assert found[begin : begin + RESTED] == [Look.RESTS] * RESTED
        assert found[begin + RESTED : begin + CYCLE] == [Look.ASKS, Look.LAST]


def test_where_they_save_as_much_as_a_step_is_unsure_most_steps_have_none():
    """Twice what choosing takes, and less than a twentieth of the step."""
    assert Look.RESTS in looks(Rests(), 2 * CHOOSE_S, 100, 50 * CHOOSE_S)
    assert Look.RESTS not in looks(Rests(), 2 * CHOOSE_S, 100, 5 * CHOOSE_S)


def test_where_choosing_takes_a_hundredth_of_a_step_all_steps_look():
    """A short answer among others that guesses bring nothing would be over before the next look."""
    assert set(looks(Rests(), 0.0, 100, 101 * CHOOSE_S)) == {Look.ASKS}
    assert Look.RESTS in looks(Rests(), 0.0, 100, 99 * CHOOSE_S)


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


def test_steps_of_prompts_alone_say_nothing_of_what_choosing_takes():
    """Nothing was chosen in them, and that took no time."""
    rests = Rests()
    assert Look.RESTS not in looks(rests, CHOOSE_S, 14)
    for _ in range(100):
        assert rests.next(0) is Look.RESTS
        rests.took(0.0)
    assert Look.RESTS in looks(rests, CHOOSE_S, 6), "choosing seemed free"
