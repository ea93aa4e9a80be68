"""Hosted providers as upstreams, asked by the official clients through their own dialects."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from gateway_world import Gateway, gateway
from headway.core.errors import RequestError
from headway.gateway.ask import as_value_error
from headway.gateway.config import GatewayModelRow, UpstreamRow, convert_row, join_rows
from headway.gateway.events import Event
from headway.gateway.providers import upstream_url
from headway.gateway.translation import ChatAsMessages, MessagesAsChat, chat_body, message_body
from hosted_stubs import ARGUMENTS, CACHED, OUTPUT, PROMPT, HostedStub

MESSAGES: Any = [{"role": "user", "content": "Where is it warm?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
MESSAGE_TOOLS: Any = [{"name": "weather", "input_schema": SCHEMA}]


@contextlib.asynccontextmanager
async def hosted(
    *stubs: HostedStub, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> AsyncIterator[Gateway]:
    """A gateway before these providers, each named by its kind; `chat` has the first alone."""
    for stub in stubs:
        await stub.start()
        monkeypatch.setenv(f"{stub.kind.upper()}_KEY", stub.key)
    rows = [
        convert_row(
            "test",
            {
                **{"name": s.kind, "kind": s.kind, "url": s.url, "model": f"big-of-{s.kind}"},
                **{"key_env": f"{s.kind.upper()}_KEY"},
                **({"api_version": "2024-10-21"} if s.kind == "azure" else {}),
            },
            UpstreamRow,
        )
        for s in stubs
    ]
    first, *others = [stub.kind for stub in stubs]
    models = [{"name": "chat", "upstreams": [first], "fallbacks": others, **fields}]
    models += [{"name": name, "upstreams": [name]} for name in others]
    config = join_rows(
        "test", rows, [convert_row("test", each, GatewayModelRow) for each in models], {}, ()
    )
    try:
        async with gateway(config) as live:
            yield live
    finally:
        for stub in stubs:
            await stub.stop()


@pytest.mark.parametrize("kind", ["openai", "anthropic", "azure", "bedrock"])
async def test_the_official_clients_ask_each_provider(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats and messages, whole and streamed, with text and with a call, at each kind."""
    stub = HostedStub(kind, "provider-key")
    async with hosted(stub, monkeypatch=monkeypatch) as live:
        root = str(live.http._base_url).rstrip("/")
        client = openai.AsyncOpenAI(base_url=root + "/v1", api_key="none", max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0)
        async with client, claude:
            await chats(client)
            await messages(claude)
    assert not any(header == "none" for sent in stub.sent for header in sent.values())
    assert {body["model"] for body in stub.asked} == {f"big-of-{kind}"}
    if kind == "azure":
        place = "/openai/deployments/big-of-azure/chat/completions?api-version=2024-10-21"
        assert place in stub.paths


async def chats(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 9}
    whole = await client.chat.completions.create(**asked, temperature=0.5, stop=["x"])
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    found = (whole.choices[0].message.content, whole.choices[0].finish_reason, whole.model)
    assert found[:2] == ("t0 t1 t2", "stop")
    counts = whole.usage.prompt_tokens, whole.usage.prompt_tokens_details.cached_tokens
    assert (*counts, whole.usage.completion_tokens) == (PROMPT, CACHED, OUTPUT)
    called = await client.chat.completions.create(**asked, tools=CHAT_TOOLS, tool_choice="required")
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.type == "function" and called.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather" and "Bern" in call.function.arguments
    answered = [*MESSAGES, called.choices[0].message.model_dump(exclude_none=True)]
    answered.append({"role": "tool", "tool_call_id": call.id, "content": "18 °C"})
    await client.chat.completions.create(**{**asked, "messages": answered})
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(**asked, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "t0 t1 t2"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == PROMPT
    stream = await client.chat.completions.create(**asked, stream=True, tools=CHAT_TOOLS)
    deltas = [c.choices[0].delta async for c in stream if c.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join((c.function and c.function.arguments) or "" for c in calls) == ARGUMENTS
    assert [c.function.name for c in calls if c.function and c.function.name] == ["weather"]


async def messages(claude: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": 9}
    whole = await claude.messages.create(**asked, system="Be short.", stop_sequences=["x"])
    assert whole.content[0].type == "text" and whole.content[0].text == "t0 t1 t2"
    counts = whole.usage.input_tokens, whole.usage.cache_read_input_tokens
    assert (*counts, whole.usage.output_tokens) == (PROMPT - CACHED, CACHED, OUTPUT)
    called = await claude.messages.create(**asked, tools=MESSAGE_TOOLS, tool_choice={"type": "any"})
    use = called.content[0]
    assert use.type == "tool_use" and (use.name, use.input) == ("weather", {"city": "Bern"})
    assert called.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "18 °C"}
    turns = [*MESSAGES, {"role": "assistant", "content": called.content}]
    await claude.messages.create(
        **asked | {"messages": [*turns, {"role": "user", "content": [result]}]}
    )
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.content[0].type == "text" and final.content[0].text == "t0 t1 t2"
    assert (final.usage.output_tokens, final.stop_reason) == (OUTPUT, "end_turn")
    async with claude.messages.stream(**asked, tools=MESSAGE_TOOLS) as stream:
        final = await stream.get_final_message()
    assert final.content[0].type == "tool_use" and final.content[0].input == {"city": "Bern"}


async def test_a_provider_that_is_killed_is_replaced_and_no_key_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenAI's stub dies: the chats go to Anthropic's, in the client's dialect, with its own key.

    A field that Anthropic's API does not have goes to the one that has it, and fails there alone.
    """
    first, second = HostedStub("openai", "key-of-openai"), HostedStub("anthropic", "key-of-claude")
    async with hosted(first, second, monkeypatch=monkeypatch) as live:
        assert (await live.chat(model="chat", max_tokens=9)).text == "t0 t1 t2"
        first.cut = True
        cut = await live.chat(model="chat", max_tokens=9)
        assert b"upstream_failed" in cut.data, "after a token nobody can go on"
        await first.stop()
        for stream in (True, False):
            answer = await live.chat(stream, model="chat", max_tokens=9)
            assert (answer.status, answer.text) == (200, "t0 t1 t2")
            assert answer.headers["x-headway-upstream"] == "anthropic"
        num_sent = len(second.asked)
        for _ in range(8):  # more than the budget of retries has room for
            refused = await live.chat(False, model="anthropic", seed=3)
            assert refused.status == 400
        assert len(second.asked) == num_sent, "it is not sent"
        assert (refused.status, refused.json["error"]["param"]) == (400, "seed")
        async with live.http.post(
            "/v1/responses", json={"model": "anthropic", "input": "x"}
        ) as plain:
            assert plain.status == 400 and "serves responses" in await plain.text()
        async with live.http.post("/tokenize", json={"model": "chat", "prompt": "x"}) as plain:
            assert plain.status == 503
        stats = await (await live.http.get("/stats")).text()
        metrics = await (await live.http.get("/metrics")).text()
    assert "key-of-openai" not in str(second.sent) + str(second.asked) + stats + metrics
    assert "key-of-claude" not in str(first.sent) + str(first.asked) + stats + metrics


async def test_a_field_that_one_api_lacks_is_asked_of_the_other_at_no_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = HostedStub("anthropic", "one"), HostedStub("openai", "two")
    async with hosted(first, second, monkeypatch=monkeypatch) as live:
        answers = [await live.chat(False, model="chat", seed=3, max_tokens=9) for _ in range(12)]
    assert {answer.status for answer in answers} == {200}
    assert (len(first.asked), len(second.asked)) == (0, 12)


async def test_a_key_that_a_provider_refuses_is_no_secret_to_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = HostedStub("anthropic", "right")
    async with hosted(stub, monkeypatch=monkeypatch) as live:
        stub.key = "another"
        answer = await live.chat(False, model="chat")
    assert answer.status == 502 and answer.json["error"]["code"] == "upstream_refused"
    assert b"right" not in answer.data and b"org-secret" not in answer.data


URLS = [
    ("azure", "https://n.openai.azure.com/v1", "/v1/chat/completions", "v", "a/../b"),
    ("azure", "https://n.openai.azure.com/openai/v1", "/v1/chat/completions", "", "m"),
    ("azure", "https://n.openai.azure.com/openai", "/v1/responses", "v&x=1", "m"),
    ("bedrock", "https://b/openai/v1", "/v1/chat/completions", "", "m"),
]
EXPECTED_URLS = [
    "https://n.openai.azure.com/openai/deployments/a%2F..%2Fb/chat/completions?api-version=v",
    "https://n.openai.azure.com/openai/v1/chat/completions",
    "https://n.openai.azure.com/openai/responses?api-version=v%26x%3D1",
    "https://b/openai/v1/chat/completions",
]


def test_urls_of_providers() -> None:
    found = [upstream_url(kind, url, path, model, v) for kind, url, path, v, model in URLS]
    assert found == EXPECTED_URLS


@pytest.mark.parametrize(("version", "end"), [("v1", "?limit=2&api-version=v1"), ("", "?limit=2")])
def test_a_client_does_not_choose_the_version_of_an_api(version: str, end: str) -> None:
    base, path = "https://n.openai.azure.com/openai/v1", "/v1/responses/r"
    sent = f"{path}?api-version=preview&limit=2&API%2Dversion=x"
    assert upstream_url("azure", base, sent, "m", version) == f"{base}/responses/r{end}"


def test_parts_of_a_chat_become_blocks() -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = message_body(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
                {"role": "user", "content": "and tell"},
            ],
            **{"response_format": form, "reasoning_effort": "low", "user": "u", "n": 1},
        }
    )
    (turn,) = body["messages"]
    assert [block["type"] for block in turn["content"]] == ["text", "image", "text"]
    assert turn["content"][1]["source"]["media_type"] == "image/png"
    assert body["output_config"] == {
        "format": {"type": "json_schema", "schema": SCHEMA},
        "effort": "low",
    }
    assert (body["max_tokens"], body["metadata"]) == (4096, {"user_id": "u"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", 2), ("seed", 1), ("logprobs", True), ("logit_bias", {"1": 2})),
        *(("frequency_penalty", 0.1), ("response_format", {"type": "json_object"})),
        *(("tools", 5), ("tools", True), ("tools", [{"type": "custom"}])),
        *(("reasoning_effort", "minimal"), ("min_p", 0.1)),
    ],
)
def test_what_messages_have_no_word_for_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        message_body({"model": "m", "messages": MESSAGES, field: value})
    assert (raised.value.param or "").startswith(field)
    assert raised.value.code == "unsupported_parameter"


def test_what_a_chat_has_no_word_for_is_refused_by_name() -> None:
    plain = {"model": "m", "messages": MESSAGES, "max_tokens": 5}
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    sent = chat_body({**plain, "messages": [{"role": "user", "content": [image]}]})
    assert sent["messages"][0]["content"][0]["image_url"]["url"] == "https://x/y.png"
    for fault, name in [
        ({"top_k": 3}, "top_k"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "It"}]}, "messages"),
    ]:
        with pytest.raises(RequestError) as raised:
            chat_body({**plain, **fault})
        assert raised.value.param == name


BAD_ANSWERS = [b"[]", b"{}", b'{"type":"message","content":[1]}', b'{"choices":[]}', b"{" * 9]


@pytest.mark.parametrize("kind", [ChatAsMessages, MessagesAsChat])
@pytest.mark.parametrize("data", BAD_ANSWERS)
def test_a_hostile_answer_is_an_error_of_its_upstream(
    kind: type[ChatAsMessages | MessagesAsChat], data: bytes
) -> None:
    translate = kind("m")
    with pytest.raises(ValueError, match=r"of its dialect|in place of"), as_value_error():
        translate.whole(data)
    event = Event(b"", b'{"type":"content_block_delta","index":0,"choices":3}')
    with pytest.raises(ValueError, match="of its dialect"), as_value_error():
        translate.events([event])


def test_a_long_id_is_not_repeated_in_each_chunk() -> None:
    """8 KiB of small events would become gigabytes."""
    translate = ChatAsMessages("m")
    start = b'{"type":"message_start","message":{"id":"%s"}}' % (b"x" * 100_000)
    delta = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}'
    found = translate.events([Event(b"", start), Event(b"", delta)])
    assert len(found) == 2 and max(len(event.data) for event in found) < 1000


async def test_a_request_that_cannot_be_translated_leaves_its_upstream_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is an error of the client, and the trial of a half-open breaker is not spent on it."""
    stub = HostedStub("anthropic", "key-of-claude")
    async with hosted(stub, monkeypatch=monkeypatch) as live:
        breaker = live.state.upstreams["anthropic"].breaker
        call = {"role": "assistant", "tool_calls": 5}
        for fault in ({"tools": 5}, {"messages": [*MESSAGES, call]}):
            for _ in range(5):
                breaker.failed()
            breaker.allow_trial()
            answer = await live.chat(False, model="chat", **fault)
            assert answer.status == 400 and b"unsupported_parameter" in answer.data
            assert breaker.allows
            assert (await live.chat(False, model="chat")).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_without_usage_is_not_free(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway estimates it, whatever the translation shows to the client."""
    stub = HostedStub("openai", "key-of-openai")
    monkeypatch.setattr(stub, "_usage", dict)
    async with hosted(stub, monkeypatch=monkeypatch) as live:
        body = {"model": "chat", "messages": MESSAGES, "max_tokens": 9, "stream": stream}
        async with live.http.post("/v1/messages", json=body) as answer:
            assert answer.status == 200 and b"t0" in await answer.read()
        for kind in ("prompt", "output"):
            assert live.state.metrics.of("tokens", kind=kind) > 0
