"""A mixed load for a while: no 5xx, no restart, memory and descriptors that do not grow."""

import os
import sys
from pathlib import Path

import pytest
from live_server import wait_until

from conftest import StartServer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("HEADWAY_SOAK_S", "30"))
RATE = 20.0


async def soak(start_server: StartServer, folder: Path, seconds: float):  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soak import Soak

    live = start_server("--kv-memory=16MiB", folder=folder).wait_ready()
    report = await Soak(live.url, live.pid, rate=RATE, seconds=seconds, seed=1).run()
    print(report)
    assert report.problems == [] and report.num_restarts == 0
    assert report.num_sent > RATE * seconds / 2
    assert not any(status.startswith("5") for status in report.statuses)
    assert {"200", "400", "404", "left"} <= report.statuses.keys()
    wait_until(live.idle)
    assert "Traceback" not in live.stderr, live.stderr[-3000:]
    return report


async def test_a_short_soak_leaves_nothing_behind(start_server: StartServer, stories: Path) -> None:
    """Blocks count as resident when first written, so there are few of them here."""
    report = await soak(start_server, stories, SECONDS)
    assert report.rss_mb_last - report.rss_mb_first < 100


@pytest.mark.hardening
@pytest.mark.timeout(2400)
async def test_twenty_minutes_of_mixed_load(start_server: StartServer, stories: Path) -> None:
    report = await soak(start_server, stories, 1200)
    assert report.rss_slope_mb_per_min <= 1
    assert report.descriptors_last <= report.descriptors_first + 50
