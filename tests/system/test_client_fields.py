"""What clients of other servers send and read: reasoning by two names, forced calls, offsets.

The fields one by one are the rows of surface.py; here is what a row cannot show.
"""

from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
from client_fields import TEMPLATE, USER
from live_server import LiveServer
from scripted import ScriptedServer, scripted
from surface_clients import ADAPTERS, ENDPOINTS

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
HEAD = '<tool_call>\n{"name": "get_weather", "arguments": '
CALL = HEAD + '{"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model that thinks and calls, and whose template shows reasoning by both names."""
    with scripted(tmp_path_factory.mktemp("fields") / "thinks", TEMPLATE) as running:
        yield running


@pytest.fixture
def ask(script: ScriptedServer) -> Iterator[Any]:
    """Asks the script for a chat, whole or streamed: the message's fields put together."""
    with openai.OpenAI(base_url=script.url + "/v1", api_key="none", max_retries=0) as opened:

        def chat(says: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
            script.says(says)
            create = opened.chat.completions.create
            extra = fields.pop("extra_body", {})
            answer = create(
                model="script", messages=USER, stream=stream, extra_body=extra, **fields
            )
            deltas = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
            told: dict[str, Any] = {"calls": sum(len(d.tool_calls or []) for d in deltas)}
            for name in ("content", "reasoning", "reasoning_content"):
                told[name] = "".join(getattr(d, name, None) or "" for d in deltas)
            return told

        yield chat


# ── reasoning ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_both_names(ask: Any, stream: bool) -> None:
    said = ask("<think>\nSunny?\n</think>\n\nIt is.", stream=stream)
    assert said["content"] == "It is."
    assert said["reasoning"] == said["reasoning_content"] == "Sunny?"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(ask: Any, stream: bool) -> None:
    thought = "<think>\nSunny?\n</think>\n\nIt is."
    said = ask(thought, stream=stream, extra_body={"include_reasoning": False})
    assert said == {"calls": 0, "content": "It is.", "reasoning": "", "reasoning_content": ""}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_reaches_the_template(script: ScriptedServer, name: str) -> None:
    script.says("Fine.")
    turn = {"role": "assistant", "content": "Sunny.", name: "The sky is blue."}
    body = {"model": "script", "messages": [*USER, turn, *USER]}
    with openai.OpenAI(base_url=script.url + "/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(**body)  # type: ignore[call-overload]
        assert "<think>The sky is blue.</think>[The sky is blue.]Sunny." in script.client.prompt
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="script",
                messages=[*USER, {**turn, name: ["no text"]}],  # type: ignore[list-item]
            )
    assert refused.value.param == f"messages[1].{name}"


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize(
    "wanted",
    [{"response_format": {"type": "json_object"}}, {"regex": "a+"}, {"guided_choice": ["a"]}],
)
def test_a_constraint_holds_for_what_follows_the_reasoning(
    script: ScriptedServer, ask: Any, wanted: dict[str, Any]
) -> None:
    """The template opens the reasoning: a constraint from the first token would end up in it."""
    said = ask("Sunny?\n</think>\n\naa", stream=False, extra_body={**wanted, **THINKS})
    assert (said["content"], said["reasoning"]) == ("aa", "Sunny?")
    grammar = script.client.asked[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "structural" and "</think>" in grammar.text
    assert grammar.param == next(iter(wanted))
    ask("aa", stream=False, extra_body=wanted)
    grammar = script.client.asked[-1].sampling.grammar
    assert grammar is not None and grammar.kind != "structural"


def test_a_grammar_after_reasoning_is_refused_by_name(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask("", stream=False, extra_body={"grammar": 'root ::= "a"', **THINKS})
    assert refused.value.param == "grammar" and refused.value.code == "unsupported_value"


# ── tools ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_cut_in_its_head_is_no_content(
    script: ScriptedServer, ask: Any, choice: Any, stream: bool
) -> None:
    tokens = len(script.client.tokenizer.encode(HEAD))
    thought = "<think>\nSunny?\n</think>\n\n"
    before = len(script.client.tokenizer.encode(thought))
    for limit in range(1, tokens):
        forced = {"tools": TOOLS, "tool_choice": choice, "stream": stream}
        assert ask(CALL, **forced, max_tokens=limit)["content"] == ""
        said = ask(thought + CALL, **forced, max_tokens=before + limit)
        assert (said["content"], said["reasoning"]) == ("", "Sunny?")
    whole = ask(CALL, **forced)
    assert whole["calls"] and whole["content"] == ""
    free = ask(CALL, tools=TOOLS, stream=stream, max_tokens=tokens // 2)
    assert free["content"].startswith("<tool_call>"), "nothing was forced: it may be text"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", {"regex": "a"}),
        ("guided_choice", ["a"]),
        ("grammar", 'root ::= "a"'),
        ("format", "json"),
    ],
)
def test_a_forced_call_and_a_constraint_exclude_each_other(
    script: ScriptedServer, choice: Any, name: str, value: Any
) -> None:
    with (
        openai.OpenAI(base_url=script.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.create(
            model="script",
            messages=USER,
            tools=TOOLS,
            tool_choice=choice,
            extra_body={name: value},
        )
    assert refused.value.param == name and "exclude each other" in refused.value.message


def test_no_tool_may_be_chosen_where_there_is_none(ask: Any) -> None:
    assert ask("Fine.", stream=False, tool_choice="none")["content"] == "Fine."


# ── errors and defaults ─────────────────────────────────────────────────────────────────────


def test_the_model_may_be_left_out(server: LiveServer) -> None:
    for path in ENDPOINTS:
        body = {name: value for name, value in ADAPTERS[path][2].items() if name != "model"}
        status, content = server.post(path, body)
        assert (status, content["model"]) == (200, "tiny"), content
    status, content = server.post("/v1/messages/count_tokens", {"messages": USER})
    assert status == 200 and content["input_tokens"] > 0


@pytest.mark.parametrize("bias", [{"word": 1}, {"5": 101}, {"5": "much"}, {"100000": 1}])
def test_errors_of_logit_bias_name_the_key(server: LiveServer, bias: dict[str, Any]) -> None:
    for path in ENDPOINTS:
        status, content = server.post(path, {**ADAPTERS[path][2], "logit_bias": bias})
        message = content["error"]["message"]
        assert status == 400 and "logit_bias" in message and next(iter(bias)) in message


def test_an_unknown_key_of_stream_options_is_refused(server: LiveServer) -> None:
    for path in ENDPOINTS[:3]:
        options = {"include_obfuscation": False, "include_everything": True}
        body = {**ADAPTERS[path][2], "stream": True, "stream_options": options}
        status, content = server.post(path, body)
        assert status == 400
        assert content["error"]["param"] == "stream_options.include_everything"


async def test_a_web_page_may_read_what_was_ignored(start_server: Any) -> None:
    live = start_server("--executor=null", "--allowed-origins=http://page.example").wait_ready()
    async with aiohttp.ClientSession(live.url) as http:
        body = {"prompt": [5], "max_tokens": 1, "keep_alive": 5}
        origin = {"origin": "http://page.example"}
        async with http.post("/v1/completions", json=body, headers=origin) as answer:
            assert answer.status == 200
            assert answer.headers["x-headway-ignored-fields"] == "keep_alive"
            exposed = answer.headers["access-control-expose-headers"].lower()
    assert {"x-headway-ignored-fields", "x-request-id", "retry-after"} <= set(exposed.split(", "))


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "schema": CITY, "json_schema": None},
        {"type": "json_schema", "schema": None, "json_schema": {"name": "city", "schema": CITY}},
        {"type": "json_object", "schema": CITY, "json_schema": None},
    ],
    ids=["schema", "json_schema", "json_object"],
)
def test_null_beside_a_schema_is_not_there(
    script: ScriptedServer, ask: Any, response_format: dict[str, Any]
) -> None:
    """Clients that serialize all fields send both places of a schema, one of them null."""
    ask('{"city": "Rome"}', stream=False, response_format=response_format)
    grammar = script.client.asked[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json" and "city" in grammar.text
    place = "json_schema.schema" if response_format.get("json_schema") else "schema"
    assert grammar.param == f"response_format.{place}"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_top_logprobs_is_no_demand(server: LiveServer, path: str) -> None:
    """0 asks for nothing where the field is unknown, and elsewhere for none beside the chosen."""
    body = ADAPTERS[path][2]
    more = {"logprobs": True} if path == "/v1/chat/completions" else {}
    status, content = server.post(path, {**body, **more, "top_logprobs": 0})
    assert status == 200, content
    if more:
        entries = content["choices"][0]["logprobs"]["content"]
        assert entries and all(entry["top_logprobs"] == [] for entry in entries)
    if path not in ("/v1/chat/completions", "/v1/responses"):
        status, content = server.post(path, {**body, "top_logprobs": 2})
        assert status == 400 and "top_logprobs" in content["error"]["message"]


async def test_a_budget_of_thinking_is_named_as_ignored(server: LiveServer) -> None:
    """Clients have to send it, and the template alone decides how long is thought."""
    body = {"model": "tiny", "messages": USER, "max_tokens": 2}
    async with aiohttp.ClientSession(server.url) as http:
        for thinking, named in (
            ({"type": "enabled", "budget_tokens": 2048}, "thinking.budget_tokens"),
            ({"type": "adaptive", "display": "omitted"}, "thinking.display"),
            ({"type": "enabled", "budget_tokens": None}, None),
            ({"type": "disabled"}, None),
            (None, None),
        ):
            async with http.post("/v1/messages", json={**body, "thinking": thinking}) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers.get("x-headway-ignored-fields") == named


# ── text_offset ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("prompt", [[1, 40, 41, 2, 50, 1], "<|im_start|>Once<|im_end|> é ü"])
def test_offsets_are_those_of_the_text_that_is_shown(
    client: openai.OpenAI, prompt: Any, hides: bool
) -> None:
    """Special tokens take room where they show, and only there; half characters take none."""
    answer: Any = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=6,
        echo=True,
        logprobs=0,
        temperature=0,
        logit_bias={"1": 3.2},
        extra_body={"skip_special_tokens": hides},
    )
    (choice,) = answer.choices
    text, tokens, at = choice.text, choice.logprobs.tokens, choice.logprobs.text_offset
    assert len(at) == len(tokens) and at == sorted(at) and at[0] == 0
    for token, begin, end in zip(tokens, at, [*at[1:], len(text)], strict=True):
        special = token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        if "\ufffd" not in token and not (special and hides and isinstance(prompt, list)):
            assert text[begin:end] in (token, ""), (token, begin, end, text)
        if text[begin:end] == "" and "\ufffd" not in token:
            assert special and hides
    assert choice.text.startswith(prompt if isinstance(prompt, str) else "")
