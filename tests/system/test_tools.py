"""The official client asks with tools: what the server makes of what a model writes.

The model is a script, see scripted.py; calls that a grammar forces are in test_forced_calls.py.
"""

import json
from typing import Any

import openai
import pytest
from scripted import ScriptedServer
from tool_scripts import (
    MESSAGES,
    NOON,
    ROME,
    TIME,
    TOOLS,
    WEATHER,
    calls_of,
    gathered,
)
from tool_server import chat, client, grammar, server

FIXTURES = (client, server)


# ── whole and streamed ──────────────────────────────────────────────────────────────────────

SAID = [
    ("Fine.", "Fine.", "", [], "stop"),
    (ROME, None, "", [("get_weather", '{"city": "Rome"}')], "tool_calls"),
    (f"Let me see.\n{ROME}\n{NOON}", "Let me see.", "",
     [("get_weather", '{"city": "Rome"}'), ("get_time", "{}")], "tool_calls"),
    (f"<think>\nWhere?\n</think>\n\n{ROME}", None, "Where?",
     [("get_weather", '{"city": "Rome"}')], "tool_calls"),
    ("<think>\nWhere?\n</think>\n\nIn Rome.", "In Rome.", "Where?", [], "stop"),
    ("<tool_call> perhaps", "<tool_call> perhaps", "", [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize("pace", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "thought", "calls", "reason"), SAID)
def test_a_streamed_answer_is_the_whole_one(
    server: ScriptedServer,
    client: openai.OpenAI,
    pace: int,
    text: str,
    content: str | None,
    thought: str,
    calls: list[tuple[str, str]],
    reason: str,
) -> None:
    server.says(text, text, pace=pace)
    (choice,) = chat(client).choices
    assert (choice.message.content, choice.finish_reason) == (content, reason)
    assert getattr(choice.message, "reasoning_content", "") == thought
    assert calls_of(choice.message) == calls
    if not calls:
        assert choice.message.tool_calls is None
    assert gathered(chat(client, stream=True)) == (content or "", thought, calls, reason)


def test_the_stream_is_openais_to_the_letter(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(ROME + NOON, pace=1)
    chunks = [c.choices[0].to_dict() for c in chat(client, stream=True)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": None}
    (first,) = chunks[1]["delta"]["tool_calls"]
    call_id = first.pop("id")
    assert call_id.startswith("call_")
    assert first == {
        "index": 0,
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    pieces = [c["delta"]["tool_calls"][0] for c in chunks[2:-1]]
    assert all(set(p) == {"index", "function"} for p in pieces if "id" not in p)
    assert [p["index"] for p in pieces] == sorted(p["index"] for p in pieces)
    assert sum(p["index"] == 0 for p in pieces) > 3, "arguments come as they are written"
    assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == "tool_calls"
    assert {c["finish_reason"] for c in chunks[:-1]} == {None}


def test_the_clients_own_accumulator_agrees(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(f"Well. {ROME}{NOON}")
    with client.chat.completions.stream(model="script", messages=MESSAGES, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert events.count("tool_calls.function.arguments.done") == 2
    assert message.content == "Well."
    assert calls_of(message) == [("get_weather", '{"city": "Rome"}'), ("get_time", "{}")]


def test_each_choice_is_read_for_itself(server: ScriptedServer, client: openai.OpenAI) -> None:
    texts = ["Fine.", ROME, f"<think>hm</think>{NOON}"]
    server.says(*texts, *texts)
    choices = chat(client, n=3).choices
    assert [c.finish_reason for c in choices] == ["stop", "tool_calls", "tool_calls"]
    assert [c.message.content for c in choices] == ["Fine.", None, None]
    ids = {c.message.tool_calls[0].id for c in choices[1:]}
    assert len(ids) == 2
    last: dict[int, str] = {}
    for chunk in chat(client, n=3, stream=True):
        for choice in chunk.choices:
            last[choice.index] = choice.finish_reason
    assert last == {0: "stop", 1: "tool_calls", 2: "tool_calls"}


def test_a_call_cut_off_by_length_says_length(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says(ROME, ROME)
    limit = len(server.client.tokenizer.encode(ROME)) - 12
    (choice,) = chat(client, max_tokens=limit).choices
    assert choice.finish_reason == "length"
    ((name, arguments),) = calls_of(choice.message)
    assert name == "get_weather" and '{"city": "Rome"}'.startswith(arguments)
    _, _, calls, reason = gathered(chat(client, max_tokens=limit, stream=True))
    assert (calls, reason) == ([(name, arguments)], "length")


def test_logprobs_and_ids_come_once_for_each_token(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says(ROME)
    chunks = chat(client, stream=True, extra_body={"return_token_ids": True})
    ids = [t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or []]
    assert ids == [*server.client.tokenizer.encode(ROME, add_special_tokens=False), 2]


# ── the choice ──────────────────────────────────────────────────────────────────────────────


def test_none_offers_nothing_and_reads_nothing(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says(ROME)
    message = chat(client, tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (ROME, None)
    assert "get_weather" not in server.client.prompt and grammar(server) is None


def test_auto_shows_the_tools_and_forces_nothing(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says("Fine.", "Fine.")
    for choice in ("auto", None):
        chat(client, tool_choice=choice)
        shown = {"type": "function", "function": {**WEATHER["function"]}}
        assert json.dumps(shown) in server.client.prompt
        assert grammar(server) is None


def test_a_forced_call_is_a_grammar(server: ScriptedServer, client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice, callable_, several in (
        ("required", ["get_weather", "get_time"], True),
        (named, ["get_time"], False),
    ):
        server.says(NOON)
        answer = chat(client, tool_choice=choice).choices[0]
        assert calls_of(answer.message) == [("get_time", "{}")]
        assert answer.finish_reason == "tool_calls"
        rules = grammar(server)
        assert rules is not None and rules.kind == "structural" and rules.param == "tools"
        for name in ("get_weather", "get_time"):
            assert (name in rules.text) == (name in callable_)
        assert ("{0,31}" in rules.text) == several
        assert "get_weather" in server.client.prompt, "the prompt shows all tools"


def test_strict_tools_bring_a_grammar_to_a_free_choice(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    server.says("Fine.")
    assert chat(client, tools=[strict, TIME]).choices[0].message.content == "Fine."
    rules = grammar(server)
    assert rules is not None and "TEXT" in rules.text and '"required": ["city"]' in rules.text
    assert "strict" not in server.client.prompt


def test_a_format_for_the_text_leaves_room_for_calls(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """Beside a free choice the text is JSON or a call; a forced call has no text."""
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": answer}}
    for choice, beside in (("auto", True), ("required", False)):
        server.says(ROME)
        message = chat(client, tool_choice=choice, response_format=wanted).choices[0].message
        assert calls_of(message) == [("get_weather", '{"city": "Rome"}')]
        rules = grammar(server)
        assert rules is not None and rules.kind == "structural"
        assert ("calls | answer" in rules.text) == beside
    server.says('{"a": 1}')
    chat(client, tool_choice="none", response_format=wanted)
    rules = grammar(server)
    assert rules is not None and rules.kind == "json"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"structured_outputs": {"regex": "a+"}})
    assert refused.value.code == "unsupported_value"


def test_allowed_tools_narrow_the_choice(server: ScriptedServer, client: openai.OpenAI) -> None:
    for mode in ("auto", "required"):
        allowed = [{"type": "function", "function": {"name": "get_time"}}]
        server.says(NOON)
        chat(
            client,
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": allowed},
            },
        )
        rules = grammar(server)
        assert (rules is None) == (mode == "auto")
        assert rules is None or "get_weather" not in rules.text


def test_without_parallel_calls_the_first_ends_the_answer(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    for stream in (False, True):
        server.says(f"Well.\n{ROME}\n{NOON} and so on and on and on")
        cut_before = server.client.num_cut
        answer = chat(client, parallel_tool_calls=False, stream=stream)
        if stream:
            content, _, calls, reason = gathered(answer)
        else:
            message = answer.choices[0].message
            content, calls = message.content, calls_of(message)
            reason = answer.choices[0].finish_reason
        assert (content, reason) == ("Well.", "tool_calls")
        assert calls == [("get_weather", '{"city": "Rome"}')]
        assert server.client.num_cut == cut_before + 1, "the engine is told to stop"


# ── tools' answers, and reasoning, as messages ──────────────────────────────────────────────


def test_a_conversation_with_a_tool_goes_on(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(f"<think>hm</think>Let me see. {ROME}", "It rains in Rome.")
    first = chat(client).choices[0].message
    (call,) = first.tool_calls
    history = [
        *MESSAGES,
        first.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain"}'},
    ]
    assert chat(client, messages=history).choices[0].message.content == "It rains in Rome."
    prompt = server.client.prompt
    assert f"<think>hm</think>Let me see.{ROME}<|im_end|>" in prompt
    assert '<|im_start|>tool get_weather\n{"sky": "rain"}<|im_end|>' in prompt


def test_calls_in_messages_may_be_malformed(server: ScriptedServer, client: openai.OpenAI) -> None:
    """What the model wrote wrong is shown to it as it stands; what a client sends wrong is not."""
    function = {"name": "get_time", "arguments": "{oops"}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": function}]}]  # fmt: skip
    server.says("Well.")
    chat(client, messages=history)
    assert '"arguments": "{oops"' in server.client.prompt


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id", "missing_required_parameter"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id", "invalid_type"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls", "invalid_type"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0]", "invalid_type"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls[0].function",
         "invalid_type"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]},
         "tool_calls[0].type", "unsupported_value"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
         "tool_calls[0].id", "missing_required_parameter"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
         "tool_calls[0].function.arguments", "missing_required_parameter"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {
            "name": "f", "arguments": {}}}]}, "tool_calls[0].function.arguments", "invalid_type"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_by_name(
    client: openai.OpenAI, message: Any, param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, messages=[*MESSAGES, message])
    assert (refused.value.param, refused.value.code) == (f"messages[1].{param}", code)


# ── reasoning ───────────────────────────────────────────────────────────────────────────────


def test_reasoning_that_the_template_opened(server: ScriptedServer, client: openai.OpenAI) -> None:
    texts = {True: "2 + 3, so\n</think>\n\nFive.", False: "Five."}
    for thinks, text in texts.items():
        for stream in (False, True):
            server.says(text)
            options = {"chat_template_kwargs": {"enable_thinking": thinks}}
            answer = chat(client, tools=None, stream=stream, extra_body=options)
            if stream:
                content, thought, _, _ = gathered(answer)
            else:
                message = answer.choices[0].message
                content = message.content
                thought = getattr(message, "reasoning_content", "")
            assert (content, thought) == ("Five.", "2 + 3, so" if thinks else "")


def test_reasoning_tokens_and_time_to_publish_are_told(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    thought = "<think>" + "hm " * 60 + "</think>"
    server.says(thought + "Five.", thought + ROME)
    published = server.telemetry.registry.histograms["time_to_publish_seconds"]
    before = sum(published.counts)
    answer = chat(client, extra_body={"timings": True})
    num_thoughts = answer.usage.completion_tokens_details.reasoning_tokens
    whole = len(server.client.tokenizer.encode(thought))
    assert abs(num_thoughts - whole) <= len(server.client.tokenizer.encode("</think>")) + 2
    assert answer.timings["ttft_s"] < answer.timings["publish_s"] < answer.timings["e2e_s"]
    called = chat(client, extra_body={"timings": True})
    assert called.timings["publish_s"] is None, "a call alone shows the user nothing"
    assert sum(published.counts) == before + 1
