"""Other dialects become chats and come back: items and blocks, and their events."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.core.request import SequenceUpdate
from headway.edge.anthropic_blocks import add_messages
from headway.edge.chat_builder import ChatBuilder
from headway.frontend.answer import SequenceDelta
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    ContentPart,
    Part,
    Reasoning,
)
from headway.server.anthropic.dialect import parse_input
from headway.server.anthropic.messages import build_chat
from headway.server.anthropic.schema import CountBody
from headway.server.responses.items import add_items, with_ids
from headway.server.responses.output import Output
from headway.server.responses.tools import (
    DeclaredTool,
    chat_tool_choice,
    custom_arguments,
    custom_input,
    offer_tools,
)

TEXT = {"type": "text", "text": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"a": 1}'}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get", "arguments": '{"a": 1}'},
}


# ── items of Responses ──────────────────────────────────────────────────────────────────────


def chat_of(items: Any) -> ChatBuilder:
    chat = ChatBuilder()
    add_items(chat, with_ids(items, "stem"))
    return chat


def test_text_is_a_message_of_the_user() -> None:
    assert chat_of("hi").messages == [{"role": "user", "content": [TEXT]}]


def test_the_items_of_an_assistant_in_one_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "18"},
        {"type": "function_call_output", "call_id": "c2", "output": [{**TEXT, "text": "19"}]},
        CALL,
    ]
    assert chat_of(items).messages == [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "reasoning_content": "t",
            "content": [TEXT],
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
        {"role": "tool", "tool_call_id": "c2", "content": [{**TEXT, "text": "19"}]},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
    ]


def test_instructions_keep_their_roles() -> None:
    """Which of them a template takes is decided where it is rendered, for every dialect."""
    chat = ChatBuilder()
    chat.add_message({"role": "system", "content": "be"}, "instructions")
    roles = [{"role": role, "content": "hi"} for role in ("developer", "system", "user", "system")]
    add_items(chat, with_ids(roles, "stem"))
    assert [m["role"] for m in chat.messages] == ["system", "developer", "system", "user", "system"]
    assert chat.names["messages[1]"] == "input[0]"


WRONG_ITEMS: list[tuple[Any, str, str]] = [
    ([], "empty_array", "input"),
    ([{}], "missing_required_parameter", "input[0].type"),
    ([{"type": "web_search_call"}], "unsupported_value", "input[0].type"),
    ([{"type": ["message"]}], "unsupported_value", "input[0].type"),
    ([{"role": "wizard", "content": "x"}], "invalid_value", "input[0].role"),
    ([{"role": "user"}], "missing_required_parameter", "input[0].content"),
    ([{"role": "user", "content": "x", "id": 5}], "invalid_type", "input[0].id"),
    ([{**CALL, "arguments": {}}], "invalid_type", "input[0].arguments"),
    ([{**CALL, "call_id": None}], "missing_required_parameter", "input[0].call_id"),
    ([{"type": "function_call_output", "call_id": "c"}], "missing_required_parameter", "output"),
    ([{"type": "reasoning", "content": "x"}], "invalid_type", "input[0].content"),
    ([{"type": "item_reference", "id": "msg_x_0"}], "item_not_found", "input[0].id"),
    ([{"type": "item_reference"}], "missing_required_parameter", "input[0].id"),
]


@pytest.mark.parametrize(("items", "code", "param"), WRONG_ITEMS, ids=str)
def test_a_wrong_item_is_refused_by_name(items: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_of(items)
    assert caught.value.code == code
    assert caught.value.param is not None and caught.value.param.endswith(param)


def test_an_error_names_what_the_client_sent() -> None:
    chat = chat_of([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    chat.set("max_completion_tokens", 5, "max_output_tokens")
    chat.names["messages"] = "input"
    for param, text, wanted in (
        ("messages[1].content[0]", "messages[1].content[0] is odd.", "input[1].content[0]"),
        ("messages", "messages is too long; lower max_tokens.", "input"),
        ("max_completion_tokens", "max_completion_tokens is 0.", "max_output_tokens"),
        ("seed", "seed is odd.", "seed"),
    ):
        with pytest.raises(RequestError) as caught, chat.client_names():
            raise RequestError(text, param=param)
        assert caught.value.param == wanted
        assert wanted in str(caught.value) and "max_tokens" not in str(caught.value)


def test_functions_are_offered_under_their_names_in_the_chat() -> None:
    function = {"name": "get", "parameters": {"type": "object"}, "strict": True}
    inner = {"type": "function", **function, "defer_loading": True}
    tools = [inner, {"type": "namespace", "name": "crm", "tools": [inner]}]
    chat = ChatBuilder()
    found = offer_tools(chat, tools, "required", False)
    assert found == {
        "get": DeclaredTool(name="get"),
        "crm__get": DeclaredTool(name="get", namespace="crm"),
    }
    named = {**function, "name": "crm__get", "description": ""}
    assert chat.fields == {
        "tools": [
            {"type": "function", "function": function},
            {"type": "function", "function": named},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    assert chat.names["tools[1].function"] == "tools[1].tools[0]"
    alone = ChatBuilder()
    assert offer_tools(alone, [], "auto", True) == {} and alone.fields == {}


@pytest.mark.parametrize("arguments", ['{"input": "a\\n"}', "{", "[1]", '{"other": 1}', "nothing"])
def test_a_custom_tools_input_is_read_from_its_arguments(arguments: str) -> None:
    """Arguments without one are shown as the model wrote them."""
    assert custom_input(arguments) == ("a\n" if "input" in arguments else arguments)
    assert custom_input(custom_arguments(arguments)) == arguments


def test_a_choice_lies_one_level_deeper_in_chat() -> None:
    assert chat_tool_choice("auto", {}) == "auto"
    assert chat_tool_choice({"type": "function", "name": "get"}, {}) == {
        "type": "function",
        "function": {"name": "get"},
    }
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "a"}],
    }
    assert chat_tool_choice(allowed, {})["allowed_tools"]["tools"][0]["function"] == {"name": "a"}
    with pytest.raises(RequestError):
        chat_tool_choice({"type": "web_search"}, {})


# ── blocks of Messages ──────────────────────────────────────────────────────────────────────


def said(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat = ChatBuilder()
    add_messages(chat, messages)
    return chat.messages


def test_blocks_become_messages_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                TEXT,
                {"type": "tool_use", "id": "c1", "name": "get", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                TEXT,
                {"type": "tool_result", "tool_use_id": "c1", "content": "18", "is_error": True},
            ],
        },
    ]
    call = copy.deepcopy(CHAT_CALL)
    call["function"]["arguments"] = '{"a":1}'  # type: ignore[index]
    assert said(messages) == [
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "reasoning_content": "t", "content": [TEXT], "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{**TEXT, "text": "Error:"}, {**TEXT, "text": "18"}],
        },
        {"role": "user", "content": [TEXT]},
    ]


WRONG_BLOCKS: list[tuple[Any, str, str]] = [
    ([{"content": "x"}], "missing_required_parameter", "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "invalid_value", "messages[0].role"),
    ([{"role": "user"}], "missing_required_parameter", "messages[0].content"),
    ([{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "invalid_type", "messages[0].content[0]"),
    ([{"role": "user", "content": [{}]}], "missing_required_parameter", "content[0].type"),
    ([{"role": "user", "content": [{"type": "image"}]}], "unsupported_value", "content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "missing_required_parameter", "[0].text"),
    (
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}],
        "invalid_type",
        "content[0].input",
    ),
    (
        [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}],
        "missing_required_parameter",
        "content[0].tool_use_id",
    ),
]


@pytest.mark.parametrize(("messages", "code", "param"), WRONG_BLOCKS, ids=str)
def test_a_wrong_block_is_refused_by_name(messages: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        said(messages)
    assert caught.value.code == code
    assert caught.value.param is not None and caught.value.param.endswith(param)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_great_many_messages_of_one_turn_take_no_longer_each(role: str) -> None:
    """Copying what came before for each of them would take minutes."""
    chat, count = ChatBuilder(), 200_000
    blocks = [TEXT] if role == "user" else [TEXT, {"type": "thinking", "thinking": "hm" * 10}]
    add_messages(chat, [{"role": role, "content": blocks}] * count)
    (turn,) = chat.messages
    assert len(turn["content"]) == count
    assert len(turn.get("reasoning_content", "")) == (0 if role == "user" else 20 * count)


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [TEXT, TEXT]}]
    chat = build_chat(CountBody(model="m", messages=begun))
    assert chat.messages[-1]["content"] == "hi\nhi"
    assert chat.fields["continue_final_message"] is True
    call = {"type": "tool_use", "id": "c", "name": "get", "input": {}}
    with pytest.raises(RequestError):
        build_chat(CountBody(model="m", messages=[{"role": "assistant", "content": [call]}]))


def test_thinking_tools_and_output_become_fields_of_chat() -> None:
    raw = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "get", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "get", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
    }
    chat = build_chat(msgspec.convert(raw, CountBody))
    assert chat.fields == {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "get"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"a": 1}, "strict": True},
        },
        "chat_template_kwargs": {"enable_thinking": True},
    }


def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    assert parse_input('{"a": 1}') == {"a": 1}
    assert parse_input("") == {}
    assert parse_input("[1]") == {"_malformed": "[1]"}
    assert parse_input('{"a": ') == {"_malformed": '{"a": '}


# ── output: the events add up to the items ──────────────────────────────────────────────────

PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=4)
STRETCHES = st.lists(st.tuples(st.sampled_from(["text", "thought", "call"]), PIECES), max_size=5)


def parts_of(stretches: list[tuple[str, list[str]]]) -> list[Part]:
    parts: list[Part] = []
    calls = 0
    for kind, pieces in stretches:
        if kind == "call":
            parts += [CallBegins(calls, "get", f"c{calls}")]
            parts += [CallArguments(calls, text) for text in pieces]
            parts += [CallEnds(calls)]
            calls += 1
        else:
            parts += [ContentPart(t) if kind == "text" else Reasoning(t) for t in pieces]
    return parts


def delta_of(parts: list[Part]) -> SequenceDelta:
    delta = SequenceDelta(SequenceUpdate(1, 0, [5]), "")
    delta.parts = parts
    return delta


def events(data: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(e.split(b"data: ", 1)[1]) for e in data.split(b"\n\n") if e]


def parts_in(item: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = item.get("content", [])
    return parts


def replayed(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events tell of."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            texts[-1] += event["delta"]
        elif kind.endswith("text.done"):
            assert event["text"] == texts[-1]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == texts[-1]
        elif kind == "output_item.done":
            items[-1] = item = event["item"]
            assert texts[-1] == item.get("arguments", "".join(p["text"] for p in parts_in(item)))
    return items


@given(STRETCHES, st.data())
def test_any_split_gives_the_same_items_and_its_events_add_up(
    stretches: list[tuple[str, list[str]]], data: st.DataObject
) -> None:
    parts = parts_of(stretches)
    whole = Output("s", {}, None)
    whole.append_delta(delta_of(parts))
    whole.close("completed")
    split = Output("s", {}, None)
    at = 0
    while at < len(parts):
        step = data.draw(st.integers(1, len(parts) - at))
        split.append_delta(delta_of(parts[at : at + step]))
        at += step
    split.close("completed")
    assert split.items == whole.items
    told = events(split.drain_events())
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert msgspec.json.encode(replayed(told)) == msgspec.json.encode(split.items)
    assert all(item["status"] == "completed" for item in split.items)


def test_an_answer_without_anything_is_an_empty_message() -> None:
    output = Output("s", {}, None)
    output.close("completed")
    assert [item["type"] for item in output.items] == ["message"]
    assert output.items[0]["content"][0]["text"] == ""
