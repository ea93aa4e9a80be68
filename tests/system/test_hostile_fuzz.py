"""Hostile bodies to every address that takes one, on the embedded model: each has its answer.

    HEADWAY_FUZZ=5000:7 python -m pytest -m hardening tests/system/test_hostile_fuzz.py

sends 5,000 bodies of seed 7; without it the seed is a new one, and printed.
"""

import asyncio
import contextlib
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from error_cases import CHAT, check_error
from fuzz_cases import check_anthropic
from hostile import STARTS, Attack, make_attacks
from live_server import LiveServer, wait_until

import headway
from conftest import StartServer

FOLDER = Path(headway.__file__).parent / "embedded" / "headway-tiny"
AT_ONCE = 8
NAMELESS = {"invalid_json", "invalid_multipart", "invalid_content_type", "context_length_exceeded"}
"""Codes of a 400 that no one field is to blame for."""


@pytest.fixture
def embedded(start_server: StartServer) -> LiveServer:
    """The embedded model, native kernels where there are any, with a short context."""
    flags = ("--served-model-name=tiny", "--max-model-len=1024")
    return start_server(*flags, folder=FOLDER).wait_ready()


def control(live: LiveServer) -> list[Any]:
    """Two chats, greedy and seeded: their tokens."""
    asked = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "return_token_ids": True}
    found = []
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 7, "max_tokens": 64}):
        status, answer = live.post(CHAT, asked | sampling)
        assert status == 200, answer
        found.append(answer["choices"][0]["token_ids"])
    return found


def objects(attacks: list[Attack]) -> Iterator[dict[str, Any]]:
    """The bodies of those chats that are JSON objects."""
    for attack in attacks:
        with contextlib.suppress(ValueError, RecursionError):
            body = msgspec.json.decode(attack.data)
            if attack.path == CHAT and isinstance(body, dict):
                yield body


def upload(live: LiveServer, bodies: list[dict[str, Any]]) -> str:
    """A batch file that asks for these chats; its id."""
    entry = {"method": "POST", "url": CHAT}
    rows = [
        msgspec.json.encode({"custom_id": str(number), **entry, "body": body})
        for number, body in enumerate(bodies)
    ]
    data = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    data += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    data += b"\n".join(rows) + b"\r\n--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    status, answer = asyncio.run(send_one(live.url, Attack("/v1/files", data, headers)))
    assert status == 200, answer
    file_id: str = json.loads(answer)["id"]
    return file_id


async def send_one(url: str, attack: Attack) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(url) as http,
        http.post(attack.path, data=io.BytesIO(attack.data), headers=attack.headers) as answer,
    ):
        return answer.status, await answer.read()


def check(attack: Attack, status: int, kind: str, data: bytes) -> str:
    """Assert that this is an answer; what came: "200", or status and code of the refusal."""
    assert 200 <= status < 300 or 400 <= status < 500, data[:1000]
    if kind == "text/event-stream":
        assert status == 200 and data.endswith(b"\n\n"), data[-300:]
        return "stream"
    content = json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} in an answer"))
    if status == 200:
        return "200"
    if "error" in content and "type" in content:
        check_anthropic(status, content)
        return f"{status} {content['error']['type']}"
    check_error(status, content)
    error = content["error"]
    assert error["message"]
    if status == 400:
        assert error["param"] or error["code"] in NAMELESS, error
    return f"{status} {error['code']}"


async def attack_all(
    live: LiveServer, attacks: list[Attack], patience_s: float
) -> tuple[Counter[str], float]:
    """Send them, `AT_ONCE` at a time; what came, and the slowest answer in seconds."""
    todo, told, slowest = attacks[::-1], Counter[str](), 0.0

    async def work(http: aiohttp.ClientSession) -> None:
        nonlocal slowest
        while todo:
            attack = todo.pop()
            began = time.monotonic()
            try:
                async with (
                    asyncio.timeout(patience_s),
                    http.post(
                        attack.path, data=io.BytesIO(attack.data), headers=attack.headers
                    ) as answer,
                ):
                    data = await answer.read()
                told[check(attack, answer.status, answer.content_type, data)] += 1
            except (aiohttp.ClientError, AssertionError, ValueError, TimeoutError) as error:
                raise AssertionError(f"{error!r} for {attack}") from error
            slowest = max(slowest, time.monotonic() - began)

    async with aiohttp.ClientSession(live.url) as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work(http))
    return told, slowest


def batches_ended(live: LiveServer) -> list[dict[str, Any]]:
    """All batches once none of them runs, else nothing."""
    found: list[dict[str, Any]] = json.loads(live.get("/v1/batches?limit=100")[1])["data"]
    ends = ("completed", "failed", "cancelled", "expired")
    return found if all(batch["status"] in ends for batch in found) else []


def unharmed(live: LiveServer, count: int, seed: int, patience_s: float) -> None:
    """Attack, and compare what there is before and after."""
    engine, tokens = live.engine_pid(), control(live)
    paths = json.loads(live.get("/openapi.json")[1])["paths"]
    assert {path for path, ways in paths.items() if "post" in ways} == set(STARTS)
    lines = list(objects(make_attacks(400, seed + 1, {})))
    files = [upload(live, lines[at::3]) for at in range(3)]
    made = live.post("/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 4})
    ids = {"FILE": files, "id": ["batch_x"], "response_id": [made[1]["id"]]}
    attacks = make_attacks(count, seed, ids)
    told, slowest = asyncio.run(attack_all(live, attacks, patience_s))
    print(f"seed {seed}: {count} bodies, the slowest answer {slowest:.1f} s; {dict(told)}")
    assert min(told["200"], told["400 invalid_type"], told["400 invalid_json"]) > count / 40, told
    wait_until(lambda: batches_ended(live), 120)
    wait_until(live.idle)
    assert live.engine_pid() == engine and live.metric("engine_restarts_total") == 0
    assert control(live) == tokens
    assert "Traceback" not in live.stderr, live.stderr[-3000:]


def test_hostile_bodies_to_every_address_are_answered(embedded: LiveServer) -> None:
    unharmed(embedded, 500, 20_261_123, patience_s=120)


@pytest.mark.hardening
@pytest.mark.timeout(1800)
def test_5000_hostile_bodies_to_every_address_are_answered(embedded: LiveServer) -> None:
    count, _, seed = os.environ.get("HEADWAY_FUZZ", "").partition(":")
    unharmed(embedded, int(count or 5000), int(seed or random.randrange(2**32)), patience_s=30)
