"""Tools that do not fit: calls that do not validate, malformed tools, templates that know none."""

from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import ScriptedServer, scripted
from tool_scripts import (
    CALL,
    MESSAGES,
    MISTRAL,
    NOON,
    ROME,
    TOOLS,
    calls_of,
    gathered,
)
from tool_server import chat, client, connected, grammar, server

FIXTURES = (client, server)


# ── what does not fit ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        (ROME, 0),
        (ROME + NOON, 0),
        (CALL % ("get_weather", '{"town": "Rome"}'), 1),
        (CALL % ("get_weather", '{"city": "Rome", "days": "two"}'), 1),
        (CALL % ("get_weather", "{'city': 'Rome'}"), 1),
        (CALL % ("get_weather", '"Rome"'), 1),
        (CALL % ("get_cake", "{}"), 1),
        (CALL % ("get_cake", "{}") + CALL % ("get_weather", "{}"), 2),
        ("Fine.", 0),
    ],
)
def test_calls_that_do_not_validate_are_counted(
    server: ScriptedServer, client: openai.OpenAI, text: str, fails: int
) -> None:
    for stream in (False, True):
        server.says(text)
        before = server.counted("validation_failures", "tool_arguments")
        calls_before = server.counted("tool_calls")
        answer = chat(client, stream=stream)
        num_calls = len(gathered(answer)[2]) if stream else len(calls_of(answer.choices[0].message))
        assert server.counted("tool_calls") == calls_before + num_calls
        assert server.counted("validation_failures", "tool_arguments") == before + fails


# ── requests that are refused ───────────────────────────────────────────────────────────────


def tool(**function: Any) -> Any:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": []}, "tools", "empty_array"),
        ({"tools": [tool()] * 2}, "tools[1].function.name", "invalid_value"),
        ({"tools": [tool(name=f"f{i}") for i in range(513)]}, "tools", "array_above_max_length"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool(name="x" * 129)]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool(name=5)]}, "tools[0].function.name", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type",
         "unsupported_value"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters",
         "invalid_value"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "invalid_type"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
         "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice", "invalid_value"),
        ({"tool_choice": 5}, "tool_choice", "invalid_type"),
    ],
)  # fmt: skip
def test_malformed_tools_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_completions_take_no_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="script", prompt="a", extra_body={"tools": TOOLS})
    assert refused.value.param == "tools"


# ── another format: special tokens, short ids ───────────────────────────────────────────────


def test_marks_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]")
    with scripted(tmp_path / "mistral", MISTRAL, marks) as server, connected(server) as client:
        server.says('[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[ARGS]{}')
        message = chat(client).choices[0].message
        assert message.content is None
        assert calls_of(message) == [("get_weather", '{"city": "Rome"}'), ("get_time", "{}")]
        assert all(len(c.id) == 9 and c.id.isalnum() for c in message.tool_calls)
        server.says("Fine.", "[TOOL_CALLS]get_time[ARGS]{}", "[TOOL_CALLS]Fine.")
        foreign = message.to_dict()
        foreign["tool_calls"][0]["id"] = "call_of_another_server_1"
        answers = [
            {"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in foreign["tool_calls"]
        ]
        chat(client, messages=[*MESSAGES, foreign, *answers])
        sent = server.client.prompt
        kept = message.tool_calls[1].id
        assert sent.count(kept) == 2 and "another_server" not in sent
        chat(client, tool_choice="required")
        rules = grammar(server)
        specials = server.client.tokenizer.special(marks)
        assert rules is not None and f"<[{specials['[TOOL_CALLS]']}]>" in rules.text
        assert "[ARGS]" not in rules.text
        plain = chat(client, tools=None).choices[0].message.content
        assert plain == "Fine.", "without tools a mark is a special token like others"


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(tmp_path / "plain", template) as server, connected(server) as client:
        with pytest.raises(openai.BadRequestError, match="--chat-template") as refused:
            chat(client)
        assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
        server.says("Fine.")
        assert chat(client, tool_choice="none").choices[0].message.content == "Fine."
