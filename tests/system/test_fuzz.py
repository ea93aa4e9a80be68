"""Bodies nobody meant to send: no 5xx, the same engine process, the same tokens afterwards."""

import asyncio
import json
import random
import re
from typing import Any

import aiohttp
import pytest
from error_cases import BODIES, CHAT, TEXT, check_error
from fuzz_cases import ATOMS, FIELDS, GOOD, MESSAGES, RESPONSES, anything, check_anthropic, mutate
from live_server import LiveServer

STARTS = {
    **BODIES,
    RESPONSES: {"model": "tiny", "input": "hi", "max_output_tokens": 2},
    MESSAGES: {**BODIES[CHAT]},
}
ENDS = {
    CHAT: b"data: [DONE]",
    TEXT: b"data: [DONE]",
    RESPONSES: b"}}",
    MESSAGES: b'data: {"type":"message_stop"}',
}
SEED = 20_261_121
AT_ONCE = 8


def make_body(random: random.Random, path: str) -> bytes:
    """A good body, then a few fields of good values, then perhaps something wrong."""
    body: dict[str, Any] = dict(STARTS[path])
    for _ in range(random.choice((0, 1, 2, 4, 8))):
        name = random.choice(FIELDS[path])
        body[name] = random.choice(GOOD.get(name, ATOMS))
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        kind = random.random()
        if kind < 0.6:
            body = mutate(random, body)
        elif kind < 0.9:
            body[random.choice(FIELDS[path])] = anything(random)
        else:
            body.pop(random.choice(list(body)), None)
        if not isinstance(body, dict) or not body:
            break
    raw = bytearray(json.dumps(body).encode())
    if random.random() < 0.05:
        at = random.randrange(len(raw))
        raw[at : at + random.choice((0, 1, 5))] = random.randbytes(random.choice((0, 1, 3)))
    return bytes(raw)


async def fuzz(live: LiveServer, count: int, seed: int) -> dict[int, int]:
    """Send `count` bodies; returns status → how often, and fails where an answer breaks a rule."""
    source = random.Random(seed)
    todo = [(path, make_body(source, path)) for path in STARTS for _ in range(count // 4)]
    statuses: dict[int, int] = {}

    async def work(http: aiohttp.ClientSession) -> None:
        while todo:
            path, raw = todo.pop()
            try:
                async with http.post(path, data=raw) as answer:
                    data = await answer.read()
            except aiohttp.ClientError as error:
                raise AssertionError(f"{error!r} for {raw[:3000]!r}") from error
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.content_type == "text/event-stream":
                assert data.endswith(ENDS[path] + b"\n\n"), raw[:3000]
                assert not re.search(rb'"error":{|event: error|response.failed', data), raw[:3000]
            elif answer.status != 200:
                try:
                    check = check_anthropic if path == MESSAGES else check_error
                    check(answer.status, json.loads(data))
                except AssertionError as error:
                    raise AssertionError(f"{error} for {path} {raw[:3000]!r}") from error
            else:
                json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} in an answer"))

    async with aiohttp.ClientSession(live.url) as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work(http))
    return statuses


async def unharmed(live: LiveServer, count: int, seed: int) -> None:
    """Fuzz, and compare the engine before and after."""
    engine, tokens = live.engine_pid(), live.probe()
    statuses = await fuzz(live, count, seed)
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > count / 10, statuses
    assert live.engine_pid() == engine
    assert live.metric("engine_restarts_total") == 0
    assert live.probe() == tokens
    assert "Traceback" not in live.stderr, live.stderr[-3000:]


async def test_strange_bodies_leave_the_server_as_it_was(server: LiveServer) -> None:
    await unharmed(server, 1500, SEED)


@pytest.mark.hardening
@pytest.mark.timeout(1800)
async def test_many_strange_bodies_leave_the_server_as_it_was(server: LiveServer) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    await unharmed(server, 5000, seed)
