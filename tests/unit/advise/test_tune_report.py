"""What `headway tune` tells: the file that serve reads, the page, the report, the words."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes import make_settings
from headway.advise.tune import outcome, page, run
from headway.advise.tune.confirm import ConfirmedSetting
from headway.advise.tune.outcome import TuningReport
from headway.advise.tune.run import Tuning, as_json
from headway.advise.tune.search import Point, pareto_front
from headway.advise.tune.space import KNOBS, Changes, options_of, setting_name, single_changes
from headway.cli import tune as verb
from headway.cli.main import main
from headway.config.options import BenchOptions, EngineOptions, TuneOptions, read_options
from headway.config.options.doctor import DoctorOptions
from headway.core.errors import UsageError
from simulated_house import measured_here

SETTINGS = make_settings(
    num_blocks=(1251,), block_size=16, max_num_seqs=64, budget=512, max_model_len=2048, policy="slo"
)
A, B = (("max_num_seqs", 128),), (("policy", "fcfs"),)
BOTH = (*A, *B)


def point(changes: Changes, goodput: float, ttft_s: float = 0.2, tpot_s: float = 0.03) -> Point:
    return Point(changes=changes, goodput=goodput, in_slo=0.9, ttft_s=ttft_s, tpot_s=tpot_s,
                 tokens_per_s=100.0, label="calibrated")  # fmt: skip


def real(changes: Changes, gain: float = 0.0, **more: Any) -> ConfirmedSetting:
    return ConfirmedSetting(
        changes=changes, runs=2, goodput=10 * (1 + gain), in_slo=0.9, ttft_s=0.21, tpot_s=0.031,
        tokens_per_s=100.0, gain=gain, gain_interval=(gain - 0.02, gain + 0.02), **more,
    )  # fmt: skip


def tuned(**more: Any) -> TuningReport:
    fields: dict[str, Any] = {
        "model": "tiny",
        "label": "calibrated",
        "prefer": "goodput",
        "chosen": BOTH,
        "why": "max_num_seqs=128 policy=fcfs: +20.0% goodput on the real server",
        "confirmed": [real(()), real(BOTH, 0.2), real(A, 0.0, died="It ended with status 3.")],
        "points": [
            point(BOTH, 12.0, ttft_s=0.1), point(A, 11.0, tpot_s=0.02), point((), 10.0),
            point(B, 0.0, ttft_s=float("inf"), tpot_s=float("inf")),
        ],
        "refused": {"block_size=64": "No room."},
        "gated": {"quantization=int4": "surely worse: refused"},
        "num_simulated": 60,
        "real_runs": 7,
        "seconds": 300.0,
        "extrapolated": 0.12,
        "defaults": {"max_num_seqs": 64, "policy": "slo"},
    }  # fmt: skip
    return TuningReport(**fields | more)


# ── the file ────────────────────────────────────────────────────────────────────────────────


def written(changes: Changes) -> str:
    return outcome.format_yaml(tuned(chosen=changes))


@pytest.mark.parametrize("changes", list(single_changes(list(KNOBS), SETTINGS)), ids=setting_name)
def test_each_setting_is_read_back_as_it_was_meant(changes: Changes, tmp_path: Path):
    """Whatever the option and its type: a number, seconds, a name, `none`."""
    file = tmp_path / "headway.yaml"
    file.write_text(written(changes))
    tables, _, sources = read_options([EngineOptions], [f"--config={file}"], {})
    assert tables[EngineOptions] == options_of(EngineOptions(), changes)
    assert {name for name, source in sources.items() if source == "file"} == {changes[0][0]}


def test_several_settings_are_read_back_together_and_a_flag_goes_before(tmp_path: Path):
    file = tmp_path / "headway.yaml"
    file.write_text(written(BOTH))
    tables, _, _ = read_options([EngineOptions], [f"--config={file}", "--max-num-seqs=7"], {})
    assert tables[EngineOptions] == EngineOptions(max_num_seqs=7, policy="fcfs")


def test_a_line_says_the_default_and_what_it_gave_alone():
    """max_num_seqs alone was simulated at 11 to 10; policy alone met nothing."""
    lines = written(BOTH).splitlines()
    assert "max_num_seqs: 128  # default 64; alone +10.0% goodput, simulated" in lines
    assert "policy: fcfs  # default slo; alone -100.0% goodput, simulated" in lines
    assert "60 simulations (calibrated), 7 real runs, 300 s; prefers goodput" in lines[1]


def test_where_nothing_is_gained_the_file_sets_nothing(tmp_path: Path):
    text = outcome.format_yaml(tuned(chosen=(), why="Nothing to gain."))
    assert "# No option is set: the defaults stay." in text
    assert all(line.startswith("#") for line in text.splitlines())


def test_a_gain_alone_is_known_where_it_was_simulated():
    result = tuned()
    assert outcome.gain_alone(result, "max_num_seqs", 128) == pytest.approx(0.1)
    assert outcome.gain_alone(result, "block_size", 8) is None
    idle = tuned(points=[point((), 0.0), point(A, 1.0)])
    assert outcome.gain_alone(idle, "max_num_seqs", 128) is None


def test_a_file_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path):
    file = tmp_path / "headway.yaml"
    for text in ("first\n", "second\n"):
        outcome.write_atomically(str(file), text)
        assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["headway.yaml"]


# ── the page ────────────────────────────────────────────────────────────────────────────────


def test_the_dial_has_every_finalist_where_it_lies():
    """In milliseconds; who answered nobody lies nowhere."""
    result = tuned()
    dial = page.dial(result)
    spots = {each.name: each for each in dial.series}
    assert spots["simulated"].notes == ["max_num_seqs=128 policy=fcfs", "max_num_seqs=128",
                                        "default"]  # fmt: skip
    assert spots["simulated"].x == [100.0, 200.0, 200.0]
    assert spots["simulated"].y == [30.0, 20.0, 30.0]
    assert spots["default"].x == [200.0] and spots["chosen"].x == [100.0]
    assert spots["front"].x == [1e3 * p.ttft_s for p in pareto_front(result.points[:3])]
    assert spots["real"].x == [210.0] * 3 and spots["real"].y == [31.0] * 3
    assert dial.x == "TTFT p50, ms" and dial.x in page.html(result)


def test_the_bars_have_real_beside_simulated_and_no_run_that_died():
    simulated, real_ = page.goodput(tuned()).series
    assert simulated.x[0] == "max_num_seqs=128 policy=fcfs" and simulated.y[0] == 12.0
    assert dict(zip(real_.x, real_.y, strict=True)) == {
        "max_num_seqs=128 policy=fcfs": 12.0, "default": 10.0,
    }  # fmt: skip


def test_the_page_says_what_the_terminal_says():
    text = page.html(tuned())
    assert "tiny: tuned" in text and "max_num_seqs: 128" in text
    assert "not tried, block_size=64: No room." in text
    assert "gate, quantization=int4: surely worse: refused" in text
    assert "12% of the default&#x27;s steps lie beyond the calibration" in text
    assert "tiny: nothing to gain" in page.html(tuned(chosen=()))


def test_names_are_text_on_the_page():
    text = page.html(tuned(model="<img src=x>", why="</script><b>"))
    assert "<img src=x>" not in text and "</script><b>" not in text


def test_the_report_has_all_of_it():
    again = json.loads(as_json(tuned()))
    assert again["format"] == "headway-tune" and again["chosen"] == [list(each) for each in BOTH]
    assert len(again["points"]) == 4 and len(again["confirmed"]) == 3
    assert again["gated"] == {"quantization=int4": "surely worse: refused"}
    assert again["points"][3]["ttft_s"] is None, "JSON has no infinity"


def test_the_table_has_the_finalists(capsys):
    verb.print_tuned(tuned())
    printed = capsys.readouterr().out
    (best,) = (line for line in printed.splitlines() if "policy=fcfs" in line and "12.00/s" in line)
    assert "+20.0%" in best and "+18.0% to +22.0%" in best
    assert "died, max_num_seqs=128: It ended with status 3." in printed


# ── from end to end, without a server ───────────────────────────────────────────────────────

TRAFFIC = ["--rate=8", "--num-requests=60", "--input-len=200", "--output-len=20"]
SLO = "--slo=ttft=500ms,tpot=50ms"


def call(path: Path, *more: str, rows: int = 64) -> tuple[int, Path]:
    """`headway tune headway-tiny` on a machine of 20 ms steps: (status, the file it may write)."""
    here, file = path / "here.json", path / "headway.yaml"
    options = EngineOptions(max_num_seqs=rows)
    here.write_bytes(msgspec.json.encode(measured_here(options)))
    flags = [f"--calibration={here}", f"--max-num-seqs={rows}", "--trials=0", "--candidates=6"]
    words = [*flags, "--knobs=max_num_seqs", f"--write={file}", SLO, *TRAFFIC, *more]
    return main(["tune", "headway-tiny", *words]), file


def test_a_dry_run_says_what_would_take_how_long_and_starts_nothing(tmp_path: Path, capsys):
    status, file = call(tmp_path, "--dry-run", "--minutes=3")
    printed = capsys.readouterr().out.splitlines()
    assert status == 0 and not file.exists()
    assert printed[0] == f"tune headway-tiny for {SLO[6:]}: at most 3 min (--minutes)"
    assert printed[1:] == ["1. up to 6 settings of max_num_seqs are simulated: at most 60 s"]
    words = ["tune", "headway-tiny", SLO, *TRAFFIC, "--dry-run"]
    assert main(words) == 0
    real = capsys.readouterr().out.splitlines()
    assert real[1].startswith("1. a server is started and measured: 70 s")
    assert real[3].endswith("in turns: at most 7 runs of up to 70 s")


def test_it_finds_the_planted_gain_and_writes_it(tmp_path: Path, capsys):
    """Two rows hold a fifth of this traffic; the file, the report and the page say the same."""
    report, html = tmp_path / "tune.json", tmp_path / "tune.html"
    status, file = call(tmp_path, f"--json={report}", f"--html={html}", rows=2)
    printed = capsys.readouterr().out
    assert status == 0 and "by simulation (calibrated); no real run has confirmed it" in printed
    tables, _, _ = read_options([EngineOptions], [f"--config={file}"], {})
    result = json.loads(report.read_bytes())
    assert result["chosen"] == [["max_num_seqs", tables[EngineOptions].max_num_seqs]]
    assert result["real_runs"] == 0 and result["num_simulated"] >= 3
    assert file.read_text() in printed and "is written" in printed
    assert f"max_num_seqs={tables[EngineOptions].max_num_seqs}" in html.read_text()


def test_it_says_that_nothing_is_to_be_gained_and_leaves_the_file(tmp_path: Path, capsys):
    (tmp_path / "headway.yaml").write_text("policy: fair\n")
    status, file = call(tmp_path, "--rate=1")
    printed = capsys.readouterr().out
    assert status == 0 and "Nothing to gain: the default is within" in printed
    assert file.read_text() == "policy: fair\n" and "is left as it is" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one", "two"], "one folder"),
        (["headway-tiny", "--rate=8"], "objectives"),
        (["headway-tiny", SLO, "--concurrency=4"], "--rate"),
        (["headway-tiny", SLO, "--knobs=speed"], "speed is none"),
        (["headway-tiny", SLO, "--knobs=quantization"], "--gate"),
        (["headway-tiny", SLO, "--trials=4"], "between 0 and 3"),
        (["headway-tiny", SLO, "--candidates=1"], "candidates"),
        (["headway-tiny", SLO, "--minutes=0"], "minutes"),
        (["headway-tiny", SLO, "--block=1s"], "block"),
        (["headway-tiny", SLO, "--prefer=speed"], "goodput, ttft, tpot"),
        (["headway-tiny", SLO, "--questions=0"], "questions"),
        (["headway-tiny", SLO, "--calibration=/nowhere.json"], "/nowhere.json"),
        (["headway-tiny", SLO, "--html=/nowhere/at/all.html"], "/nowhere/at/all.html"),
        (["headway-tiny", SLO, "--write=/nowhere/at/all.yaml"], "--write /nowhere/at/all.yaml"),
        (["headway-tiny", SLO, "--write=/tmp"], "--write /tmp"),
        (["/nowhere/at/all", SLO, "--calibration=/nowhere.json"], "/nowhere"),
    ],
)
def test_bad_options_are_refused_by_name_before_anything_runs(
    words: list[str], says: str, capsys, monkeypatch
):
    monkeypatch.setattr(run, "ServerProcess", nobody_starts)
    assert main(["tune", *words]) in (2, 3)
    assert says in capsys.readouterr().err


def nobody_starts(*given: object) -> None:
    raise AssertionError("a server is started")


def test_without_a_calibration_the_default_is_measured_under_a_ramp(monkeypatch, tmp_path: Path):
    """A fifth of the rate to 1.8 times, one of the eight runs; a trace keeps its own times."""
    asked: list[tuple[list[str], BenchOptions]] = []

    class Fake:
        def __init__(self, folder: Path, flags: list[str]) -> None:
            self.flags, self.url = flags, "http://nowhere"

        def __enter__(self) -> "Fake":
            return self

        def __exit__(self, *error: object) -> None:
            """It ends."""

    async def once(url: str, load: BenchOptions, version: str, watch: object) -> None:
        asked.append(([], load))

    monkeypatch.setattr(run, "ServerProcess", Fake)
    monkeypatch.setattr(run, "run_once", once)
    load = BenchOptions(rate=10, slo=["ttft=500ms"], seed=4)
    made = Tuning(folder=tmp_path, options=TuneOptions(), load=load, engine=EngineOptions())
    assert made.calibrate(tmp_path / "here.json") == str(tmp_path / "here.json")
    ((_, ramp),) = asked
    assert (ramp.arrivals, ramp.ramp_from, ramp.rate, ramp.seed) == ("ramp", 2.0, 18.0, 5)
    assert ramp.calibrate == str(tmp_path / "here.json") and made.remaining_runs == run.MAX_RUNS - 1
    made.load = BenchOptions(rate=10, slo=["ttft=500ms"], workload="sharegpt:talks.json")
    made.calibrate(tmp_path / "here.json")
    assert asked[-1][1].arrivals != "ramp"


def test_it_says_why_each_setting_ran_for_real(capsys):
    """Also of one that the table would leave out: the fourteenth of the ranking."""
    many = [point((("aging", n),), 20.0 - n) for n in range(12)]
    why = "the default, policy turned: -18.0% in simulation"
    result = tuned(points=[*many, point((), 8.0), point(B, 7.0)],
                  confirmed=[real(()), real(B, 0.2, reason=why)])  # fmt: skip
    verb.print_tuned(result)
    printed = capsys.readouterr().out
    assert f"real run, policy=fcfs: {why}" in printed and "real run, default" not in printed
    (row,) = (line for line in printed.splitlines() if "policy=fcfs" in line and "7.00/s" in line)
    assert "+20.0%" in row
    assert json.loads(as_json(result))["confirmed"][1]["taken"] == why


def test_progress_is_told_now_and_then_and_a_real_run_always(capsys):
    watch = verb.progress()
    for number in range(50):
        watch(f"{number} of 50 settings, 150 conversations")
    watch("real run, default")
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1] == "real run, default" and len(printed) < 10


def test_options_of_tune_and_doctor_have_defaults_that_are_said():
    """What the help says of numbers is what holds."""
    assert (TuneOptions().trials, TuneOptions().candidates, TuneOptions().minutes) == (3, 96, 20.0)
    assert DoctorOptions().simulate and DoctorOptions().what_if == []
    with pytest.raises(UsageError, match="simulate"):
        read_options([DoctorOptions], ["--simulate=perhaps"], {})
    tables, _, _ = read_options([DoctorOptions], ["--what-if=rate=2x", "--what-if=kv=int8"], {})
    assert tables[DoctorOptions].what_if == ["rate=2x", "kv=int8"]
