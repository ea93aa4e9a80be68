"""The application under a real Ray: servers come up behind the gateway, one is killed under load,
Ray starts another, a new version is deployed and one that cannot start; no stream notices.

Needs the extra `ray` (half a gigabyte), so it is run by hand: `pip install '.[ray]'`.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

pytestmark = [
    pytest.mark.hardening,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, and there are many
]
ray = pytest.importorskip("ray")
PATIENCE_S = 300.0
FOLDER = Path(__file__).resolve().parents[2] / "src" / "headway" / "embedded" / "headway-tiny"
NUM_STREAMS = 8


def wait_until(holds: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < until_s
        time.sleep(0.2)
    return found


@pytest.fixture
def cluster(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def arguments(*flags: str) -> dict[str, Any]:
    return {
        "folder": str(FOLDER),
        "flags": ["--threads=1", "--kv-memory=64MiB", "--dtype=float32", *flags],
        "host": "127.0.0.1",
        "port": 0,
        "least": 2,
        "most": 2,
        "ready_s": PATIENCE_S,
        "drain_s": 30,
    }


def deploy(*flags: str) -> Any:
    from ray import serve

    from headway.cluster.ray_app import app

    serve.start(http_options={"host": "127.0.0.1", "port": 0, "location": "NoServer"})
    return serve.run(app(arguments(*flags)), name="headway", route_prefix=None)


def gateway_url(gateway: Any) -> str:
    return str(wait_until(lambda: gateway.url.remote().result()))


def servers() -> list[int]:
    """The processes of `headway serve`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        is_ours = b"headway.cli.main" in words and b"serve" in words
        if is_ours and str(FOLDER).encode() in words and b"headway.cluster.child" not in words:
            found.append(int(path.parent.name))
    return found


async def stream(url: str, number: int, pieces: list[str]) -> None:
    body = {
        "model": "headway-tiny",
        "prompt": f"Once upon a time there were {number} friends.",
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    pieces.append(choice["text"])


async def streams(url: str, came: list[list[str]] | None = None) -> list[str | BaseException]:
    """The texts of all streams, whose pieces `came` gains as they come; or what broke one."""
    came = came if came is not None else []
    came += [[] for _ in range(NUM_STREAMS)]
    asked = (stream(url, number, came[number]) for number in range(NUM_STREAMS))
    ends = await asyncio.gather(*asked, return_exceptions=True)
    return [end or "".join(pieces) for end, pieces in zip(ends, came, strict=True)]


async def ask(gateway: Any, number: int) -> str:
    """A stream's text, at the gateway that is there; Ray puts another in its place when it deploys,
    and whom nobody answers asks again, where it is now. What has begun must come to its end."""
    until_s, pieces = time.monotonic() + PATIENCE_S, list[str]()
    while True:
        try:
            url = await asyncio.to_thread(lambda: gateway.url.remote().result(timeout_s=30))
            if url:
                await stream(url, number, pieces)
                return "".join(pieces)
        except (aiohttp.ClientConnectionError, TimeoutError, ray.exceptions.RayError):
            if pieces:
                raise
        assert time.monotonic() < until_s
        await asyncio.sleep(0.2)


async def all_the_while(gateway: Any, expected: list[str], deployed: "asyncio.Task[Any]") -> None:
    """Eight streams at once, one round after the other, until this is over and once more."""
    is_over = False
    while not is_over:
        is_over = deployed.done()
        asked = (ask(gateway, number) for number in range(NUM_STREAMS))
        assert await asyncio.gather(*asked, return_exceptions=True) == expected


async def test_a_server_that_is_killed_comes_back_and_a_new_version_is_deployed(cluster):
    gateway = await asyncio.to_thread(deploy)
    url = await asyncio.to_thread(gateway_url, gateway)
    await asyncio.to_thread(wait_until, lambda: len(gateway.member_urls.remote().result()) == 2)
    expected = await streams(url)
    assert all(expected) and len(set(expected)) == NUM_STREAMS
    came: list[list[str]] = []
    under_way = asyncio.create_task(streams(url, came))
    while len(came) < NUM_STREAMS or not all(came):
        assert not under_way.done()
        await asyncio.sleep(0.01)
    before = set(servers())
    os.kill(min(before), signal.SIGKILL)
    assert await under_way == expected
    await asyncio.to_thread(wait_until, lambda: len(servers()) == 2 and set(servers()) != before)
    await asyncio.to_thread(wait_until, lambda: len(gateway.member_urls.remote().result()) == 2)
    assert await streams(url) == expected
    good = asyncio.create_task(asyncio.to_thread(deploy, "--max-num-seqs=16"))
    await all_the_while(gateway, expected, good)
    await good
    bad = asyncio.create_task(asyncio.to_thread(deploy, "--no-such-option"))
    await all_the_while(gateway, expected, bad)
    with pytest.raises(RuntimeError):
        await bad
