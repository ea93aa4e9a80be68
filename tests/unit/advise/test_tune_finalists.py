"""Who runs for real: the rule by its example, and what comes of it where the simulation is wrong.

The search's machine and the real one are formulas over the same 16 settings (tuned_world.py); they
differ in one option, whose effect the search has the other way round.
"""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.advise.tune.finalists import Finalists, lost_values, single_difference, with_value
from headway.advise.tune.outcome import choose
from headway.advise.tune.space import KNOBS, NAMES, Changes, Knob, ordered, select_knobs
from tuned_world import SETTINGS, Truth, Worth, landscape, point, truth, worth_of

ROWS, TOKENS, POLICY = "max_num_seqs", "max_num_batched_tokens", "policy"
GRID = {ROWS: (8, 16, 32), TOKENS: (128,), POLICY: ("fcfs",)}
EIGHT, FCFS, SMALL = (ROWS, 8), (POLICY, "fcfs"), (TOKENS, 128)


def knobs() -> list[Knob]:
    return [
        replace(KNOBS[NAMES.index(name)], values=lambda s, v=values: list(v))
        for name, values in GRID.items()
    ]


def grid() -> list[Changes]:
    choices = [[(), *((name, value) for value in values)] for name, values in GRID.items()]
    return [ordered([each for each in one if each], SETTINGS) for one in product(*choices)]


def finalists(worth: Worth, count: int = 3) -> tuple[Finalists, list[Changes]]:
    """Of a search on this landscape."""
    search = landscape(worth)
    made = Finalists(search=search, knobs=knobs())
    return made, made.choose(search.run(knobs(), 96, 0), count)


def tune(worth: Worth, real: Worth, trials: int = 3, runs: int = 7) -> tuple[Changes, Truth]:
    """(the choice, the real runs): searched on one landscape and confirmed on another."""
    search = landscape(worth)
    points = search.run(knobs(), 96, 0)
    made = Finalists(search=search, knobs=knobs())
    most = 1.25 * max(worth_of(changes, real) for changes in grid())
    server = truth(real, most, runs, after=made.after)
    confirmed = server.run([(), *made.choose(points, trials)])
    return choose(points, confirmed, "goodput")[0], server


def wrong(worth: Worth, name: str) -> Worth:
    """What one option gives it takes, and the other way round."""
    return {each: 1 / its if each[0] == name else its for each, its in worth.items()}


def kept(choice: Changes, real: Worth) -> float:
    """The choice's goodput as a share of the best of the grid."""
    return worth_of(choice, real) / max(worth_of(changes, real) for changes in grid())


# ── the rule ────────────────────────────────────────────────────────────────────────────────

EXAMPLE = {EIGHT: 5.0, (ROWS, 16): 4.7, (ROWS, 32): 2.0, SMALL: 0.96, FCFS: 0.82}


def test_the_worked_example():
    """64 rows under `slo`: 8 rows are best; then the policy, then tokens, and no 16 rows."""
    made, result = finalists(EXAMPLE)
    assert result == [(EIGHT,), (EIGHT, FCFS), (EIGHT, SMALL)]
    assert list(made.reasons.values()) == [
        "the best in simulation",
        "max_num_seqs=8, policy turned: -18.0% in simulation",
        "max_num_seqs=8, max_num_batched_tokens turned: -4.0% in simulation",
    ]
    round_1 = {(): 23.0, (EIGHT,): 26.0, (EIGHT, FCFS): 34.0, (EIGHT, SMALL): 28.0}
    both = made.after(round_1)
    assert both == (EIGHT, SMALL, FCFS)
    assert made.reasons[both] == (
        "max_num_seqs=8 policy=fcfs, the best of the first round, with what won there alone"
    )


def test_a_name_goes_before_a_number_that_changes_more():
    made, result = finalists({**EXAMPLE, SMALL: 0.5}, 2)
    assert result == [(EIGHT,), (EIGHT, FCFS)]
    assert [turn.name for turn in made.turns] == [TOKENS]


def test_what_the_best_changes_goes_back_to_the_default():
    """8 rows under `fcfs`: without `fcfs`, and with the default's rows."""
    _, result = finalists({EIGHT: 1.5, (ROWS, 16): 1.45, FCFS: 1.2, SMALL: 0.9})
    assert result == [(EIGHT, FCFS), (EIGHT,), (FCFS,)]


def test_where_the_default_is_best_each_option_of_it_is_turned():
    _, result = finalists({EIGHT: 0.5, (ROWS, 16): 0.7, (ROWS, 32): 0.9, SMALL: 0.95, FCFS: 0.8})
    assert result == [(FCFS,), ((ROWS, 32),), (SMALL,)]


def test_what_changes_nothing_is_not_turned_and_the_next_of_the_ranking_follow():
    worth = {EIGHT: 1.5, (ROWS, 16): 1.45, (ROWS, 32): 1.1, SMALL: 0.99, FCFS: 0.99}
    made, result = finalists(worth)
    assert result[0] == (EIGHT,) and len(result) == 3 and made.turns == []
    assert list(made.reasons.values())[1:] == ["the next in simulation"] * 2


def test_a_setting_that_cannot_be_is_no_finalist():
    search = landscape(EXAMPLE, impossible=frozenset({FCFS}))
    made = Finalists(search=search, knobs=knobs())
    result = made.choose(search.run(knobs(), 96, 0), 3)
    assert len(result) == 3 and not any(FCFS in changes for changes in result)
    assert made.after({(): 9.0, (EIGHT,): 10.0}) is None


def test_a_setting_that_the_gate_refuses_is_no_finalist():
    """Nor one that the first round makes."""
    search = landscape(EXAMPLE)
    made = Finalists(search=search, knobs=knobs(), passes=lambda c: len(c) < 3 and SMALL not in c)
    assert made.choose(search.run(knobs(), 96, 0), 2) == [(EIGHT,), (EIGHT, FCFS)]
    assert made.after({(): 20.0, (EIGHT,): 26.0, (EIGHT, FCFS): 34.0}) is None


def test_where_the_round_agrees_the_next_option_is_turned_in_the_best():
    made, _ = finalists(EXAMPLE, 2)
    assert made.after({(): 10.0, (EIGHT,): 50.0, (EIGHT, FCFS): 40.0}) == (EIGHT, SMALL)
    assert made.after({(): 10.0, (EIGHT,): 50.0, (EIGHT, FCFS): 40.0}) is None, "none is left"


def test_what_lost_is_replaced_in_the_default_too():
    """The default is the best of the round; of the others `fcfs` beat `slo`: both together."""
    made, result = finalists({EIGHT: 1.5, (ROWS, 16): 1.45, FCFS: 1.2, SMALL: 0.4}, 2)
    assert result == [(EIGHT, FCFS), (EIGHT,)]
    assert made.after({(): 20.0, (EIGHT, FCFS): 12.0, (EIGHT,): 10.0}) == (FCFS,)


def test_a_number_that_won_goes_on_in_its_direction():
    """64 rows are best in simulation, 32 beat them, 8 are the fewest."""
    made, result = finalists(
        {EIGHT: 0.5, (ROWS, 16): 0.7, (ROWS, 32): 0.9, FCFS: 0.97, SMALL: 0.95}
    )
    assert ((ROWS, 32),) in result
    round_1 = dict.fromkeys(result, 9.0) | {(): 10.0, ((ROWS, 32),): 11.0}
    assert made.after(round_1) == (EIGHT,)


def test_settings_that_differ_in_one_option():
    slo, fcfs = (EIGHT, ("lane_share", 0.3)), (EIGHT, FCFS)
    assert single_difference((EIGHT,), fcfs) == POLICY
    assert single_difference(slo, fcfs) == POLICY, "a lane does nothing under fcfs"
    assert single_difference((), fcfs) == "" and single_difference(fcfs, fcfs) == ""
    assert with_value(slo, POLICY, "fcfs", SETTINGS) == fcfs
    assert with_value(fcfs, POLICY, None, SETTINGS) == (EIGHT,)
    assert with_value((FCFS,), ROWS, 8, SETTINGS) == fcfs, "in the order of the options"


def test_a_loss_is_of_two_percent_in_one_option():
    scores = {(): 10.0, (EIGHT,): 10.1, (EIGHT, FCFS): 12.0, (SMALL,): 15.0}
    assert list(lost_values(scores)) == [(POLICY, None, "fcfs"), (TOKENS, None, 128)]


# ── what comes of it ────────────────────────────────────────────────────────────────────────

FACTOR = st.floats(0.5, 1.6)
RUNS = hypothesis_settings(max_examples=30, deadline=None)


@st.composite
def landscapes(draw) -> Worth:
    """Any effect of each value of each option."""
    return {(name, value): draw(FACTOR) for name, values in GRID.items() for value in values}


@given(landscapes(), st.sampled_from([TOKENS, POLICY]))
@RUNS
def test_where_the_simulation_is_wrong_about_one_option_the_real_runs_decide(worth, name):
    """Within 5% of the best of all 16, in seven runs."""
    real = wrong(worth, name)
    choice, server = tune(worth, real)
    assert len(server.blocks) <= 7
    assert kept(choice, real) >= 0.95


@given(landscapes())
@RUNS
def test_where_it_is_wrong_about_a_number_along_all_of_its_values(worth):
    """Fewer rows are better in simulation and worse on the server, or the other way round. There
    the number that is tried first has to win, so that it goes on; tokens do less here."""
    factors = sorted((1.03 + abs(worth[ROWS, value] - 1) for value in GRID[ROWS]), reverse=True)
    fewer = {(ROWS, value): its for value, its in zip(GRID[ROWS], factors, strict=True)}
    more = wrong(fewer, ROWS)
    tokens = 1 + (1 - more[ROWS, 32]) * (worth[SMALL] - 1)
    for searched in ({**worth, **fewer}, {**worth, **more, SMALL: tokens}):
        real = wrong(searched, ROWS)
        assert kept(tune(searched, real)[0], real) >= 0.95


@given(landscapes())
@RUNS
def test_where_the_simulation_is_right_its_best_wins(worth):
    choice, _ = tune(worth, worth)
    assert kept(choice, worth) >= 0.96


def test_a_ranking_that_shares_a_mistake_would_not_find_it():
    """The three best in simulation are all of `slo`; really `fcfs` is worth 30% more."""
    real = {**EXAMPLE, FCFS: 1.3}
    ranking = [each.changes for each in landscape(EXAMPLE).run(knobs(), 96, 0) if each.changes]
    assert not any(FCFS in changes for changes in ranking[:3])
    assert kept(ranking[0], real) < 0.8
    choice, _ = tune(EXAMPLE, real)
    assert choice == (EIGHT, FCFS)


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_trials_are_the_settings_beside_the_default_in_a_round(trials: int):
    _, server = tune(EXAMPLE, wrong(EXAMPLE, POLICY), trials)
    rounds = Counter(block.round for block in server.blocks)
    assert max(rounds.values()) == trials + 1 and len(server.blocks) <= 7
    assert len({block.changes for block in server.blocks}) <= trials + 2


def test_no_room_beside_the_default_and_the_best_no_further_setting():
    """Six runs of four: the second round has the default and the best alone."""
    _, server = tune(EXAMPLE, wrong(EXAMPLE, POLICY), runs=6)
    last = {block.changes for block in server.blocks if block.round == 1}
    assert last == {(), (EIGHT, FCFS)}


def test_they_are_simulated_as_the_last_rung_is():
    """So that the report has what was promised beside what came."""
    search = landscape(EXAMPLE)
    made = Finalists(search=search, knobs=knobs())
    made.choose([point((EIGHT,), 50.0), point((), 10.0)], 3)
    result = made.simulated([point((EIGHT,), 50.0), point((), 10.0)])
    assert {each.changes for each in result} == {(), *made.reasons}
    assert [each.goodput for each in result] == sorted((p.goodput for p in result), reverse=True)


def test_all_options_of_the_tuner_are_turned():
    """Each of those that matter, whatever its kind, is in doubt."""
    names = [row.name for row in KNOBS if not row.changes_tokens]
    rows = select_knobs([], gate=False)
    worth = {(row.name, value): 0.9 for row in rows for value in row.values(SETTINGS)}
    search = landscape(worth)
    made = Finalists(search=search, knobs=rows)
    result = made.choose(search.run(rows, 96, 0), 3)
    turns = [name for changes in result for name, _ in changes] + [turn.name for turn in made.turns]
    assert sorted(turns) == sorted(names)
    assert turns[:3] == [POLICY, "late", "prefix_cache_policy"], "names before numbers"


@pytest.mark.parametrize(
    ("worth", "asked"), [(EXAMPLE, [(EIGHT,)]), (dict.fromkeys(EXAMPLE, 0.9), [])]
)
def test_where_none_is_wanted_nothing_is_simulated(worth: Worth, asked: list[Changes]):
    """With `--trials 0` the gate alone is asked, about the best."""
    search, gated = landscape(worth), dict[Changes, bool]()
    points = search.run(knobs(), 96, 0)
    search.asked.clear()
    made = Finalists(
        search=search, knobs=knobs(), passes=lambda changes: gated.setdefault(changes, True)
    )
    assert made.choose(points, 0) == [] and search.asked == []
    assert list(gated) == asked
