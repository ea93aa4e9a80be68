"""A mixed load for a while: no 5xx, no restart, memory and descriptors that do not grow."""

import os
import random
import sys
from pathlib import Path

import pytest
from live_server import wait_until

from conftest import StartServer
from headway.runtime.native.available import best_instruction_set

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("HEADWAY_SOAK_S", "30"))
RATE = 20.0
needs_native = pytest.mark.skipif(not best_instruction_set()[0], reason="no native kernels here")


async def soak(start_server: StartServer, folder: Path, seconds: float):  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soak import Soak

    live = start_server("--kernels=native", "--kv-memory=16MiB", folder=folder).wait_ready()
    report = await Soak(live.url, live.pid, rate=RATE, seconds=seconds, seed=1).run()
    print(report)
    assert report.problems == [] and report.num_restarts == 0 and report.held == {}
    assert set(report.kernels.values()) == {"native"}
    assert report.num_sent > RATE * seconds / 2
    assert not any(status.startswith("5") for status in report.statuses)
    assert {"200", "400", "404", "left", "batch completed"} <= report.statuses.keys()
    wait_until(live.idle)
    assert "Traceback" not in live.stderr, live.stderr[-3000:]
    return report


@needs_native
async def test_a_short_soak_leaves_nothing_behind(start_server: StartServer, stories: Path) -> None:
    """Blocks count as resident when first written, so there are few of them here."""
    report = await soak(start_server, stories, SECONDS)
    rss = report.trends["rss_mb"]
    assert rss.last - rss.first < 100


@needs_native
@pytest.mark.hardening
@pytest.mark.timeout(2400)
async def test_twenty_minutes_of_mixed_load(start_server: StartServer, stories: Path) -> None:
    report = await soak(start_server, stories, 1200)
    assert report.verdict == "holds"


def test_what_grows_is_told_from_what_varies() -> None:
    """Noise of 5 MB is no growth; 30 MB an hour under the same noise is, and is named."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soak import ALLOWED, Report, trends

    noise = random.Random(1)
    steady, leaking = [], []
    for number in range(1440):
        sample = {"at_s": number * 5.0, **{name: noise.gauss(20, 0.01) for name in ALLOWED}}
        rss = 300 + noise.gauss(0, 5)
        steady.append({**sample, "rss_mb": rss})
        leaking.append({**sample, "rss_mb": rss + number * 5 / 3600 * 30})
    assert not any(trend.grows for trend in trends(steady).values())
    found = trends(leaking)
    assert [name for name, trend in found.items() if trend.grows] == ["rss_mb"]
    assert 28 < found["rss_mb"].slope_per_hour < 32
    assert Report(trends=found).verdict.startswith("rss_mb grows by ")
