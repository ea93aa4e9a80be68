"""What a real server takes for requests, steps and tokens, as its calibration tells it."""

import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from live_server import headway

from conftest import StartServer
from headway.telemetry.calibration import MachineCalibration


def cpu_seconds(pid: int) -> float:
    """What one process alone has computed since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.hardening
def test_the_costs_add_up_to_the_cpu_time_of_the_process(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Under a ramp of 20 s: requests, steps and tokens times their costs are most of what /proc
    says that the process has computed, and not more."""
    file = tmp_path / "here.json"
    server = start_server("--threads=1").wait_ready()
    before_s, began_s = cpu_seconds(server.process.pid), time.monotonic()
    load = ["--rate=20", "--ramp-from=2", "--arrivals=ramp", "--duration=20s", "--seed=3"]
    lengths = ["--input-len=uniform:20-100", "--output-len=uniform:5-80"]
    done = headway("bench", server.url, *load, *lengths, f"--calibrate={file}")
    assert done.returncode == 0, done.stderr
    taken_s = cpu_seconds(server.process.pid) - before_s
    seconds = time.monotonic() - began_s
    found = msgspec.json.decode(file.read_bytes(), type=MachineCalibration)
    host = found.host
    tokens = sum(asked.answer or 0 for asked in found.traffic)
    told_s = host.request_cpu_s * len(found.traffic) + host.step_cpu_s * len(found.steps)
    told_s += host.token_cpu_s * tokens
    assert 0.2 * taken_s < told_s < 1.2 * taken_s, (told_s, taken_s, seconds, host)
    assert 1e-6 < host.client_cpu_s < 1e-2 and host.num_cores >= 1


def test_a_server_that_has_just_begun_tells_no_costs(start_server: StartServer) -> None:
    """One second under load tells nothing apart: zeros, by which a simulated front has no queue."""
    server = start_server().wait_ready()
    with urllib.request.urlopen(f"{server.url}/calibration?seconds=5", timeout=60) as answer:
        host = msgspec.json.decode(answer.read(), type=MachineCalibration).host
    assert (host.request_cpu_s, host.step_cpu_s, host.token_cpu_s) == (0.0, 0.0, 0.0)
    assert host.client_cpu_s == 0.0 and host.num_cores >= 1
