"""The tuner's search on landscapes that are known: planted optima, ties, and what it costs.

`Landscape` (tuned_world.py) answers what a setting scores by a formula, in no time; the rungs, the
ranking and the leaving out of changes are the tuner's own.
"""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes import make_settings
from headway.advise.simulate.run import prepare_simulation
from headway.advise.tune import search as searching
from headway.advise.tune.search import (
    FINAL_CASES,
    RUNGS,
    Point,
    SettingSearch,
    pareto_front,
    score_bucket,
    shortened,
)
from headway.advise.tune.space import (
    KNOBS,
    Changes,
    candidates,
    options_of,
    ordered,
    select_knobs,
    single_changes,
)
from headway.bench.calibrate import open_calibration
from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import UsageError
from simulated_house import measured_here
from tuned_world import SETTINGS, Landscape, landscape, point, worth_of

FREE = [knob.name for knob in KNOBS if not knob.changes_tokens]
VALUES = {row.name: row.values(SETTINGS) for row in KNOBS}


# ── planted optima ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FREE)
def test_one_option_that_matters_is_found_and_nothing_else_is_said(name: str):
    """Whatever the option: each of its values is among the candidates, alone."""
    for value in VALUES[name]:
        made = landscape({(name, value): 1.3})
        result = made.run(select_knobs([], gate=False), 96, seed=1)
        assert result[0].changes == ((name, value),), value
        assert result[0].goodput == pytest.approx(13)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_options_that_matter_are_found_together(count: int, seed: int):
    """Whatever was drawn: what wins alone is put together after the first rung."""
    planted = {
        ("max_num_seqs", 128): 1.2,
        ("block_size", 32): 1.15,
        ("policy", "fair"): 1.12,
        ("prefix_cache_policy", VALUES["prefix_cache_policy"][0]): 1.1,
    }
    worth = dict(list(planted.items())[:count])
    made = landscape({**worth, ("max_num_seqs", 256): 1.05, ("block_size", 64): 1.02})
    result = made.run(select_knobs([], gate=False), 96, seed)
    assert set(result[0].changes) == worth.keys()


def test_what_wins_alone_and_loses_together_is_not_joined():
    """Each of two is worth a tenth, both are worth nothing: one of them is chosen."""

    class Clash(Landscape):
        def point(self, changes: Changes, conversations: int, cases: int) -> Point:
            result = Landscape.point(self, changes, conversations, cases)
            clash = {"max_num_seqs", "block_size"} <= dict(changes).keys()
            return msgspec.structs.replace(result, goodput=5.0 if clash else result.goodput)

    known = landscape({("max_num_seqs", 128): 1.1, ("block_size", 32): 1.12})
    made = Clash(folder=Path(), engine=EngineOptions(), calibration=None, plan=known.plan,
                 worth=known.worth)  # fmt: skip
    assert made.run(select_knobs([], gate=False), 96, 0)[0].changes == (("block_size", 32),)


@given(st.data())
@hypothesis_settings(max_examples=40, deadline=None)
def test_the_best_is_never_worse_than_the_default_and_never_carries_ballast(data):
    """On any landscape: all finalists are ranked, the default is one of them, and of the best no
    change can be left out without losing something."""
    names = data.draw(st.lists(st.sampled_from(FREE), min_size=1, max_size=4, unique=True))
    pairs = [(name, value) for name in names for value in VALUES[name]]
    factors = data.draw(
        st.lists(st.floats(0.5, 1.6), min_size=len(pairs), max_size=len(pairs)), label="factors"
    )
    made = landscape(dict(zip(pairs, factors, strict=True)))
    result = made.run(select_knobs(names, gate=False), 24, data.draw(st.integers(0, 99)))
    goodputs = {each.changes: each.goodput for each in result}
    best = result[0]
    assert () in goodputs and best.goodput >= 0.99 * goodputs[()]
    assert best.goodput >= 0.99 * max(goodputs.values())
    for change in best.changes:
        rest = tuple(each for each in best.changes if each != change)
        without = worth_of(rest, made.worth)
        assert without < best.goodput * (1 - searching.SCORE_TIE_SHARE / 2)


def test_a_plateau_is_the_default():
    """Nothing matters: of 96 settings that are all the same the default is the first."""
    result = landscape({}).run(select_knobs([], gate=False), 96, seed=0)
    assert result[0].changes == ()


def test_a_gain_below_half_a_percent_is_none():
    for factor, wins in ((1.001, False), (1.02, True)):
        result = landscape({("max_num_seqs", 128): factor}).run(
            select_knobs([], gate=False), 40, seed=0
        )
        assert bool(result[0].changes) == wins, factor


def test_what_only_harms_leaves_the_default():
    worth = {(name, value): 0.8 for name in FREE for value in VALUES[name]}
    assert landscape(worth).run(select_knobs([], gate=False), 96, seed=0)[0].changes == ()


def test_settings_that_cannot_be_cost_nothing_and_hide_nothing():
    """The best value cannot be: the second best is found, and no point was asked of the first."""
    gone = ("max_num_seqs", 256)
    made = landscape({gone: 2.0, ("max_num_seqs", 128): 1.4}, impossible=frozenset({gone}))
    result = made.run(select_knobs(["max_num_seqs"], gate=False), 12, seed=0)
    assert result[0].changes == (("max_num_seqs", 128),)
    assert not any(gone in changes for changes, _, _ in made.asked) and made.refused


# ── what it costs ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [4, 12, 96])
def test_each_rung_asks_fewer_settings_about_more(count: int):
    """96 candidates on 150 conversations, 32 on 400, a dozen on 1,500 in three drawn cases."""
    made = landscape({("max_num_seqs", 128): 1.3})
    made.run(select_knobs([], gate=False), count, seed=0)
    rungs = Counter(conversations for _, conversations, _ in made.asked)
    sizes = [max(round(count * share), 4) for _, share in RUNGS]
    joined = {name for name, _ in made.worth}
    beside = 1 + len(
        joined
    )  # the default where it was not among the best, and what is put together
    for (conversations, _), size in zip(RUNGS[:-1], sizes, strict=False):
        assert rungs[conversations] <= size + beside
    simpler = max(len(changes) for changes, _, _ in made.asked)
    assert rungs[RUNGS[-1][0]] <= sizes[-1] + 1 + simpler
    assert {cases for _, talks, cases in made.asked if talks == RUNGS[-1][0]} == {FINAL_CASES}
    for conversations, _ in RUNGS:
        assert any(c == () and n == conversations for c, n, _ in made.asked), "the default is there"


@pytest.mark.parametrize(("seconds", "most"), [(1e9, 1000), (60.0, 62), (0.0, 15)])
def test_a_search_without_time_leaves_out_combinations_and_the_last_of_the_ranking(
    seconds: float, most: int
):
    """A second each: of 60 the first rung has 18, the default and options alone. What matters is
    found nevertheless, four settings in each rung at the least, and what was left out is told."""
    made = landscape({("max_num_seqs", 8): 1.3}, seconds=seconds)
    made.clock = lambda: float(len(made.asked))
    result = made.run(select_knobs([], gate=False), 96, seed=0)
    assert result[0].changes == (("max_num_seqs", 8),) and len(result) >= 4
    assert any(not each.changes for each in result)
    rungs = Counter(conversations for _, conversations, _ in made.asked)
    assert len(made.asked) <= most and min(rungs.values()) >= 4
    assert (made.num_left_out > 0) == (seconds < 1e9)


def test_the_same_seed_searches_the_same_and_another_does_not():
    knobs = select_knobs([], gate=False)
    first, again, other = (candidates(knobs, SETTINGS, 96, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert all(len(c) <= 4 for c in first) and len(set(first)) == len(first)


def test_few_candidates_are_turned_alone():
    """With ten there is no room for pairs; with one knob there are no more than its values."""
    result = candidates(select_knobs([], gate=False), SETTINGS, 10, seed=0)
    assert len(result) == 10 and all(len(changes) <= 1 for changes in result)
    few = candidates(select_knobs(["policy"], gate=False), SETTINGS, 96, seed=0)
    assert set(few) == {(), (("policy", "fair"),), (("policy", "fcfs"),)}


def test_progress_is_told():
    told: list[str] = []
    landscape({}, watch=told.append).run(select_knobs(["policy"], gate=False), 4, seed=0)
    assert told[0] == "1 of 3 settings, 150 conversations" and told[-1].endswith(
        "1500 conversations"
    )


# ── the space ───────────────────────────────────────────────────────────────────────────────


def test_every_candidate_is_an_option_that_serve_takes():
    """Each value within its bounds: what is written is what `headway serve` reads."""
    for changes in single_changes(list(KNOBS), SETTINGS):
        made = options_of(EngineOptions(), changes)
        ((name, value),) = changes
        assert getattr(made, name) == value
    assert {name for ((name, _),) in single_changes(list(KNOBS), SETTINGS)} == {
        k.name for k in KNOBS
    }


def test_values_stay_within_bounds():
    """Of one row an eighth is none; of 4,096 four times as many are beyond what may be asked."""
    rows = KNOBS[0].values
    assert rows(replace(SETTINGS, max_num_seqs=1)) == [2, 4]
    assert rows(replace(SETTINGS, max_num_seqs=4096)) == [512, 1024, 2048]
    batched = KNOBS[1].values
    assert batched(replace(SETTINGS, max_num_batched_tokens=4)) == [1, 2, 8, 16]


def test_the_knobs_are_the_tunable_options():
    tunable = [f.name for f in fields(EngineOptions) if f.metadata["tunable"]]
    assert sorted(tunable) == sorted(knob.name for knob in KNOBS)


def test_under_another_policy_its_own_knobs_are_not_turned():
    fcfs = make_settings(num_blocks=(1251,), block_size=16, policy="fcfs", max_num_seqs=8)
    names = {name for ((name, _),) in single_changes(select_knobs([], gate=False), fcfs)}
    assert names.isdisjoint({"late", "lane_share", "long_prefill", "aging"})
    both = ordered([("lane_share", 0.3), ("policy", "slo")], fcfs)
    assert both == (("policy", "slo"), ("lane_share", 0.3))


# ── ranking ─────────────────────────────────────────────────────────────────────────────────


def prefers(prefer: str) -> Landscape:
    return landscape({}, prefer=prefer)


A, B, C = (("policy", "fcfs"),), (("policy", "fair"),), (("block_size", 8),)


@pytest.mark.parametrize(
    ("prefer", "first"),
    [("goodput", ()), ("ttft", A), ("tpot", B), ("throughput", C)],
)
def test_the_dial_turns_within_a_twentieth_of_the_goodput(prefer: str, first: Changes):
    """Each of three is best in one thing and 3% below in goodput; far below is out of the dial."""
    points = [
        point((), 10.0),
        point(A, 9.7, ttft_s=0.1),
        point(B, 9.7, tpot_s=0.01),
        point(C, 9.7, tokens_per_s=200.0),
        point((("aging", 1),), 9.0, ttft_s=0.001, tpot_s=0.001, tokens_per_s=1e4),
    ]
    ranked = prefers(prefer).ranked(points)
    assert ranked[0].changes == first
    assert ranked[-1].goodput == 9.0


def test_of_equals_the_simpler_is_first():
    long = (*A, ("aging", 1))
    ranked = prefers("goodput").ranked([point(long, 10.0), point(A, 10.01), point((), 10.0)])
    assert [len(each.changes) for each in ranked] == [0, 1, 2]


def test_where_nobody_meets_anything_all_are_equal():
    ranked = prefers("goodput").ranked([point(A, 0.0), point((), 0.0)])
    assert ranked[0].changes == () and score_bucket(0.0) < score_bucket(1e-6)


def test_a_setting_without_an_answer_is_never_preferred():
    """Whoever answers nobody has no first token; that is not a short wait."""
    never = point(A, 10.0, ttft_s=float("inf"))
    assert prefers("ttft").ranked([never, point((), 10.0)])[0].changes == ()


@given(st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.001, 1)), min_size=1, max_size=30))
def test_the_front_is_what_nothing_beats(pairs):
    points = [point((), 1.0, ttft_s=ttft, tpot_s=tpot) for ttft, tpot in pairs]
    edge = list(pareto_front(points))
    for mine in edge:
        assert not any(p.ttft_s < mine.ttft_s and p.tpot_s < mine.tpot_s for p in points)
    for other in points:
        assert any(m.ttft_s <= other.ttft_s and m.tpot_s <= other.tpot_s for m in edge)


# ── real simulations ────────────────────────────────────────────────────────────────────────

LOAD = BenchOptions(
    rate=8, num_requests=60, input_len="200", output_len="20", slo=["ttft=500ms,tpot=50ms"], seed=2
)


def simulated(path: Path, **engine: Any) -> SettingSearch:
    options = EngineOptions(**engine)
    file = path / "here.json"
    file.write_bytes(msgspec.json.encode(measured_here(options)))
    told = SimulateOptions(calibration=str(file), served_slo=LOAD.slo)
    simulation = prepare_simulation(model_folder(None), told, LOAD, options)
    return SettingSearch(
        folder=model_folder(None), engine=options, calibration=open_calibration(str(file)),
        plan=simulation,
    )  # fmt: skip


def test_other_blocks_hold_the_same_tokens(tmp_path: Path):
    made = simulated(tmp_path)
    base = made.plan.machinery.settings.cache
    for size in (8, 32, 64):
        cache = made.machine((("block_size", size),)).settings.cache
        held = (cache.num_blocks[0] - 1) * size
        assert cache.block_size == size
        assert base.block_size * (base.num_blocks[0] - 1) - size < held <= 1250 * base.block_size


def test_other_formats_are_transferred_and_the_rest_is_as_measured(tmp_path: Path):
    made = simulated(tmp_path)
    assert made.machine((("quantization", "int8"),)).label == "transferred"
    assert made.machine((("policy", "fcfs"),)).label == "calibrated"
    assert made.machine(()) is made.plan.machinery
    assert made.machine((("max_num_seqs", 8),)) is made.machine((("max_num_seqs", 8),)), "kept"


def test_the_worst_of_the_drawn_cases_counts(tmp_path: Path):
    """Under a load that one row cannot hold, more cases find no more goodput, never less bad."""
    made = simulated(tmp_path, max_num_seqs=2)
    one, three = (made.point((), 60, cases).goodput for cases in (1, 3))
    assert three <= one
    assert made.num_simulated == 2


def test_a_shorter_stretch_is_the_beginning_of_the_same(tmp_path: Path):
    bench = simulated(tmp_path).plan.bench
    short = shortened(bench, 20)
    assert short.traffic.conversations == bench.traffic.conversations[:20]
    assert short.traffic.span_s == short.traffic.conversations[-1].at_s
    assert shortened(bench, 60) is shortened(bench, 1000) is bench


def test_a_calibration_of_another_model_is_refused(tmp_path: Path):
    result = msgspec.structs.replace(measured_here(EngineOptions()), fingerprint="another")
    file = tmp_path / "other.json"
    file.write_bytes(msgspec.json.encode(result))
    told = SimulateOptions(calibration=str(file), served_slo=LOAD.slo)
    with pytest.raises(UsageError, match="another"):
        prepare_simulation(model_folder(None), told, LOAD, EngineOptions())
