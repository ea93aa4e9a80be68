"""Tools and reasoning in the other two dialects, of a model that follows a script (scripted.py)."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from scripted import ScriptedServer, scripted
from tool_scripts import CITY, HERMES, NOON, ROME

from headway.core.errors import EngineDownError
from headway.core.request import Request, SequenceUpdate
from headway.frontend.answer import Stream

FUNCTIONS: Any = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False},
    {"type": "function", "name": "get_time", "parameters": None, "strict": False},
]
TOOLS: Any = [
    {"name": "get_weather", "input_schema": CITY},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
THOUGHT = "<think>\nWhere?\n</think>\n\n"
QUESTION: Any = [{"role": "user", "content": "How is Rome?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A model that writes Hermes calls and may think."""
    with scripted(tmp_path_factory.mktemp("scripted") / "dialects", HERMES) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def claude(server: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "script", "input": QUESTION, "tools": FUNCTIONS, **fields}
    return client.responses.create(**asked)


def message(claude: anthropic.Anthropic, **fields: Any) -> Any:
    asked = {"model": "script", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **fields}
    return claude.messages.create(**asked)


WEATHER = ("get_weather", '{"city": "Rome"}')
SAID: list[tuple[str, list[tuple[str, Any]]]] = [
    ("Fine.", [("text", "Fine.")]),
    (ROME, [("call", WEATHER)]),
    (f"{ROME}\n{NOON}", [("call", WEATHER), ("call", ("get_time", "{}"))]),
    (f"{THOUGHT}Let me see.\n{ROME}",
     [("thought", "Where?"), ("text", "Let me see."), ("call", WEATHER)]),
    (f"{THOUGHT}In Rome.", [("thought", "Where?"), ("text", "In Rome.")]),
    ("<tool_call> perhaps", [("text", "<tool_call> perhaps")]),
]  # fmt: skip


def items_of(response: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for item in response.output:
        assert item.status == "completed"
        if item.type == "function_call":
            found.append(("call", (item.name, item.arguments)))
        else:
            kind = "text" if item.type == "message" else "thought"
            found.append((kind, "".join(part.text for part in item.content)))
    return found


def blocks_of(made: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in made.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                found.append(("thought", block.thinking))
            case "tool_use":
                found.append(("call", (block.name, json.dumps(block.input))))
    return found


@pytest.mark.parametrize("pace", [1, 3, 1000])
@pytest.mark.parametrize(("text", "wanted"), SAID)
def test_responses_tell_text_thought_and_calls_apart(
    server: ScriptedServer, client: openai.OpenAI, pace: int, text: str, wanted: list[Any]
) -> None:
    server.says(text, text, pace=pace)
    whole = respond(client)
    assert items_of(whole) == wanted and whole.status == "completed"
    with client.responses.stream(model="script", input=QUESTION, tools=FUNCTIONS) as stream:
        events = list(stream)
    assert items_of(stream.get_final_response()) == wanted
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(value[1] for kind, value in wanted if kind == "call")
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "".join(value for kind, value in wanted if kind == "thought")
    reasoned = whole.usage.output_tokens_details.reasoning_tokens
    if pace < len(text):  # tokens are counted where they bring nothing but reasoning
        assert (reasoned > 0) == any(kind == "thought" for kind, _ in wanted)


@pytest.mark.parametrize("pace", [1, 3, 1000])
@pytest.mark.parametrize(("text", "wanted"), SAID)
def test_messages_tell_text_thought_and_calls_apart(
    server: ScriptedServer, claude: anthropic.Anthropic, pace: int, text: str, wanted: list[Any]
) -> None:
    server.says(text, text, pace=pace)
    whole = message(claude)
    assert blocks_of(whole) == wanted
    called = any(kind == "call" for kind, _ in wanted)
    assert whole.stop_reason == ("tool_use" if called else "end_turn")
    fields: Any = {"model": "script", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    with claude.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert blocks_of(final) == wanted and final.stop_reason == whole.stop_reason


def test_an_answer_cut_within_a_call_is_incomplete(
    server: ScriptedServer, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    server.says(ROME, ROME)
    within = len(server.client.tokenizer.encode(ROME)) - 20
    cut = respond(client, max_output_tokens=within)
    assert cut.status == "incomplete" and cut.output[-1].status == "incomplete"
    assert cut.output[-1].type == "function_call"
    made = message(claude, max_tokens=within)
    assert made.stop_reason == "max_tokens"
    assert made.content[-1].type == "tool_use" and "_malformed" in made.content[-1].input


def test_results_of_tools_go_back_to_the_model(
    server: ScriptedServer, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    server.says(THOUGHT + ROME, "Warm.", "Warm.", THOUGHT + ROME, "Warm.")
    first = respond(client)
    call = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
    assert respond(client, input=[result], previous_response_id=first.id).output_text == "Warm."
    stored = server.client.prompt
    resent = [*QUESTION, *(item.to_dict() for item in first.output), result]
    assert respond(client, input=resent, store=False).output_text == "Warm."
    assert server.client.prompt == stored
    made = message(claude)
    block = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "18 °C"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [b.to_dict() for b in made.content]},
        {"role": "user", "content": [block]},
    ]
    message(claude, messages=turns)
    assert server.client.prompt == stored
    assert "<think>Where?</think>" in stored and "18 °C" in stored and '"Rome"' in stored


def test_a_choice_is_chats_choice(
    server: ScriptedServer, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    server.says(*[ROME] * 4)
    named: Any = {"type": "function", "name": "get_weather"}
    respond(client, tool_choice=named)
    forced = server.client.asked[-1].sampling.grammar
    assert forced is not None and forced.kind == "structural"
    message(claude, tool_choice={"type": "tool", "name": "get_weather"})
    assert server.client.asked[-1].sampling.grammar == forced
    respond(client, tool_choice="required")
    either = server.client.asked[-1].sampling.grammar
    message(claude, tool_choice={"type": "any"})
    assert server.client.asked[-1].sampling.grammar == either != forced
    unknown, unnamed = {"type": "function", "name": "fly"}, {"type": "function"}
    for choice, param in ((unknown, "tool_choice"), (unnamed, "tool_choice.name")):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(client, tool_choice=choice)
        assert caught.value.param == param


def test_errors_of_tools_name_the_clients_own_fields(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    odd: Any = [FUNCTIONS[1], {**FUNCTIONS[0], "name": "no name"}]
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, tools=odd)
    assert caught.value.param == "tools[1].name"
    for tools, name in (
        ([{"name": "no name", "input_schema": {}}], "tools[0].name"),
        ([{"name": "get"}], "tools[0].input_schema"),
        ([{"name": "get", "input_schema": {"type": "string"}}], "tools[0].input_schema"),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            message(claude, tools=tools)
        assert name in str(refused.value)


# ── when the engine dies under a stream ─────────────────────────────────────────────────────


@pytest.fixture
def dying(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """The model says two tokens and is gone."""

    async def play(stream: Stream, request: Request, *_: Any) -> None:
        for token in (40, 41):
            stream.put(SequenceUpdate(request.request_id, 0, [token]))
        stream.fail(EngineDownError("The engine died.", code="engine_died"))

    server.says("")
    monkeypatch.setattr(server.client, "_play", play)
    return server


def test_a_response_that_fails_says_so_and_is_kept(
    dying: ScriptedServer, client: openai.OpenAI
) -> None:
    events: list[Any] = []
    with pytest.raises(openai.APIError, match="engine died"):
        events.extend(respond(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-2:] == ["content_part.done", "output_item.done"]
    kept = client.responses.retrieve(events[0].response.id)
    assert kept.status == "failed" and kept.error is not None
    assert "engine died" in kept.error.message and kept.output[-1].status == "incomplete"  # type: ignore


def test_a_background_response_that_fails_says_so(
    dying: ScriptedServer, client: openai.OpenAI
) -> None:
    queued = respond(client, background=True)
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(queued.id)).status == "queued":
        assert time.monotonic() < deadline
    assert found.status == "failed" and found.error is not None


def test_a_message_that_fails_says_so(dying: ScriptedServer, claude: anthropic.Anthropic) -> None:
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        events.extend(message(claude, stream=True))
    assert events[0].type == "message_start" and events[-1].type == "content_block_delta"


def test_an_answer_that_fails_whole_is_an_http_error(
    dying: ScriptedServer, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        respond(client)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_died")
    dying.says("")
    with pytest.raises(anthropic.InternalServerError) as refused:
        message(claude)
    body: Any = refused.value.body
    assert (refused.value.status_code, body["error"]["type"]) == (503, "overloaded_error")
