"""The load generator's own error, its cost, and whole minutes of real traffic: timed, by hand.

The server is the fake in a process of its own, which keeps when each request arrived and when each
chunk left on the clock that both processes share. So the truth is when a chunk left less when its
request was due: by definition a request that leaves late has waited.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import headway
from sent_requests import sent_as

from fake_openai import FakeServer
from headway.bench.export import read_json
from headway.bench.percentiles import Distribution, distribution
from headway.bench.report import BenchReport
from headway.bench.traces import read_trace, spread_quantized

pytestmark = pytest.mark.hardening

TOLERANCE_S, TOLERANCE = 0.002, 0.01
CPU_LIMIT = 0.15
ARRIVALS = 0.03
UNCUT = ("--warmup=0", "--cooldown=0")


def bench(url: str, folder: Path, *flags: str) -> BenchReport:
    """One run of the command, in a process of its own as a user runs it."""
    path = folder / "report.json"
    done = headway("bench", url, f"--json={path}", *flags)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return read_json(str(path))


def true_gaps(truth: list[dict[str, Any]], per_chunk: int) -> list[float]:
    """Each gap between chunks, and a 0 for each further token of a chunk."""
    found = []
    for each in truth:
        left = each["max_tokens"]
        for i, at_s in enumerate(each["sent_s"]):
            if i:
                found.append(at_s - each["sent_s"][i - 1])
            found += [0.0] * (min(per_chunk, left) - 1)
            left -= per_chunk
    return found


def compare(name: str, ours: Distribution | None, values: list[float]) -> list[str]:
    """What is off by more than 2 ms and 1%."""
    truth = distribution(values)
    assert ours is not None and truth is not None
    assert ours.count == truth.count
    off = []
    for part in ("mean", "p50", "p90", "p95", "p99"):
        seen, real = getattr(ours, part), getattr(truth, part)
        if abs(seen - real) > max(TOLERANCE_S, TOLERANCE * real):
            off.append(f"{name} {part}: {seen * 1e3:.2f} ms, really {real * 1e3:.2f} ms")
    return off


def errors(folder: Path, how: dict[str, float]) -> list[str]:
    """What one run got wrong; first of all whether it says itself that it could not keep up."""
    with FakeServer(**how) as fake:
        report = bench(
            fake.url, folder, "--rate=15", "--duration=15", "--output-len=uniform:20-60", *UNCUT
        )
        truth = fake.truth()
    off = [c.detail for c in report.checks if c.passed is False]
    figures = report.figures
    due_s = sorted(report.run.started_s + x.scheduled_s for x in report.run.exchanges)
    e2e = [t["sent_s"][-1] - due for due, t in zip(due_s, truth)]
    ttft = [t["sent_s"][0] - due for due, t in zip(due_s, truth)]
    tpot = [(e - f) / (t["max_tokens"] - 1) for e, f, t in zip(e2e, ttft, truth)]
    off += compare("TTFT", figures.ttft_s, ttft) + compare("e2e", figures.e2e_s, e2e)
    off += compare("TPOT", figures.tpot_s, tpot)
    off += compare("ITL", figures.itl_s, true_gaps(truth, int(how["per_chunk"])))
    span_s = report.run.load.to_s
    for name, seen, real in (
        ("output tok/s", report.rates.output_tokens_per_s, sum(t["max_tokens"] for t in truth)),
        ("requests/s", report.rates.requests_per_s, len(truth)),
    ):
        if seen != pytest.approx(real / span_s, rel=TOLERANCE):
            off.append(f"{name}: {seen}, really {real / span_s}")
    return off


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("stall_s", [0.0, 1.0])
def test_every_latency_is_within_2_ms_or_1_percent(
    tmp_path: Path, per_chunk: int, stall_s: float
) -> None:
    """In one of three runs: other work on the machine delays both sides, and is not our error."""
    how = {"ttft": 0.08, "itl": 0.01, "per_chunk": per_chunk, "stall_for": stall_s, "stall_at": 3.0}
    tries = []
    while len(tries) < 3 and (not tries or tries[-1]):
        tries.append(errors(tmp_path, how))
        print(tries[-1])
    assert tries[-1] == [], tries


def test_faults_do_not_blur_the_others(tmp_path: Path) -> None:
    with FakeServer(ttft=0.05, itl=0.01, drop_every=7, refuse_every=11) as fake:
        report = bench(
            fake.url, tmp_path, "--rate=15", "--num-requests=154", "--output-len=20", *UNCUT
        )
    assert report.counts.reasons == {"dropped": 20, "status 503": 14}
    figures = report.figures
    assert figures.ttft_s is not None and figures.e2e_s is not None
    assert figures.ttft_s.count == figures.e2e_s.count == 120
    assert figures.ttft_s.p50 == pytest.approx(0.05, abs=0.005)
    assert figures.e2e_s.p50 == pytest.approx(0.24, abs=0.01)


def test_a_stall_of_five_seconds_is_in_the_percentiles(tmp_path: Path) -> None:
    """20 requests per second for 20 s: a quarter meets the stall, and waits 2.5 s on average."""
    stall = {"ttft": 0.02, "itl": 0.001, "stall_at": 5.0, "stall_for": 5.0}
    edges = (*UNCUT, "--output-len=10", "--duration=20")
    with FakeServer(**stall) as fake:
        opened = bench(
            fake.url, tmp_path, "--arrivals=constant", "--rate=20", *edges
        ).figures.ttft_s
    with FakeServer(**stall) as fake:
        closed = bench(fake.url, tmp_path, "--concurrency=1", *edges).figures
    assert opened is not None and closed.ttft_s is not None and closed.e2e_s is not None
    assert opened.p50 < 0.03
    assert opened.p90 == pytest.approx(5.0 - 0.1 / 0.25 * 5.0 + 0.02, abs=0.15)
    assert opened.p99 == pytest.approx(5.0 - 0.01 / 0.25 * 5.0 + 0.02, abs=0.15)
    assert closed.e2e_s.p99 < 0.1, "a closed loop hides it"


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("azure", "azure2023_code/AzureLLMInferenceTrace_code.csv"),
        ("mooncake", "mooncake_conversation/conversation_trace.jsonl"),
    ],
)
def test_a_minute_of_real_traffic_is_sent_as_it_was(
    shared: Path, tmp_path: Path, kind: str, file: str
) -> None:
    """In one of two tries: on a busy machine the burst of a second takes longer to leave."""
    path = shared / "traces" / file
    rows, quantum_s = spread_quantized(
        read_trace(kind, path), np.random.default_rng([0, *b"default"])
    )
    assert (quantum_s > 0) == (kind == "mooncake")
    off = [1.0]
    while len(off) < 3 and off[-1] > ARRIVALS:
        with FakeServer(per_chunk=10**6) as fake:
            report = bench(fake.url, tmp_path, f"--workload={kind}:{path}", "--speed=60")
            truth = fake.truth()
        assert len(report.run.exchanges) == len(rows)
        assert report.counts.failed == 0
        sent_as(rows, report, truth)
        due_s = np.array([row.at_s / 60 for row in rows if row.output_tokens > 2])
        came_s = np.sort([t["arrived_s"] for t in truth]) - report.run.started_s
        off.append(distance(due_s, came_s))
        print(f"{kind}: {off[-1]:.3%} off, lag p99 {report.client.lag_p99_s * 1e3:.1f} ms")
        print(f"gaps: CV {cv(due_s):.2f} in the trace, {cv(came_s):.2f} at the server")
    assert off[-1] <= ARRIVALS
    assert cv(came_s) == pytest.approx(cv(due_s), rel=0.2)


def distance(due_s: np.ndarray, came_s: np.ndarray) -> float:
    """The largest difference between the shares of requests due and come by each half second."""
    ends = np.arange(0.5, 62, 0.5)
    due, came = (np.searchsorted(times, ends) / len(due_s) for times in (due_s, came_s))
    return float(np.abs(due - came).max())


def cv(times_s: np.ndarray) -> float:
    """The coefficient of variation of the gaps: 1 of Poisson arrivals."""
    gaps = np.diff(times_s)
    return float(gaps.std() / gaps.mean())


def test_two_thousand_tokens_a_second_cost_15_percent_of_a_core(tmp_path: Path) -> None:
    with FakeServer(ttft=0.05, itl=0.02) as fake:
        flags = ("--concurrency=42", "--duration=20", "--output-len=200", "--input-len=50")
        report = bench(fake.url, tmp_path, *flags)
    assert report.rates.output_tokens_per_s > 1950
    assert report.client.cpu_share <= CPU_LIMIT, report.client.why
