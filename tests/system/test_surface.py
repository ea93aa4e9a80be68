"""Every field of every endpoint that generates, through the official clients: rows of surface.py.

Then the shapes of streams and errors.
"""

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import surface
import surface_proofs as prove
from live_server import LiveServer
from surface import ALL, ROWS, Row
from surface_clients import (
    ADAPTERS,
    CHAT,
    ENDPOINTS,
    LENGTH,
    MESSAGES,
    RESPONSES,
    TEXT,
    USER,
    Ask,
    Clients,
    call,
)
from surface_proofs import TOOLS, YES
from surface_server import INPUT, asks, clients, told

from headway.server.app import GENERATIONS

WAYS = {False: "whole", True: "streamed"}


def list_cases(is_idle: bool) -> list[tuple[Row, str, bool]]:
    """Each field where it is taken, whole and streamed; `is_idle`: those that change no answer."""
    return [
        (row, path, streamed)
        for row in [*ROWS, *surface.no_ops()]
        for path in row.where
        for streamed in WAYS
        if not (streamed and row.whole) and is_idle == changes_nothing(row)
    ]


def changes_nothing(row: Row) -> bool:
    """Whether the plain request is answered alike with the field, whatever else stands in it."""
    fields = row.proof.fields if isinstance(row.proof, prove.Same) else {}
    return bool(fields) and not fields.keys() & {"temperature", "tools"}


def name_of(value: object) -> str:
    """Of a case's part."""
    return WAYS[value] if isinstance(value, bool) else getattr(value, "name", str(value))


FIXTURES = (asks, clients, told)


# ── fields ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("row", "path", "streamed"), list_cases(is_idle=False), ids=name_of)
def test_field(asks: dict[tuple[str, bool], Ask], row: Row, path: str, streamed: bool) -> None:
    row.proof(asks[path, streamed])


@pytest.mark.parametrize("streamed", [False, True], ids=name_of)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_that_change_nothing(
    asks: dict[tuple[str, bool], Ask], path: str, streamed: bool
) -> None:
    """All of an endpoint in one request; where that fails each alone, and every fault is told."""
    ask = asks[path, streamed]
    rows = [row for row, *where in list_cases(is_idle=True) if where == [path, streamed]]
    assert len(rows) > 10
    together = {name: value for row in rows for name, value in row.proof.fields.items()}
    if fault := fault_of(prove.Same(**together), ask):
        faults = {row.name: told for row in rows if (told := fault_of(row.proof, ask))}
        pytest.fail(f"{faults or fault}")


def fault_of(proof: Callable[[Ask], None], ask: Ask) -> str:
    """What a proof that does not hold says; "" of one that holds."""
    try:
        proof(ask)
    except (AssertionError, openai.APIError, anthropic.APIError) as error:
        return str(error) or repr(error)
    return ""


def test_whole_and_streamed_say_the_same(asks: dict[tuple[str, bool], Ask]) -> None:
    for path in ENDPOINTS:
        whole, streamed = asks[path, False](), asks[path, True]()
        assert whole.texts == streamed.texts
        assert whole.finish == streamed.finish == ["length"]
        assert (whole.num_prompt, whole.num_answer) == (streamed.num_prompt, streamed.num_answer)
        assert whole.num_answer == LENGTH


def test_three_dialects_say_the_same(asks: dict[tuple[str, bool], Ask]) -> None:
    texts = [asks[path, False]().texts for path in (CHAT, RESPONSES, MESSAGES)]
    assert texts[0] == texts[1] == texts[2]


def test_every_field_has_a_row() -> None:
    shown = {(path, row.name) for row in [*ROWS, *surface.no_ops()] for path in row.where}
    assert tuple(row.path for row in GENERATIONS) == ALL
    for row in GENERATIONS:
        fields = {*row.body_spec.body.__struct_fields__, *row.body_spec.no_ops}
        assert {(row.path, name) for name in fields} <= shown, "add rows to tests/system/surface.py"
        named = {name for path, name in shown if path == row.path}
        assert named <= fields, "no such fields"


def test_every_field_that_is_not_honoured_yet_is_refused_by_name(told: LiveServer) -> None:
    for row in GENERATIONS:
        base = ADAPTERS[row.path][2]
        for name in row.body_spec.refused:
            status, content = told.post(row.path, {**base, name: {"a": 1}})
            assert status == 400 and f"The field {name} " in content["error"]["message"]
            assert content["error"].get("param", name) == name
            assert told.post(row.path, {**base, name: None})[0] == 200


def test_a_constraint_is_honoured_or_refused_everywhere(told: LiveServer) -> None:
    """Never dropped: whatever other servers call it, and whatever stands beside it."""
    gbnf = 'root ::= "yes" | "no"'
    constraints = {
        "response_format": {"type": "json_object", "schema": YES},
        "structured_outputs": {"choice": ["yes", "no"]},
        **dict.fromkeys(("guided_json", "json_schema", "format"), YES),
        **dict.fromkeys(("guided_regex", "regex"), "yes|no"),
        **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), gbnf),
        "guided_choice": ["yes", "no"],
        "guided_decoding": {"choice": ["yes", "no"]},
        "text": {"format": {"type": "json_object", "schema": YES}},
        "output_format": {"type": "json_schema", "schema": YES},
        "output_config": {"format": {"type": "json_schema", "schema": YES}},
        "options": {"grammar": gbnf},
    }
    honoured = dict.fromkeys(ENDPOINTS, 0)
    for path in ENDPOINTS:
        for name, value in constraints.items():
            status, content = told.post(path, {**ADAPTERS[path][2], name: value})
            if status == 400:
                assert f"The field {name} is not supported here" in content["error"]["message"]
                continue
            assert said_in(path, content).strip('"') in ("yes", "no"), (path, name, content)
            honoured[path] += 1
    assert honoured == {CHAT: 11, TEXT: 11, RESPONSES: 2, MESSAGES: 3}


def said_in(path: str, content: Any) -> str:
    """The text of a whole answer."""
    if path == CHAT:
        text = content["choices"][0]["message"]["content"]
    elif path == TEXT:
        text = content["choices"][0]["text"]
    else:
        items = content["output"][0]["content"] if path == RESPONSES else content["content"]
        text = items[0]["text"]
    assert isinstance(text, str)
    return text


def test_the_page_is_what_the_rows_say() -> None:
    page = surface.PAGE.read_text(encoding="utf-8")
    assert page == surface.page(), "run `make surface`"


# ── the shapes of streams and errors ────────────────────────────────────────────────────────


def test_events_of_a_response_come_in_order(clients: Clients) -> None:
    kinds = [e.type.removeprefix("response.") for e in clients.ask(RESPONSES, True)().chunks]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        *("output_text.done", "content_part.done", "output_item.done"),
        "incomplete",
    ]


def test_events_of_a_message_come_in_order(clients: Clients) -> None:
    kinds = [e.type for e in clients.ask(MESSAGES, True)().chunks]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_events_have_their_names_and_no_ids(told: LiveServer) -> None:
    async with aiohttp.ClientSession(told.url) as http:
        for path in (RESPONSES, MESSAGES):
            body = {**ADAPTERS[path][2], "stream": True}
            async with http.post(path, json=body) as answer:
                assert answer.content_type == "text/event-stream"
                text = (await answer.read()).decode()
            for event in text.strip().split("\n\n"):
                name, data = event.split("\n")
                assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_stop_reasons_of_a_message(clients: Clients) -> None:
    def reason(**extra: Any) -> Any:
        fields = {"model": "tiny", "messages": USER, "max_tokens": 8, **extra}
        return call(clients.anthropic.messages.create, {"temperature": 0, **fields})

    assert reason().stop_reason == "max_tokens"
    assert reason(logit_bias={"2": 100}).stop_reason == "end_turn"
    met = reason(max_tokens=40, stop_sequences=["never there", " "])
    assert (met.stop_reason, met.stop_sequence) == ("stop_sequence", " ")
    cut = reason(max_tokens=10_000, ignore_eos=True)
    assert cut.stop_reason == "model_context_window_exceeded"


def test_a_message_goes_on_with_the_assistants_beginning(clients: Clients) -> None:
    begun: Any = [*USER, {"role": "assistant", "content": "It is"}]
    plain = clients.anthropic.messages.count_tokens(model="tiny", messages=USER)
    counted = clients.anthropic.messages.count_tokens(model="tiny", messages=begun)
    said = clients.openai.chat.completions.create(
        model="tiny",
        messages=begun,
        max_tokens=1,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert plain.input_tokens < counted.input_tokens == said.usage.prompt_tokens  # type: ignore


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": "another"}, anthropic.NotFoundError, "does not exist"),
    ({"messages": []}, anthropic.BadRequestError, "messages is empty"),
    ({"messages": [{"role": "user"}]}, anthropic.BadRequestError, "messages[0].content"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens is 0"),
    ({"top_k": "many"}, anthropic.BadRequestError, "top_k: expected an integer"),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences must hold"),
    ({"system": [{"type": "image"}]}, anthropic.BadRequestError, "system[0].type"),
    (
        {"messages": [{"role": "user", "content": "word " * 600}]},
        anthropic.BadRequestError,
        "prompt is too long",
    ),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
    ({"container": "a"}, anthropic.BadRequestError, "The field container"),
]


@pytest.mark.parametrize(("fields", "kind", "text"), WRONG, ids=str)
def test_errors_of_messages_are_the_clients_own(
    clients: Clients, fields: dict[str, Any], kind: type[anthropic.APIStatusError], text: str
) -> None:
    asked = {"model": "tiny", "messages": USER, "max_tokens": 4, **fields}
    with pytest.raises(kind) as caught:
        call(clients.anthropic.messages.create, asked)
    body: Any = caught.value.body
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and text in body["error"]["message"]
    assert caught.value.request_id == body["request_id"]


WRONG_INPUT: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "empty_array", "input"),
    ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "unsupported_value",
        "[0]",
    ),
    ({"input": "word " * 600}, "context_length_exceeded", "input"),
    ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
    ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"temperature": 3}, "decimal_above_max_value", "temperature"),
    ({"truncation": "auto"}, "unsupported_value", "truncation"),
    ({"include": ["everything"]}, "invalid_value", "include[0]"),
    ({"metadata": {"a" * 65: "b"}}, "string_above_max_length", "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "object_above_max_properties", "metadata"),
    ({"background": True, "stream": True}, "unsupported_value", "background"),
    ({"background": True, "store": False}, "invalid_value", "background"),
    ({"previous_response_id": "resp_x"}, "previous_response_not_found", "previous_response_id"),
    ({"tool_choice": {"type": "web_search"}}, "unsupported_value", "tool_choice"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"text": {"format": {"type": "yaml"}}}, "", "text.format"),
    ({"conversation": "c"}, "unsupported_parameter", "conversation"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG_INPUT, ids=str)
def test_errors_of_responses_name_the_field(
    clients: Clients, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        call(clients.openai.responses.create, {**INPUT, **fields})
    assert code in (caught.value.code or "")
    assert caught.value.param is not None and param in caught.value.param


ROME = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_forced_call_is_made_in_every_dialect(clients: Clients) -> None:
    """Random weights and a grammar: what is called is what was asked for."""
    asked = {"model": "tiny", "messages": USER, "max_tokens": 150, "temperature": 0}
    function = {"name": "get_weather", "parameters": ROME}
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    chat: Any = call(
        clients.openai.chat.completions.create,
        {**asked, "tools": [{"type": "function", "function": function}], "tool_choice": chosen},
    )
    response: Any = clients.openai.responses.create(
        model="tiny",
        input=USER,
        temperature=0,
        tools=[{"type": "function", "strict": True, **function}],
        tool_choice={"type": "function", "name": "get_weather"},
    )
    tools = [{"name": "get_weather", "input_schema": ROME}]
    choice = {"type": "tool", "name": "get_weather"}
    message: Any = call(
        clients.anthropic.messages.create, {**asked, "tools": tools, "tool_choice": choice}
    )
    assert message.stop_reason == "tool_use" and message.content[-1].input == {"city": "Rome"}
    assert json.loads(response.output[-1].arguments) == {"city": "Rome"}
    (made,) = chat.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Rome"}


def test_completions_take_no_tools(told: LiveServer) -> None:
    status, content = told.post(TEXT, {**ADAPTERS[TEXT][2], "tools": TOOLS[CHAT]})
    assert (status, content["error"]["param"]) == (400, "tools")
