"""Whatever is sent, the answer is 200 or an OpenAI error body that names the field."""

import asyncio
from typing import Any

import aiohttp
import pytest
from error_cases import BODIES, CHAT, TEXT, changed, check_error, send
from live_server import LiveServer
from tiny_model import CONTEXT

from headway.server.endpoints import GENERATIONS
from headway.server.fields import NEUTRAL_VALUES
from headway.server.openai.schema import NO_OPS

REFUSED = {row.path: sorted(row.body_spec.refused) for row in GENERATIONS}

USER = {"role": "user", "content": "hi"}
BELOW, ABOVE = "integer_below_min_value", "integer_above_max_value"
LOW, HIGH = "decimal_below_min_value", "decimal_above_max_value"
BOTH: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "another"}, 404, "model_not_found", "model"),
    ({"model": 5}, 400, "invalid_type", "model"),
    ({"temperature": 2.1}, 400, HIGH, "temperature"),
    ({"temperature": -0.1}, 400, LOW, "temperature"),
    ({"top_p": 1.1}, 400, HIGH, "top_p"),
    ({"top_p": -1}, 400, LOW, "top_p"),
    ({"presence_penalty": 2.5}, 400, HIGH, "presence_penalty"),
    ({"frequency_penalty": -2.5}, 400, LOW, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, LOW, "repetition_penalty"),
    ({"min_p": 1.5}, 400, HIGH, "min_p"),
    ({"top_k": -2}, 400, BELOW, "top_k"),
    ({"top_k": 2**70}, 400, ABOVE, "top_k"),
    ({"top_k": 2**63}, 400, ABOVE, "top_k"),
    ({"min_tokens": 2**70, "max_tokens": None}, 400, "", "min_tokens"),
    ({"seed": 2**63}, 400, ABOVE, "seed"),
    ({"seed": -(2**63) - 1}, 400, BELOW, "seed"),
    ({"max_tokens": -1}, 400, BELOW, "max_tokens"),
    ({"max_tokens": 0}, 400, BELOW, "max_tokens"),
    ({"max_tokens": CONTEXT}, 400, "context_length_exceeded", None),
    ({"max_tokens": 2**70}, 400, "context_length_exceeded", None),
    ({"min_tokens": 3, "max_tokens": 2}, 400, "invalid_value", "min_tokens"),
    ({"min_tokens": -1}, 400, BELOW, "min_tokens"),
    ({"n": 0}, 400, BELOW, "n"),
    ({"n": 17}, 400, ABOVE, "n"),
    ({"n": 10**30}, 400, ABOVE, "n"),
    ({"stop": ""}, 400, "invalid_value", "stop"),
    ({"stop": ["a", ""]}, 400, "invalid_value", "stop"),
    ({"stop": list("abcdefghijklmnopq")}, 400, "array_above_max_length", "stop"),
    ({"stop_token_ids": [100_000]}, 400, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, BELOW, "stop_token_ids"),
    ({"allowed_token_ids": [2**65]}, 400, ABOVE, "allowed_token_ids"),
    ({"logit_bias": {"5": 101}}, 400, HIGH, "logit_bias"),
    ({"logit_bias": {"5": -101}}, 400, LOW, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, BELOW, "logit_bias"),
    ({"logit_bias": {"word": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "invalid_value", "logit_bias"),
    (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        400,
        "object_above_max_properties",
        "logit_bias",
    ),
    ({"prompt_logprobs": 21}, 400, ABOVE, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "invalid_value", "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        400,
        "missing_required_parameter",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": ""}}, 400, "invalid_value", "structured_outputs.regex"),
    (
        {"structured_outputs": {"json": {"not": {}}}},
        400,
        "unsupported_keyword",
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"regex": "("}, "stream": True},
        400,
        "invalid_value",
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, 400, "invalid_value", "min_tokens"),
    ({"response_format": {}}, 400, "missing_required_parameter", "response_format.type"),
]
ERRORS = [
    *[(path, *row) for path in (CHAT, TEXT) for row in BOTH],
    (CHAT, {"messages": ...}, 400, "missing_required_parameter", "messages"),
    (CHAT, {"messages": []}, 400, "empty_array", "messages"),
    (CHAT, {"messages": "hi"}, 400, "invalid_type", "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "invalid_type", None),
    (CHAT, {"messages": [USER, {"content": "hi"}]}, 400, None, "messages[1].role"),
    (
        CHAT,
        {"messages": [USER, {"role": "wizard", "content": "x"}]},
        400,
        "invalid_value",
        "messages[1].role",
    ),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, 400, None, "messages[0].role"),
    (
        CHAT,
        {"messages": [{"role": "user"}]},
        400,
        "missing_required_parameter",
        "messages[0].content",
    ),
    (CHAT, {"messages": [{**USER, "content": 5}]}, 400, "invalid_type", "messages[0].content"),
    (
        CHAT,
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "unsupported_value",
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": [{**USER, "content": ["hi"]}]}, 400, None, "messages[0].content[0]"),
    (
        CHAT,
        {"messages": [{**USER, "content": "word " * 600}]},
        400,
        "context_length_exceeded",
        None,
    ),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": ...}, 400, BELOW, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 2}, 400, "invalid_value", "max_tokens"),
    (CHAT, {"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, ABOVE, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, 400, BELOW, "top_logprobs"),
    (CHAT, {"logprobs": 1}, 400, "invalid_type", "logprobs"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "invalid_value",
        "continue_final_message",
    ),
    (TEXT, {"prompt": ...}, 400, "missing_required_parameter", "prompt"),
    (TEXT, {"prompt": ""}, 400, "empty_array", "prompt"),
    (TEXT, {"prompt": []}, 400, "empty_array", "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "empty_array", "prompt[0]"),
    (TEXT, {"prompt": ["hi", ""]}, 400, "empty_array", "prompt[1]"),
    (TEXT, {"prompt": ["hi", [1.5]]}, 400, "invalid_type", "prompt[1]"),
    (TEXT, {"prompt": [True]}, 400, "invalid_type", None),
    (TEXT, {"prompt": [None]}, 400, "invalid_type", "prompt[0]"),
    (TEXT, {"prompt": [-1]}, 400, "invalid_value", None),
    (TEXT, {"prompt": [2**65]}, 400, "invalid_value", None),
    (TEXT, {"prompt": [1] * 600}, 400, "context_length_exceeded", "prompt"),
    (TEXT, {"prompt": ["hi"] * 257}, 400, "array_above_max_length", "prompt"),
    (TEXT, {"logprobs": 21}, 400, ABOVE, "logprobs"),
    (TEXT, {"logprobs": True}, 400, "invalid_type", "logprobs"),
    (TEXT, {"suffix": "the end"}, 400, "unsupported_parameter", "suffix"),
    (TEXT, {"best_of": 3}, 400, "unsupported_parameter", "best_of"),
    (TEXT, {"echo": True, "logprobs": 1, "stream": True}, 400, "invalid_value", "echo"),
]


async def test_each_error_has_its_code_and_names_its_field(http: aiohttp.ClientSession) -> None:
    wrong = []
    for path, fields, status, code, param in ERRORS:
        got, content, _ = await send(http, path, changed(path, **fields))
        error = content.get("error", {"code": None, "param": None})
        if (
            got != status
            or (code and error["code"] != code)
            or (param is not None and error["param"] != param)
        ):
            wrong.append((path, str(fields)[:100], got, error))
    assert not wrong


# ── fields by name ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fields_not_honoured_yet_are_refused_by_name(
    http: aiohttp.ClientSession, path: str
) -> None:
    for name in REFUSED[path]:
        for value in ([5], {"a": 5}, 5, "something"):
            status, content, _ = await send(http, path, changed(path, **{name: value}))
            assert status == 400, name
            assert content["error"]["code"] == "unsupported_parameter"
            assert content["error"]["param"] == name and name in content["error"]["message"]
        for value in (None, False, [], {}, "", *NEUTRAL_VALUES.get(name, ())):
            status, content, headers = await send(http, path, changed(path, **{name: value}))
            assert status == 200 and "x-headway-ignored-fields" not in headers, (name, value)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fields_without_effect_are_accepted(http: aiohttp.ClientSession, path: str) -> None:
    for name in sorted(NO_OPS):
        status, _, headers = await send(http, path, changed(path, **{name: "anything"}))
        assert status == 200 and "x-headway-ignored-fields" not in headers


@pytest.mark.parametrize(
    "name", ["colour", "", " ", " a", "a ", "\0", "a\r\nb: c", "\v", "é", "x" * 500]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_field_is_reported_in_a_header(
    http: aiohttp.ClientSession, name: str, stream: bool
) -> None:
    body = changed(TEXT, **{name: 1}, stream=stream)
    async with http.post(TEXT, json=body) as answer:
        assert answer.status == 200
        assert "x-headway-ignored-fields" in answer.headers
        assert await answer.read()


async def test_a_null_field_was_not_asked_for(http: aiohttp.ClientSession) -> None:
    for path in (CHAT, TEXT):
        status, _, headers = await send(http, path, changed(path, colour=None, keep_alive=None))
        assert status == 200 and "x-headway-ignored-fields" not in headers
    _, _, headers = await send(http, TEXT, changed(TEXT, colour=None, keep_alive=5))
    assert headers["x-headway-ignored-fields"] == "keep_alive"


async def test_endpoints_not_served_yet_are_refused_by_name(http: aiohttp.ClientSession) -> None:
    for path, code in (
        ("/v1/embeddings", "unsupported_endpoint"),
        ("/nowhere", "unknown_url"),
    ):
        status, content, _ = await send(http, path, {})
        assert (status, content["error"]["code"]) == (404, code)
        assert path in content["error"]["message"]


async def test_a_wrong_method_is_a_405(http: aiohttp.ClientSession) -> None:
    for method, path in (
        ("GET", CHAT),
        ("DELETE", TEXT),
        ("POST", "/v1/models"),
        ("PUT", "/health"),
    ):
        async with http.request(method, path) as answer:
            check_error(answer.status, await answer.json())
            assert answer.status == 405


async def test_hostile_template_options_are_a_400(http: aiohttp.ClientSession) -> None:
    for options in (
        {"self": 1},
        {"messages": []},
        {"tools": 5},
        {"role": 1, "message": 2},
        {"add_generation_prompt": {}},
        {"continue_final_message": True},
        {"raise_exception": 1, "range": 2, "namespace": 3, "loop": 4},
        {"bos_token": [], "eos_token": 5},
        {"__class__": 1, "": 2, "a b": 3},
        {"context": 1, "environment": 2, "args": 3, "kwargs": 4, "text": 5},
    ):
        status, content, _ = await send(http, CHAT, changed(CHAT, chat_template_kwargs=options))
        assert status in (200, 400), (options, content)


# ── the answer's headers, and size ──────────────────────────────────────────────────────────


async def test_a_stream_has_the_headers_of_one(http: aiohttp.ClientSession) -> None:
    own = {"x-request-id": "mine"}
    async with http.post(TEXT, json=changed(TEXT, stream=True), headers=own) as answer:
        assert answer.content_type == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-request-id"] != "mine"
        assert answer.headers["x-client-request-id"] == "mine"
        assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_request_ids_are_never_the_same(http: aiohttp.ClientSession) -> None:
    seen = set()
    for path in ("/health", "/ready", "/version", "/v1/models", "/nowhere", "/metrics"):
        async with http.get(path) as answer:
            seen.add(answer.headers["x-request-id"])
    assert len(seen) == 6


async def test_a_body_over_the_limit_is_a_413(server: LiveServer) -> None:
    for size in (10_000_001, 30_000_000):
        async with aiohttp.ClientSession(server.url) as http:
            status, content, _ = await send(http, TEXT, b" " * size)
            assert (status, content["error"]["code"]) == (413, "request_too_large")
            status, _, _ = await send(http, TEXT, BODIES[TEXT])
            assert status == 200


async def test_a_huge_prompt_holds_up_nobody_else(http: aiohttp.ClientSession) -> None:
    """A megabyte takes a while to encode; others are answered meanwhile: in one of ten tries."""
    answered, tries = 0, 10
    while answered < 2 and tries > 0:
        answered, tries = 0, tries - 1
        huge = asyncio.create_task(send(http, "/tokenize", {"prompt": "word " * 200_000}))
        while not huge.done():
            await asyncio.sleep(0.01)
            async with http.get("/health") as answer:
                assert answer.status == 200
            answered += not huge.done()
        status, content, _ = await huge
        assert (status, len(content["tokens"])) == (200, content["count"])
    assert answered > 1


async def test_tokenize_and_back(http: aiohttp.ClientSession) -> None:
    text = "Tell me about the sea, é and 🌊."
    _, tokens, _ = await send(http, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    _, back, _ = await send(http, "/detokenize", {"tokens": tokens["tokens"]})
    assert back == {"prompt": text}
    _, chat, _ = await send(http, "/tokenize", {"messages": [USER]})
    assert chat["tokens"][0] == 1
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"model": "another", "prompt": "a"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        status, _, _ = await send(http, path, body)
        assert status in (400, 404)
