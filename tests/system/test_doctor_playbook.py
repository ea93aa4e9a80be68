"""`headway doctor --playbook` on five staged servers: each names its own next step."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, headway
from staged import (
    HEAVY_FLAGS,
    Load,
    body,
    both,
    closed_loop,
    open_loop,
    under,
    write_heavy_model,
)

from conftest import StartServer

GIVEN_UP_AFTER = 10
"""Looks until enough requests have ended, on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def light(tiny_model: Path) -> Iterator[LiveServer]:
    live = LiveServer(tiny_model, "--served-model-name=tiny", "--kv-memory=64MiB")
    yield live.wait_ready()
    live.close()


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Weights that no cache holds."""
    folder = write_heavy_model(tmp_path_factory.mktemp("models") / "heavy")
    live = LiveServer(folder, "--served-model-name=tiny", "--max-queue-wait=10m", *HEAVY_FLAGS)
    yield live.wait_ready()
    live.close()


async def playbook_under(
    server: LiveServer, load: Load, *flags: str, seconds: int = 4
) -> dict[str, Any]:
    """The playbook of a server under this load, from a window in which enough requests ended."""
    async with under(server, load):
        for _ in range(GIVEN_UP_AFTER):
            arguments = (server.url, "--playbook", "--json", f"--seconds={seconds}", *flags)
            done = await asyncio.to_thread(headway, "doctor", *arguments)
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout)
            if found["next"] != "measure":
                break
            seconds = min(2 * seconds, 60)
    return found


def stage(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["stages"] if each["name"] == name)


async def test_a_server_that_few_have_asked_is_measured_first(light: LiveServer) -> None:
    done = await asyncio.to_thread(
        headway, "doctor", light.url, "--playbook", "--json", "--seconds=1"
    )
    found = json.loads(done.stdout)
    assert found["next"] == "measure", found
    assert "0 requests ended" in stage(found, "measure")["brings"]


async def test_bodies_that_fail_are_structured_next(light: LiveServer) -> None:
    load = both(
        open_loop(0.1, lambda i: body(20, 5, i)),
        open_loop(0.1, lambda i: {**body(20, 5, i), "temperature": 9}),
    )
    found = await playbook_under(light, load)
    assert found["next"] == "structure", found
    assert 0.3 < stage(found, "structure")["share"] < 0.7


async def test_long_prompts_are_shortened_next(heavy: LiveServer, tmp_path: Path) -> None:
    page = tmp_path / "playbook.html"
    load = closed_loop(1, lambda i: body(200, 2, i))
    found = await playbook_under(heavy, load, f"--html={page}")
    assert found["next"] == "shorten", found
    assert stage(found, "shorten")["saves_s"] > 0
    assert 'class="next" data-step="shorten"' in page.read_text()


async def test_one_request_at_a_time_is_batched_next(heavy: LiveServer) -> None:
    found = await playbook_under(heavy, closed_loop(1, lambda i: body(4, 12, i)))
    assert found["next"] == "batch", found
    assert stage(found, "batch")["rule"] == "small-batch"
    assert stage(found, "quantize")["state"] == "later"


async def test_what_begins_alike_is_cached_next(start_server: StartServer) -> None:
    cold = start_server("--served-model-name=tiny", "--no-prefix-cache").wait_ready()
    shared = [5 + i * 7 % 300 for i in range(300)]

    def ask(number: int) -> dict[str, Any]:
        own = [5 + (number * 31 + i * 11) % 300 for i in range(8)]
        return {**body(1, 2, number), "prompt": shared + own}

    found = await playbook_under(cold, closed_loop(1, ask))
    assert found["next"] == "cache", found
    assert "share their first 300 tokens" in " ".join(stage(found, "cache")["figures"])


async def test_people_read_the_next_step_first(light: LiveServer) -> None:
    done = await asyncio.to_thread(headway, "doctor", light.url, "--playbook", "--seconds=1")
    assert done.stdout.startswith("next: ") and "8 speculate" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--playbook",), "--playbook walks"), (("http://127.0.0.1:9", "--html=x"), "--html draws")],
)
def test_what_has_no_playbook(arguments: tuple[str, ...], word: str) -> None:
    done = headway("doctor", *arguments)
    assert done.returncode == 2 and word in done.stderr
