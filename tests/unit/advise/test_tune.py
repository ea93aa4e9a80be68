"""The tuner: what it tries, how it ranks, what it believes, and what it writes."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headway.advise.simulate.run import prepare_simulation
from headway.advise.tune import confirm, outcome, page
from headway.advise.tune.confirm import Confirmation, ConfirmedSetting, MeasuredBlock, paired_gain
from headway.advise.tune.run import check_load
from headway.advise.tune.search import SettingSearch, pareto_front
from headway.advise.tune.space import KNOBS, candidates, ordered, select_knobs
from headway.bench.calibrate import open_calibration
from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions, read_options
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import HeadwayError, UsageError
from headway.measure.server_process import DiedError, ServerProcess
from simulated_house import measured_here
from tuned_world import point

FOLDER = model_folder(None)
SLO = ["ttft=500ms,tpot=50ms"]
LOAD = BenchOptions(rate=8, num_requests=100, input_len="200", output_len="20", slo=SLO, seed=2)


def search(
    path: Path, load: BenchOptions = LOAD, prefer: str = "goodput", **engine
) -> SettingSearch:
    """A search on a machine of 20 ms steps; `engine` are the options of the default."""
    options = EngineOptions(**engine)
    file = path / "here.json"
    file.write_bytes(msgspec.json.encode(measured_here(options)))
    simulate_options = SimulateOptions(calibration=str(file), served_slo=load.slo)
    simulation = prepare_simulation(FOLDER, simulate_options, load, options)
    return SettingSearch(
        folder=FOLDER,
        engine=options,
        calibration=open_calibration(str(file)),
        plan=simulation,
        prefer=prefer,
    )


def test_the_default_comes_first_and_each_knob_alone(tmp_path: Path):
    settings = search(tmp_path).plan.machinery.settings
    knobs = select_knobs([], gate=False)
    result = candidates(knobs, settings, 96, seed=0)
    assert result[0] == () and len(result) == len(set(result)) == 96
    single = [c for c in result if len(c) == 1]
    assert {name for ((name, _),) in single} == {row.name for row in knobs}
    assert all(row.now(settings) != dict(c).get(row.name, "-") for c in result for row in knobs)
    assert result == candidates(knobs, settings, 96, seed=0)


def test_what_does_nothing_under_a_policy_is_not_tried(tmp_path: Path):
    settings = search(tmp_path).plan.machinery.settings
    picked = [("late", "shed"), ("policy", "fcfs"), ("max_num_seqs", 4)]
    assert ordered(picked, settings) == (("max_num_seqs", 4), ("policy", "fcfs"))


def test_knobs_are_options_and_those_that_change_tokens_want_a_gate():
    assert {row.name for row in KNOBS} <= set(EngineOptions.__dataclass_fields__)
    with pytest.raises(UsageError, match="speed"):
        select_knobs(["speed"], gate=True)
    with pytest.raises(UsageError, match="changes what is answered"):
        select_knobs(["quantization"], gate=False)
    assert not any(row.changes_tokens for row in select_knobs([], gate=False))
    assert [row.name for row in select_knobs(["kv-cache-dtype"], gate=True)] == ["kv_cache_dtype"]


def test_it_finds_the_slope(tmp_path: Path):
    """Two rows hold a fifth of this traffic: more of them is what helps, and nothing else stays."""
    knobs = select_knobs(["max_num_seqs", "lane_share", "prefix_cache_policy"], gate=False)
    result = search(tmp_path, max_num_seqs=2).run(knobs, 12, seed=0)
    default = next(point for point in result if not point.changes)
    assert result[0].goodput > 1.5 * default.goodput
    assert [name for name, _ in result[0].changes] == ["max_num_seqs"]


def test_where_nothing_is_to_be_gained_the_default_wins(tmp_path: Path):
    load = replace(LOAD, rate=1.0, num_requests=40)
    result = search(tmp_path, load).run(select_knobs([], gate=False), 12, seed=0)
    assert result[0].changes == ()
    assert outcome.choose(result, [], "goodput")[0] == ()
    assert "Nothing to gain" in outcome.choose(result, [], "goodput")[1]


def test_the_dial_chooses_among_the_near(tmp_path: Path):
    """Of settings that keep the goodput one has the shortest wait, another the fastest tokens."""
    load = replace(LOAD, rate=6.0, num_requests=60)
    for prefer, time in (("ttft", "ttft_s"), ("tpot", "tpot_s")):
        knobs = select_knobs(["max_num_batched_tokens", "max_num_seqs"], gate=False)
        result = search(tmp_path, load, prefer).run(knobs, 10, seed=0)
        best = max(point.goodput for point in result)
        near = [point for point in result if point.goodput >= 0.95 * best]
        assert getattr(result[0], time) <= 1.01 * min(getattr(point, time) for point in near)


def test_a_setting_that_cannot_be_is_told_and_not_simulated(tmp_path: Path, monkeypatch):
    made = search(tmp_path)

    def breaks(changes):
        raise HeadwayError("No room.", "")

    monkeypatch.setattr(SettingSearch, "_machine", lambda self, changes: breaks(changes))
    assert made.machine((("block_size", 64),)) is None
    assert made.refused == {"block_size=64": "No room."}


def test_the_front_has_what_no_other_beats(tmp_path: Path):
    result = search(tmp_path).run(select_knobs(["max_num_seqs"], gate=False), 6, seed=0)
    edge = list(pareto_front(result))
    for each in edge:
        assert not any(p.ttft_s < each.ttft_s and p.tpot_s < each.tpot_s for p in result)


# ── real runs ───────────────────────────────────────────────────────────────────────────────


def block(met: list[bool], changes=(), number=0, died="") -> MeasuredBlock:
    times = [0.1] * len(met)
    figures = {"met": met, "ttft_s": times, "tpot_s": times, "died": died}
    return MeasuredBlock(changes=changes, round=number, span_s=10.0, **figures)


def test_gains_are_paired():
    """6 of 10 and 9 of 10 are 50% more; the same requests met are no gain at all."""
    ten = [True] * 6 + [False] * 4
    more = [True] * 9 + [False]
    assert paired_gain([(block(ten * 20), block(more * 20))]) == (0.5, (0.5, 0.5))
    assert paired_gain([(block(ten * 20), block(ten * 20))]) == (0.0, (0.0, 0.0))
    mixed = [True] * 12 + [False] * 8
    gain, (low, high) = paired_gain([(block(mixed * 5), block(mixed[::-1] * 5))])
    assert gain == 0.0 and low < 0 < high


A, B, C = (("max_num_seqs", 8),), (("policy", "fcfs"),), (("block_size", 8),)


class Scripted(Confirmation):
    """Blocks that nobody runs: the share met by setting; one that dies."""

    def block(self, changes, number):
        share = {(): 6, A: 9, B: 5, C: 3}[changes]
        return block(
            ([True] * share + [False] * (10 - share)) * 10,
            changes,
            number,
            died="It ended with status 3." if changes == C else "",
        )


def scripted(runs: int, until_s: float = float("inf")) -> Scripted:
    return Scripted(
        folder=FOLDER, engine=EngineOptions(), load=LOAD, slo=None, block_s=1.0,
        remaining_runs=runs, until_s=until_s,
    )  # fmt: skip


def test_turns_and_their_bound():
    """Eight runs: a round of four, in which one dies; then two rounds of those that are left, the
    default among them, until no whole round is left."""
    made = scripted(8)
    result = {each.changes: each for each in made.run([(), A, B, C])}
    assert len(made.blocks) <= 8
    assert result[C].died and result[C].runs == 1
    assert result[()].runs == result[A].runs == 2
    assert result[A].gain == 0.5 and result[A].gain_interval[0] > 0
    firsts = [b.changes for b in made.blocks]
    assert firsts[0] != firsts[4], "the order turns"


def test_no_time_no_run():
    made = scripted(8, until_s=0.0)
    result = made.run([(), A])
    assert [each.runs for each in result] == [0, 0]
    points = [point(A, 12.0), point((), 10.0)]
    setting, why = outcome.choose(points, result, "goodput")
    assert setting == () and "no time was left: give more --minutes" in why and "+20.0%" in why


def test_who_is_chosen(tmp_path: Path):
    points = search(tmp_path).run(select_knobs(["max_num_seqs"], gate=False), 3, seed=0)
    result = scripted(8).run([(), A, B, C])
    assert outcome.choose(points, result, "goodput")[0] == A
    no_better = [each for each in result if each.changes != A]
    setting, why = outcome.choose(points, no_better, "goodput")
    assert setting == () and "Nothing to gain" in why
    dead = [msgspec.structs.replace(result[0], died="no memory"), *result[1:]]
    assert outcome.choose(points, dead, "goodput") == ((), "The default itself does not run: "
                                                       "no memory")  # fmt: skip


def test_a_server_that_does_not_start_is_a_result():
    made = scripted(1)
    real = Confirmation(
        folder=Path("/nowhere/at/all"), engine=EngineOptions(), load=LOAD, slo=None, block_s=1.0,
        remaining_runs=1, until_s=made.until_s,
    )  # fmt: skip
    result = real.run([()])[0]
    assert result.runs == 1 and "status" in result.died and result.goodput == 0


def test_its_last_words_are_told():
    with pytest.raises(DiedError) as error, ServerProcess(Path("/nowhere/at/all")):
        pass
    assert "/nowhere/at/all" in error.value.fix


# ── what is written ─────────────────────────────────────────────────────────────────────────


def tuned(path: Path) -> outcome.TuningReport:
    made = search(path)
    points = made.run(select_knobs(["max_num_seqs"], gate=False), 4, seed=0)
    setting, why = outcome.choose(points, scripted(8).run([(), A, B]), "goodput")
    return outcome.TuningReport(
        model="tiny", label="calibrated", prefer="goodput", chosen=setting, why=why,
        confirmed=scripted(8).run([(), A, B]), points=points, refused={}, gated={},
        num_simulated=9, real_runs=6, seconds=1.0, extrapolated=0.0,
        defaults={"max_num_seqs": 64},
    )  # fmt: skip


def test_the_file_is_one_that_serve_reads(tmp_path: Path):
    text = outcome.format_yaml(tuned(tmp_path))
    file = tmp_path / "headway.yaml"
    outcome.write_atomically(str(file), text)
    tables, _, _ = read_options([EngineOptions], [f"--config={file}"], {})
    assert tables[EngineOptions] == EngineOptions(max_num_seqs=8)
    assert re.search(r"max_num_seqs: 8  # default 64", text)


def test_an_old_file_stays_where_the_new_cannot_be_written(tmp_path: Path, monkeypatch):
    file = tmp_path / "headway.yaml"
    file.write_text("old")

    def stop(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        outcome.write_atomically(str(file), "new")
    assert file.read_text() == "old"
    with pytest.raises(UsageError):
        outcome.write_atomically(str(tmp_path / "no" / "where.yaml"), "new")


def test_the_page_stands_alone(tmp_path: Path):
    text = page.html(tuned(tmp_path))
    assert "The dial" in text and "max_num_seqs=8" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slo": []}, "objectives"),
        ({"concurrency": 4}, "--rate"),
        ({"find_goodput": True}, "bench"),
        ({"calibrate": "x.json"}, "bench"),
        ({"slo": ["x"]}, "'x' is no objective"),
        ({"slo": ["ttft=9"]}, "'9' is not a duration"),
        ({"input_len": "many"}, "many"),
    ],
)
def test_loads_that_cannot_be_tuned_for(changes: dict, says: str):
    with pytest.raises(UsageError) as error:
        check_load(replace(LOAD, **changes))
    assert says in error.value.cause + error.value.fix


def test_without_a_length_there_are_enough_requests():
    assert check_load(BenchOptions(slo=SLO)).num_requests == 400
    assert isinstance(ConfirmedSetting, type) and confirm.MAX_RUNS == 8
