"""`headway serve --retune` on a real server: what it does is seen in /stats, /metrics and the log.

Its minutes are seconds here, and half of the requests have an objective that nobody can meet, so
that there is always something to gain. What is proposed is planted; the change, what it did and the
verdict are the server's own.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from live_server import NO_TORCH, LiveServer, alive, children, headway, wait_until

from conftest import StartServer

CLASSES = ("--slo=hopeless:ttft=1ms", "--slo=plain:ttft=30s,tpot=10s", "--slo=quick:ttft=2s")
SERVER = """
import os, sys
if "headway.cli.main" in sys.orig_argv:
    from headway.advise.retune import controller, retuner
    retuner.TICK_S = 0.5
    controller.RECENT_S, controller.WINDOW_S, controller.FIRST_S = 3.0, 8.0, 4.0
    controller.SETTLES_S, controller.FIRST_LOOK_S = 1.0, 4.0
    controller.LOOKS_EVERY_S, controller.WATCH_S, controller.GIVES_UP_S = 2.0, 8.0, 60.0
"""
PROCESS = """
import os, sys
if "headway.advise.retune" in sys.orig_argv:
    from headway.advise.retune import trial
    from headway.advise.retune.question import Answer
    def propose(one):
        changes = {} if one.asked.left_alone else PLANTED
        part = one.shortened(0.5)
        now = part.see(part.begin({}), 1.0).share
        return Answer(changes=changes, gain=0.5, gain_interval=(0.2, 0.8), now=now, why="planted")
    trial.propose = propose
    os.nice = lambda less: 0  # other tests have all cores
"""


def planted(folder: Path, changes: dict[str, Any], seconds: bool = True) -> dict[str, str]:
    """The environment of a server whose process proposes these changes."""
    process = PROCESS.replace("PLANTED", repr(changes))
    (folder / "sitecustomize.py").write_text((SERVER if seconds else "") + process)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@contextlib.contextmanager
def load(live: LiveServer, quick: str) -> Iterator[None]:
    """Half of the requests are hopeless, half are of the class `quick`, twelve at once, while the
    block lasts; on a thread of its own."""

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": live.model,
            "prompt": [10 + number, 20, 30, 40],
            "max_tokens": 24,
            "ignore_eos": True,
            "service_class": "hopeless" if number % 2 else quick,
        }
        while True:
            async with session.post(f"{live.url}/v1/completions", json=body) as answer:
                await answer.read()

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(keep_asking(session, number) for number in range(12)))

    loop = asyncio.new_event_loop()
    task = loop.create_task(ask())
    thread = threading.Thread(target=lambda: loop.run_until_complete(suppressed(task)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


async def suppressed(task: "asyncio.Task[None]") -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await task


def retuning(live: LiveServer) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(live.get("/stats")[1])["retuning"]
    return told


def limits(live: LiveServer) -> dict[str, int]:
    told: dict[str, int] = msgspec.json.decode(live.get("/stats")[1])["limits"]
    return told


def test_a_change_is_made_watched_and_judged(start_server: StartServer, tmp_path: Path) -> None:
    """Half as many rows as it started with are still plenty: what is said of them is chance, and
    rows, /stats, /metrics and the log all say the same."""
    env = planted(tmp_path, {"max_num_seqs": 16})
    live = start_server("--retune", NO_TORCH, *CLASSES, "--max-num-seqs=32", env=env).wait_ready()
    wait_until(lambda: retuning(live) is not None)
    assert retuning(live)["settings"]["max_num_seqs"] == 32
    with load(live, "plain"):
        told = wait_until(lambda: retuning(live)["changes"])
        assert told[0]["changes"] == {"max_num_seqs": 16}
        assert told[0]["was"] == {"max_num_seqs": 32}
        wait_until(lambda: limits(live)["max_num_seqs"] == 16)
        judged = wait_until(
            lambda: [e for e in retuning(live)["changes"] if e["outcome"] != "watched"]
        )
    outcome = judged[0]["outcome"]
    assert judged[0]["num_requests"] >= 20 and judged[0]["after"] > 0.3, judged
    rows = 16 if outcome == "kept" else 32
    wait_until(lambda: limits(live)["max_num_seqs"] == rows)
    assert live.metric("retunes_total", outcome=outcome) == 1
    assert live.metric("retune_cpu_seconds_total") > 0
    assert "retuned: max_num_seqs=16 for max_num_seqs=32" in live.stderr
    assert f"{outcome.replace('_', ' ')}: max_num_seqs" in live.stderr
    beside = children(live.pid)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in beside]
    assert sum(b"headway.advise.retune" in command for command in commands) == 1
    live.signal(signal.SIGTERM)
    assert live.wait_end() == 0
    wait_until(lambda: not any(map(alive, beside)))


def test_settings_outlive_the_engine(start_server: StartServer, tmp_path: Path) -> None:
    env = planted(tmp_path, {"max_num_batched_tokens": 128})
    live = start_server("--retune", NO_TORCH, *CLASSES, env=env).wait_ready()
    with load(live, "plain"):
        wait_until(lambda: retuning(live) is not None and retuning(live)["changes"])
        wait_until(lambda: retuning(live)["settings"]["max_num_batched_tokens"] == 128)
        os.kill(live.engine_pid(), 9)
        wait_until(lambda: live.metric("engine_restarts_total") == 1 and live.is_ready())
        wait_until(lambda: limits(live)["max_num_batched_tokens"] == 128)


def test_without_it_nothing_is_told_and_nothing_started(server: LiveServer) -> None:
    assert retuning(server) is None
    assert server.metric("retune_cpu_seconds_total") == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tensor-parallel-size=2",), "--tensor-parallel-size"),
        (("--batching=static",), "--batching static"),
        (("--fallback-model=http://127.0.0.1:9/v1",), "--fallback-model"),
    ],
)
def test_what_it_cannot_stand_beside_is_refused(tiny_model: Path, flags: Any, says: str) -> None:
    done = headway("serve", tiny_model, "--retune", *flags)
    assert done.returncode == 2 and "--retune beside" in done.stderr and says in done.stderr


@pytest.mark.hardening
def test_a_planted_bad_change_is_undone_within_three_minutes(
    start_server: StartServer, tmp_path: Path
) -> None:
    """One row for twelve who ask at once; its own times, not those of the tests above."""
    env = planted(tmp_path, {"max_num_seqs": 1}, seconds=False)
    flags = (NO_TORCH, "--max-queue-wait=10m", "--slo=quick:ttft=1s,tpot=1s")
    live = start_server("--retune", *CLASSES[:2], *flags, env=env).wait_ready()
    with load(live, "quick"):
        told = wait_until(lambda: retuning(live) and retuning(live)["changes"], 300)
        changed_s = told[0]["at_s"]
        wait_until(lambda: retuning(live)["changes"][0]["outcome"] != "watched", 300)
        found = msgspec.json.decode(live.get("/stats")[1])
        change = found["retuning"]["changes"][0]
        assert change["outcome"] == "rolled_back", change
        assert found["now_s"] - changed_s <= 180
        wait_until(lambda: retuning(live)["settings"]["max_num_seqs"] == 64)
    assert live.metric("retunes_total", outcome="rolled_back") == 1
    assert "rolled back: max_num_seqs is 64 again" in live.stderr
