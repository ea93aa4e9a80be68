"""The server ends: what runs finishes, what is new is refused, nothing is left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from live_server import NO_TORCH, PATIENT, LiveServer, alive, children, engines, wait_until
from streams import open_streams

from conftest import StartServer
from headway.edge import serving

NUM_STREAMS = 12


def left_behind(live: LiveServer, engine: int) -> list[object]:
    """A living engine, or anything in the server's temp folder."""
    return [*([engine] if alive(engine) else []), *live.sockets.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_streams_finish_and_new_requests_are_refused(
    start_server: StartServer, number: signal.Signals
) -> None:
    live = start_server(PATIENT, "--drain-timeout=10m").wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, NUM_STREAMS)
        os.kill(engine, signal.SIGSTOP)  # holds the streams open while we look
        live.signal(number)
        await asyncio.to_thread(wait_until, lambda: not live.is_ready())
        async with http.get("/ready") as answer:
            assert answer.status == 503 and "draining" in await answer.text()
        async with http.post("/v1/completions", json={"model": model, "prompt": [5]}) as answer:
            assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
            assert (await answer.json())["error"]["code"] == "shutting_down"
        async with http.get("/health") as answer:
            assert answer.status == 200
        os.kill(engine, signal.SIGCONT)
        readers = await ended
    assert all(reader.complete for reader in readers), [r.events[-1] for r in readers]
    assert await asyncio.to_thread(live.wait_end) == 0
    assert left_behind(live, engine) == []
    assert "Traceback" not in live.stderr, live.stderr


async def test_streams_beyond_the_drain_time_end_with_an_error(start_server: StartServer) -> None:
    live = start_server(NO_TORCH, PATIENT, "--drain-timeout=0.5").wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, NUM_STREAMS)
        os.kill(engine, signal.SIGSTOP)
        live.signal(signal.SIGTERM)
        readers = await ended
    assert {reader.error.get("code") for reader in readers} == {"shutting_down"}
    assert await asyncio.to_thread(live.wait_end) == 0
    assert left_behind(live, engine) == []


async def test_an_engine_that_dies_while_draining_is_not_waited_for(
    start_server: StartServer,
) -> None:
    live = start_server(NO_TORCH).wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, NUM_STREAMS)
        os.kill(engine, signal.SIGSTOP)
        live.signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not live.is_ready())
        os.kill(engine, signal.SIGKILL)
        readers = await ended
    assert {reader.error.get("code") for reader in readers} == {"engine_died"}
    assert await asyncio.to_thread(live.wait_end) == 0
    assert left_behind(live, engine) == []
    assert children(live.pid) == []


async def test_a_second_signal_ends_at_once(start_server: StartServer) -> None:
    live = start_server(NO_TORCH, PATIENT).wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, NUM_STREAMS)
        os.kill(engine, signal.SIGSTOP)
        live.signal(signal.SIGINT)
        await asyncio.to_thread(wait_until, lambda: not live.is_ready())
        live.signal(signal.SIGINT)
        assert await asyncio.to_thread(live.wait_end) == 130
        await asyncio.gather(ended, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not alive(engine))
    assert left_behind(live, engine) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_and_loading_servers_end_cleanly(
    start_server: StartServer, number: signal.Signals
) -> None:
    idle, loading = start_server(NO_TORCH), start_server(real=True)
    idle.wait_ready()
    for live in (idle, loading):
        (engine,) = wait_until(lambda live=live: engines(live.pid))
        live.signal(number)
        assert live.wait_end() == 0, live.stderr
        assert left_behind(live, engine) == []
        assert "Traceback" not in live.stderr and "ERROR" not in live.stderr


def test_a_server_asked_to_end_as_it_starts_its_engine_ends_cleanly(
    start_server: StartServer,
) -> None:
    live = start_server(real=True)
    (engine,) = wait_until(lambda: engines(live.pid))
    live.signal(signal.SIGTERM)
    assert live.wait_end() == 0, live.stderr
    assert left_behind(live, engine) == []


async def test_the_engine_goes_when_its_server_is_killed(start_server: StartServer) -> None:
    live = start_server(NO_TORCH).wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, 3)
        live.signal(signal.SIGKILL)
        await asyncio.gather(ended, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not alive(engine))
    live.wait_end()


def test_the_engine_goes_when_its_server_is_killed_while_loading(
    start_server: StartServer,
) -> None:
    live = start_server(real=True)
    (engine,) = wait_until(lambda: engines(live.pid))
    live.signal(signal.SIGKILL)
    wait_until(lambda: not alive(engine))
    live.wait_end()


STUCK = """
import re, threading, time
from pathlib import Path
from headway.edge import serving

serving.GRACE_S = 0.5

def stuck():
    while not Path({flag!r}).exists():
        time.sleep(0.05)
    {deed}

threading.Thread(target=stuck).start()
"""
DEEDS = {
    "in C, with the lock": 're.match("(a+)+$", "a" * 60 + "b")',
    "in Python": "while True: pass",
    "asleep": "time.sleep(1000)",
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_thread_that_never_ends_does_not_keep_the_server(
    start_server: StartServer, tmp_path: Path, deed: str
) -> None:
    flag = tmp_path / "stuck"
    script = STUCK.format(flag=str(flag), deed=DEEDS[deed])
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'serve' in sys.argv:\n    exec({script!r})\n"
    )
    live = start_server(NO_TORCH, "--drain-timeout=0.5", env={"PYTHONPATH": str(tmp_path)})
    live.wait_ready()
    engine = live.engine_pid()
    flag.touch()
    time.sleep(0.5)
    live.signal(signal.SIGTERM)
    assert live.wait_end() != 0
    if deed != "in C, with the lock":  # there nobody can say where: it is killed from outside
        assert "Timeout" in live.stderr and "in stuck" in live.stderr, live.stderr
    wait_until(lambda: not alive(engine))


def test_a_watchdog_whose_server_is_gone_before_it_looks_ends() -> None:
    program = Path(serving.__file__).with_name("watchdog.py")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", program, ours.fileno(), 10, os.getppid()]
        ended = subprocess.run([*map(str, command)], pass_fds=[ours.fileno()], timeout=120)
    assert ended.returncode == 0


def test_a_server_that_ends_in_time_leaves_no_watchdog(start_server: StartServer) -> None:
    live = start_server(NO_TORCH).wait_ready()
    below = children(live.pid)
    assert len(below) == 3  # the engine, the watchdog, and the process that renders templates
    live.signal(signal.SIGTERM)
    assert live.wait_end() == 0
    wait_until(lambda: not any(map(alive, below)))


@pytest.mark.parametrize("killed", ["engine", "server"])
def test_who_is_stopped_ends_with_the_one_that_started_it(
    start_server: StartServer, killed: str
) -> None:
    """A rank and the trial of a grammar, stopped with their engine: then it is killed, or the
    server, whose engine leaves no socket."""
    live = start_server("--tensor-parallel-size=2", PATIENT).wait_ready()
    body = {"model": live.model, "prompt": "x", "max_tokens": 4}
    body["structured_outputs"] = {"regex": "[ab]{2}"}
    assert live.post("/v1/completions", body)[0] == 200
    engine = live.engine_pid()
    below = children(engine)
    assert len(below) == 2
    for pid in (engine, *below):
        os.kill(pid, signal.SIGSTOP)
    os.kill(engine if killed == "engine" else live.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, (engine, *below))))
    if killed == "server":
        assert list(live.sockets.iterdir()) == []
