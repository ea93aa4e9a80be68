"""A mixed load for a while: no 5xx, no restart, memory and descriptors that do not grow."""

import asyncio
import os
import random
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from live_server import wait_until

from conftest import StartServer
from headway.runtime.native.available import best_instruction_set

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("HEADWAY_SOAK_S", "30"))
RATE = 20.0
needs_native = pytest.mark.skipif(not best_instruction_set()[0], reason="no native kernels here")


sys.path.insert(0, str(ROOT / "benchmarks"))


async def soak(start_server: StartServer, folder: Path, seconds: float):  # type: ignore[no-untyped-def]
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
    assert Report(trends=trends(steady), statuses={"200": 9}).verdict == "holds"


@pytest.mark.parametrize(
    ("num_samples", "statuses", "words"),
    [
        (40, {"200": 50}, "too few samples"),
        (400, {"429": 50}, "no request was answered"),
        (0, {}, "too few samples to say whether anything grows; no request was answered"),
    ],
)
def test_who_saw_too_little_does_not_say_that_it_holds(
    num_samples: int, statuses: dict[str, int], words: str
) -> None:
    from soak import ALLOWED, Report, trends

    samples = [
        {"at_s": 5.0 * number, **dict.fromkeys(ALLOWED, 1.0)} for number in range(num_samples)
    ]
    verdict = Report(trends=trends(samples), statuses=statuses).verdict
    assert verdict.startswith(words)


@pytest.mark.parametrize(
    ("refused", "status", "is_problem"),
    [
        ("POST /v1/files", 429, False),
        ("POST /v1/files", 503, True),
        ("POST /v1/batches", 429, False),
        ("POST /v1/batches", 503, True),
        ("GET /v1/batches/b", 503, True),
    ],
)
async def test_an_upload_that_is_refused_is_told_and_ends_no_run(
    refused: str, status: int, is_problem: bool
) -> None:
    """A server of files and batches that refuses one kind of request."""
    from soak import Soak

    seen = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        seen.append(f"{request.method} {request.path}")
        if seen[-1] == refused:
            return web.json_response({"error": {"message": "no"}}, status=status)
        name = "f" if request.path.startswith("/v1/files") else "b"
        return web.json_response({"id": name, "status": "in_progress"})

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    run = Soak(url, os.getpid(), rate=1, seconds=1, seed=1)
    try:
        async with aiohttp.ClientSession(url) as http, asyncio.TaskGroup() as group:
            group.create_task(run._upload(http, "tiny"))
    finally:
        await runner.cleanup()
    assert run.statuses == {str(status): 1} and bool(run.problems) is is_problem
    assert ("DELETE /v1/files/f" in seen) is (refused != "POST /v1/files"), "what was made goes"


def test_each_kind_of_the_mix_can_be_sent_alone() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soak import KINDS, one_of

    source = random.Random(1)
    for kind in KINDS:
        if kind != "upload":
            asked = [one_of(kind, source, "m", chats=True) for _ in range(3)]
            assert {one.leaves_s is not None for one in asked} == {kind == "left"}
            assert kind == "left" or {one.kind for one in asked} == {kind}
    seen = {one_of("", source, "m", chats=True).kind for _ in range(1000)}
    assert seen == set(KINDS) - {"left", "upload"}


def test_growth_is_told_for_each_request() -> None:
    """7.9 MB an hour at 4 requests a second: 14,400 requests of 575 bytes."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soak import Trend, bytes_a_request

    zero = {"first": 0.0, "last": 0.0, "most": 0.0, "error_per_hour": 0.0, "grows": False}
    found = {
        "rss_mb": Trend(slope_per_hour=7.9, **zero),
        "threads": Trend(slope_per_hour=1, **zero),
    }
    assert bytes_a_request(found, 4.0) == {"rss_mb": 575}
