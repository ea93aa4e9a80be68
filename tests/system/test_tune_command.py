"""`headway tune` on real servers: in turns, and a Ctrl-C that leaves everything as it was."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from live_server import alive, headway

from conftest import StartServer
from headway.advise.tune.confirm import Confirmation
from headway.advise.tune.outcome import TuningReport, format_yaml
from headway.config.options import BenchOptions, EngineOptions
from headway.spec.embedded import model_folder
from headway.telemetry.calibration import MachineCalibration

SLO = ["ttft=5s,tpot=1s"]
LOAD = BenchOptions(rate=6, input_len="20", output_len="4", slo=SLO, seed=2)


def test_the_default_and_another_in_turns() -> None:
    """Two servers after each other, each with the same arrivals; both are gone afterwards."""
    made = Confirmation(
        folder=model_folder(None),
        engine=EngineOptions(threads=1, max_num_seqs=8),
        load=LOAD,
        slo=None,
        block_s=2.0,
        remaining_runs=2,
        until_s=time.monotonic() + 300,
        flags=(f"--slo={SLO[0]}",),
    )
    found = made.run([(), (("max_num_seqs", 4),)])
    assert [each.runs for each in found] == [1, 1]
    assert not any(each.died for each in found)
    first, second = made.blocks
    assert len(first.met) == len(second.met) > 0 and first.num_tokens == second.num_tokens > 0


def test_a_ctrl_c_leaves_the_old_file_and_no_server(tmp_path: Path) -> None:
    """While its first server runs."""
    file = tmp_path / "headway.yaml"
    file.write_text("max_num_seqs: 3\n")
    command = [sys.executable, "-m", "headway.cli.main", "tune", "headway-tiny", "--threads=1"]
    load = ["--rate=5", "--input-len=20", "--output-len=4", f"--slo={SLO[0]}", f"--write={file}"]
    running = subprocess.Popen(
        [*command, *load],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=listen,
    )
    try:
        servers = wait_for_children(running.pid)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()
    assert file.read_text() == "max_num_seqs: 3\n"
    assert not any(alive(pid) for pid in servers)


def test_a_server_is_what_the_file_says(start_server: StartServer, tmp_path: Path) -> None:
    """`headway serve --config` of a tuning's file: rows, policy, a share and seconds, as it tells
    itself."""
    chosen = {"max_num_seqs": 3, "policy": "slo", "lane_share": 0.3, "long_prefill": 0.75}
    file = tmp_path / "headway.yaml"
    file.write_text(format_yaml(tuned(tuple(chosen.items()))))
    server = start_server(f"--config={file}", "--threads=1")
    server.wait_ready()
    with urllib.request.urlopen(f"{server.url}/calibration?seconds=60", timeout=60) as answer:
        told = msgspec.json.decode(answer.read(), type=MachineCalibration)
    settings = told.origin.settings
    assert settings.max_num_seqs == 3 and settings.scheduler.policy == "slo"
    assert (settings.scheduler.lane_share, settings.scheduler.long_prefill_s) == (0.3, 0.75)


def tuned(chosen: tuple[tuple[str, object], ...]) -> TuningReport:
    """A tuning that chose this."""
    return TuningReport(
        model="tiny", label="calibrated", prefer="goodput", chosen=chosen, why="measured",
        confirmed=[], points=[], refused={}, gated={}, num_simulated=1, real_runs=0, seconds=1.0,
        extrapolated=0.0, defaults={},
    )  # fmt: skip


@pytest.mark.hardening
def test_all_of_it_within_its_minute_and_its_runs(tmp_path: Path) -> None:
    """Measured, searched, confirmed: whatever comes of it is told with the real runs behind it."""
    report, file = tmp_path / "tune.json", tmp_path / "headway.yaml"
    load = ["--rate=5", "--input-len=20", "--output-len=8", f"--slo={SLO[0]}", "--threads=1"]
    words = ["--minutes=2", "--block=4", "--candidates=6", "--trials=1", "--knobs=max_num_seqs"]
    done = headway("tune", "headway-tiny", *load, *words, f"--json={report}", f"--write={file}")
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_bytes())
    default, *others = found["confirmed"]
    runs = [each["runs"] for each in (default, *others)]
    assert default["changes"] == [] and found["real_runs"] == 1 + sum(runs) <= 8
    assert found["chosen"] == [] or max(runs[1:]) >= 1, "nobody wins who did not run"
    assert file.exists() == bool(found["chosen"])
    assert found["why"] in done.stdout.replace("\n", " ")


def listen() -> None:
    """A shell's background job ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_children(pid: int) -> list[int]:
    """The processes that it has started, once there is one."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            time.sleep(0.5)
            return [int(each) for each in found]
        time.sleep(0.05)
    raise AssertionError("it starts no server")
