"""Faults of the machine: a full disk, no room for sockets, a clock that jumps, a crowd that leaves;
and what systemd sees of a server's life."""

import ast
import asyncio
import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import pytest
from live_server import (
    NO_TORCH,
    LiveServer,
    clean_environment,
    wait_until,
)

from conftest import StartServer
from headway.core.errors import HeadwayError
from headway.frontend.process import ProcessClient

SOURCE = Path(__file__).resolve().parents[2] / "src" / "headway"
WALL_CLOCK = {"core/clock.py", "cli/build_server.py", "cli/spend.py"}
"""Files that ask for the time of day: the clock, `created` of a model, the days of spending."""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_the_logs_stops_nobody(tiny_model: Path) -> None:
    """Neither the greeting nor a line of the log can be written, and requests are answered."""
    live = LiveServer.__new__(LiveServer)
    live.headers = {}
    with open("/dev/full", "wb") as full:
        live.process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", "serve", str(tiny_model), "--port=0",
             NO_TORCH, "--kv-memory=64MiB"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=full, env=clean_environment(),
        )  # fmt: skip
    try:
        port = wait_until(lambda: listening_port(live.pid))
        live.url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(live) and live.is_ready())
        body = {"model": live.model, "prompt": [5], "max_tokens": 1, "an unknown field": 1}
        assert live.post("/v1/completions", body)[0] == 200
        assert live.post("/v1/completions", body)[0] == 200
    finally:
        live.process.terminate()
        status = live.process.wait(60)
    assert status == 0


def listening_port(pid: int) -> int | None:
    """The port that a process listens on, from the inodes of its sockets."""
    mine = set()
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it closes files while we look
            mine.add(os.readlink(place))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in mine:
            return int(local.rpartition(":")[2], 16)
    return None


def answers(live: LiveServer) -> bool:
    try:
        return live.get("/health")[0] == 200
    except OSError:
        return False


def test_no_room_for_sockets_is_told_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(HeadwayError, match="No space left") as refused:
        ProcessClient(lambda sockets: [], tokenizer=None)
    assert "TMPDIR" in refused.value.fix


def test_durations_never_come_from_the_wall_clock() -> None:
    """A clock that is set back or forward changes no timeout: nobody but the clock asks for it."""
    faults = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        room = name.split("/")[0]
        if room not in ("core", "engine", "server", "telemetry", "runtime", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "time.time", "time.time_ns", "datetime.now", "datetime.utcnow",
            )  # fmt: skip
            if asked and name not in WALL_CLOCK:
                faults.append(f"{name}:{node.lineno}")
    assert faults == []


async def test_a_crowd_that_leaves_frees_its_blocks(server: LiveServer) -> None:
    """Two hundred clients vanish at random tokens, without a word."""
    await vanish(server, 200)


@pytest.mark.hardening
async def test_a_thousand_clients_that_leave_free_their_blocks_within_a_second(
    server: LiveServer,
) -> None:
    assert await vanish(server, 1000) < 1.0


AT_ONCE = 200
"""Beyond 256 that wait this server refuses; those that have left count until it knows."""


async def vanish(live: LiveServer, count: int) -> float:
    """Let `count` streams be cut at random moments; seconds from the last cut to no block used."""
    source = random.Random(5)
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "stream": True, "n": 2,
            "ignore_eos": True}  # fmt: skip
    connector = aiohttp.TCPConnector(limit=0)
    gate = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(live.url, connector=connector) as http:

        async def one(chunks: int) -> None:
            async with gate:
                while not await leave(http, chunks):
                    await asyncio.sleep(0.05)

        async def leave(http: aiohttp.ClientSession, chunks: int) -> bool:
            async with http.post("/v1/completions", json=body) as answer:
                if answer.status == 503:
                    return False
                assert answer.status == 200
                for _ in range(chunks):
                    await answer.content.readany()
                answer.close()
            return True

        await asyncio.gather(*(one(source.randrange(5)) for _ in range(count)))
        began = time.monotonic()
        await asyncio.to_thread(wait_until, live.idle)
    return time.monotonic() - began


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
def test_systemd_sees_each_step_of_a_servers_life(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = str(tmp_path / "unit")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
        unit.bind(path)
        unit.settimeout(60)
        live = start_server(NO_TORCH, env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"})
        heard = []
        while "READY=1" not in heard:
            heard += unit.recv(1000).decode().split("\n")
        live.wait_ready()
        assert "STOPPING=1" not in heard
        heard = [unit.recv(1000).decode() for _ in range(3)]
        assert "WATCHDOG=1" in heard
        live.signal(15)
        while "STOPPING=1" not in heard:
            heard += unit.recv(1000).decode().split("\n")
        assert live.wait_end() == 0
