"""Steps in which nobody is asked for guesses: where these save less than choosing takes."""

from headway.engine.speculation.rests import CHOOSING_S, CYCLE, PATIENCE, RESTED, Look, Rests


def looks(rests: Rests, saved_s: float, num_steps: int) -> list[Look]:
    """What each of so many steps does, where guesses save so many seconds of a step."""
    found = []
    for _ in range(num_steps):
        found.append(rests.next())
        if found[-1] is not Look.RESTS:
            rests.chose(saved_s, 4)
    return found


def test_guesses_that_pay_are_asked_for_in_each_step():
    assert set(looks(Rests(), 10 * CHOOSING_S, 100)) == {Look.ASKS}


def test_where_they_save_little_most_steps_have_none():
    found = looks(Rests(), CHOOSING_S, PATIENCE + 2 * CYCLE)
    assert set(found[:PATIENCE]) == {Look.ASKS}
    for begin in (PATIENCE, PATIENCE + CYCLE):
        assert found[begin : begin + RESTED] == [Look.RESTS] * RESTED
        assert found[begin + RESTED : begin + CYCLE] == [Look.ASKS] * 3 + [Look.LAST]


def test_where_they_begin_to_save_much_all_steps_have_them_again():
    """Seen in the first step that looks: at most 12 behind the change."""
    rests = Rests()
    looks(rests, 0.0, PATIENCE + CYCLE)
    found = looks(rests, 0.02, RESTED + 20)
    assert found[RESTED:] == [Look.ASKS] * 20
