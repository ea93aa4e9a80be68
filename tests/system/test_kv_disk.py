"""KV blocks on a disk, seen from outside: after kill -9 of a server or an engine, beside another.

Each compares the tokens *and* what was found: a tier that is written and never read shows in the
second, one that restores the wrong bytes in the first.
"""

import asyncio
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from live_server import LiveServer, alive, wait_until

PROMPT = [10 + number * 7 % 300 for number in range(500)]
NUM_BLOCKS = 31
"""Full blocks of the prompt that a restore can find: its last token is computed anew."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Servers of headway-tiny, which computes a prompt in 30 times the time that a read takes."""
    servers = []

    def make(*flags: str) -> LiveServer:
        disk = (f"--kv-disk={tmp_path / 'kv'}:50MB", "--kv-disk-write=through")
        servers.append(LiveServer(None, "--kv-memory=64MiB", *disk, *flags))
        return servers[-1].wait_ready()

    yield make
    for server in servers:
        server.close()


def ask(server: LiveServer, prompt: list[int], max_tokens: int = 8) -> tuple[list[int], int]:
    """(tokens, prompt tokens found)."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    status, answer = server.post("/v1/completions", body | more)
    assert status == 200, answer
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], found


def num_written(folder: Path) -> int:
    """Records in the segments."""
    return sum(path.read_bytes().count(b"HWKV") for path in folder.glob("kv/*/*.kv"))


def test_a_killed_servers_blocks_are_found_by_the_next_and_by_no_second(start, tmp_path: Path):
    first = start()
    answer, found = ask(first, PROMPT)
    assert found == 0
    wait_until(lambda: num_written(tmp_path) >= NUM_BLOCKS)
    engine = first.engine_pid()
    first.signal(signal.SIGKILL)
    first.wait_end()
    wait_until(lambda: not alive(engine))
    for _ in range(3):
        second = start()
        found = ask(second, PROMPT)
        if not second.metric("kv_disk_failures_total", kind="read"):
            break
        second.close()  # beside other work a read may take so long that it is given up
    assert found == (answer, NUM_BLOCKS * 16)
    assert second.metric("prompt_tokens_cached_by_source_total", source="disk") == NUM_BLOCKS * 16
    assert second.metric("kv_tier_bytes", tier="disk") > 0
    assert second.metric("kv_tier_seconds_saved_total", tier="disk") > 0
    beside = start()
    assert ask(beside, PROMPT) == (answer, 0)
    assert "another server uses" in beside.stderr
    assert ask(second, PROMPT)[0] == answer
    assert second.post("/cache/forget", {"cache_salt": "of nobody"})[0] == 200
    assert ask(second, PROMPT)[1] > 0
    assert second.post("/cache/forget", {})[0] == 200
    wait_until(lambda: not list(tmp_path.glob("kv/*/*.kv")))
    assert ask(second, PROMPT) == (answer, 0)


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 3, "ignore_eos": True}
LETTERS: dict[str, Any] = {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{2700}"}}


async def stream(http: aiohttp.ClientSession, body: dict[str, Any], tokens: list[int]) -> list[int]:
    """The tokens of a streamed answer, which `tokens` gains as they come."""
    async with http.post("/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids", [])
    return tokens


def full_blocks(came: list[list[int]]) -> int:
    """Blocks of 16 that prompts of 401 tokens and these answers fill."""
    return sum((401 + len(tokens)) // 16 for tokens in came)


async def test_what_runs_goes_on_from_the_disk_when_its_engine_dies(start, tmp_path: Path):
    """Greedy, seeded and structured: the tokens of the same requests that nobody disturbed."""
    live = start("--dtype=float32")
    more = {"model": live.model, "max_tokens": 900, "return_token_ids": True}
    bodies = [
        {"prompt": [200 + at, *PROMPT[:400]], **how, **more}
        for at, how in enumerate([GREEDY, SEEDED, LETTERS])
    ]
    async with aiohttp.ClientSession(live.url) as http:
        apart = [stream(http, body | {"cache_salt": "apart"}, []) for body in bodies]
        undisturbed = await asyncio.gather(*apart)
        before = num_written(tmp_path)
        came: list[list[int]] = [[] for _ in bodies]
        under_way = asyncio.gather(*map(stream, [http] * 3, bodies, came))
        # 100 tokens are 31 full blocks each; who lacks the last three still has its prompt's 25
        while min(map(len, came)) < 100 or num_written(tmp_path) < before + full_blocks(came) - 3:
            assert not under_way.done(), "they ended before the engine did"
            await asyncio.sleep(0.01)
        os.kill(live.engine_pid(), signal.SIGKILL)
        assert await under_way == undisturbed
    assert live.metric("engine_restarts_total") == 1
    # beside other work a read may take so long that it is given up, and the prompt is computed
    num_read = 3 - live.metric("kv_disk_failures_total", kind="read")
    assert live.metric("prompt_tokens_cached_by_source_total", source="disk") == num_read * 401


def flip(folder: Path, chooser: random.Random) -> None:
    """One byte of one segment is another."""
    paths = sorted(path for path in folder.glob("kv/*/*.kv") if path.stat().st_size)
    if paths:
        with chooser.choice(paths).open("r+b") as file:
            at = chooser.randrange(file.seek(0, os.SEEK_END))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chooser.randrange(8)]))


@pytest.mark.hardening
@pytest.mark.timeout(1800)
def test_fifty_kills_of_a_server_with_flipped_bytes_between_them(start, tmp_path: Path):
    """It is killed while it answers and writes; each answer is that of a server without a disk."""
    chooser = random.Random(1)
    prompts = [[200 + at, *PROMPT] for at in range(6)]
    plain = LiveServer(None, "--kv-memory=64MiB").wait_ready()
    expected = [ask(plain, prompt)[0] for prompt in prompts]
    plain.close()
    answered = restored = damaged = 0
    for _ in range(50):
        server = start()
        for at in chooser.sample(range(6), 4):
            tokens, found = ask(server, prompts[at])
            assert tokens == expected[at]
            answered, restored = answered + 1, restored + bool(found)
        damaged += server.metric("kv_disk_failures_total") > 0
        killer = threading.Timer(chooser.uniform(0, 0.3), server.signal, [signal.SIGKILL])
        engine = server.engine_pid()
        killer.start()
        with suppress(OSError, HTTPException):
            for at in range(100):
                ask(server, [300 + at, *PROMPT[: chooser.randrange(100, 400)]])
        killer.join()
        server.wait_end()
        wait_until(lambda engine=engine: not alive(engine))
        flip(tmp_path, chooser)
    assert answered == 200 and restored > 50 and damaged > 5


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_answers_go_on_when_the_disk_does_not(tmp_path: Path, fault: str):
    """Files that may not grow, as on a full disk, and a folder that is removed: said once."""
    full = ("bash", "-c", 'ulimit -f 256; exec "$0" "$@"') if fault == "full" else ()
    disk = f"--kv-disk={tmp_path / 'kv'}:50MB", "--kv-disk-write=through"
    server = LiveServer(None, "--kv-memory=64MiB", *disk, before=full).wait_ready()
    try:
        answer, _ = ask(server, PROMPT)
        wait_until(lambda: num_written(tmp_path) > 2)
        if fault == "gone":
            shutil.rmtree(tmp_path / "kv")
        for at in range(3):
            ask(server, [200 + at, *PROMPT])
        assert ask(server, PROMPT)[0] == answer
        if fault == "full":
            wait_until(lambda: "free space" in server.stderr)
            assert server.stderr.count("free space") == 1
        assert server.metric("engine_restarts_total") == 0
    finally:
        server.close()
