"""Bodies nobody meant to send: no 5xx, the same engine process, the same tokens afterwards."""

import asyncio
import json
import random
import re
from typing import Any

import aiohttp
import pytest
from error_cases import BODIES, CHAT, STRUCTS, TEXT, check_error
from live_server import LiveServer

from headway.server.anthropic.schema import MessagesBody
from headway.server.responses.schema import ResponsesBody

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
STARTS = {
    **BODIES,
    RESPONSES: {"model": "tiny", "input": "hi", "max_output_tokens": 2},
    MESSAGES: {**BODIES[CHAT]},
}
TAKEN = {**STRUCTS, RESPONSES: ResponsesBody, MESSAGES: MessagesBody}
ENDS = {
    CHAT: b"data: [DONE]",
    TEXT: b"data: [DONE]",
    RESPONSES: b"}}",
    MESSAGES: b'data: {"type":"message_stop"}',
}
SEED = 20_261_121
AT_ONCE = 8
FIELDS = {
    path: [*struct.__struct_fields__, "unknown", "tools", "user"] for path, struct in TAKEN.items()
}
ATOMS: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 16, 17, 100, 383, 384, 511, 512, 2**31, 2**53, 2**63),
    *(2**64, -(2**63), -(2**70), 10**300, 0.0, 0.5, 1.0, -0.5, 2.0, 1e-9, 1e-320, 1e308, -1e308),
    *("", "a", "hi", "é🌊", "\0", "\x1b[31m", "\r\n", "x" * 3000, "auto", "text", "NaN", "5", "-5"),
    *("user", "assistant", "system", "tiny", "nickname", "another", "<|im_end|>"),
]
GOOD: dict[str, list[Any]] = {
    "model": ["tiny", "nickname"],
    "n": [1, 2, 5],
    "temperature": [0, 0.7, 2],
    "top_p": [0, 0.3, 1],
    "top_k": [-1, 0, 1, 50, 10**9],
    "min_p": [0, 0.5, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 1.3, 100],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "max_tokens": [0, 1, 7, 400],
    "max_completion_tokens": [1, 7],
    "min_tokens": [0, 1, 5],
    "stop": ["e", ["the", "a"], [" "]],
    "stop_token_ids": [[], [5], list(range(384))],
    "ignore_eos": [True, False],
    "logit_bias": [{"2": 100}, {"5": -100, "6": 100}, {str(i): -100 for i in range(384)}],
    "allowed_token_ids": [[], [2], [5, 5, 6], list(range(384))],
    "prompt_logprobs": [0, 1, 20],
    "logprobs": [True, 0, 5, 20],
    "top_logprobs": [0, 20],
    "stream": [True],
    "stream_options": [{"include_usage": True}, {"include_usage": False}],
    "echo": [True],
    "prompt": ["hi", ["a", "b"], [5, 6], [[5], [6, 7]], ["x"] * 20],
    "return_token_ids": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "chat_template_kwargs": [{"self": 1}, {"a": {}}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
    ],
    "structured_outputs": [
        {"regex": "[ab]{1,4}"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "x"'},
        {"json": {"not": {}}},
    ],
    "input": ["hi", [], [{"role": "user", "content": "hi"}], [{"type": "function_call"}], [{}]],
    "instructions": ["be", ""],
    "max_output_tokens": [1, 7],
    "previous_response_id": ["resp_", "resp_0"],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "background": [True, False],
    "text": [{"format": {"type": "text"}}, {"verbosity": "low"}],
    "reasoning": [{"effort": "low"}],
    "system": ["be", [{"type": "text", "text": "be"}]],
    "stop_sequences": [["e"], [" "]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
    "output_config": [{"effort": "low"}],
    "slo": [{"ttft_ms": 500}],
}


def anything(random: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = random.random()
    if depth < 3 and kind < 0.15:
        return [anything(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))]
    if depth < 3 and kind < 0.3:
        return {
            str(random.choice(ATOMS)): anything(random, depth + 1)
            for _ in range(random.choice((0, 1, 3)))
        }
    return random.choice(ATOMS)


def mutate(random: random.Random, value: Any) -> Any:
    """`value` with something in it changed."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        return {**value, key: mutate(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], mutate(random, value[at]), *value[at + 1 :]]
    return anything(random)


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


def check_anthropic(status: int, content: Any) -> None:
    """The one shape that errors of Messages have."""
    assert status in (400, 401, 403, 404, 405, 413, 429, 503), (status, content)
    assert set(content) == {"type", "error", "request_id"} and content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    assert 0 < len(content["error"]["message"]) < 2000


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
