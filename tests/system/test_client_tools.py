"""Tools that the client runs, in the dialects that know more than functions; all else is refused.

The model follows a script (scripted.py), and the official clients declare, force and answer.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from scripted import ScriptedServer, scripted
from tool_scripts import CALL, CITY, HERMES

from headway.core.grammar import Grammar
from headway.edge.anthropic_tools import CLIENT_TOOLS

PATCH = '*** Begin Patch\n*** Add File: a "b".txt\n+é 😀\n*** End Patch'
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
APPLY: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
CRM: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers of ours.",
    "tools": [WEATHER, {**APPLY, "name": "note"}],
}
FORECAST = CALL % ("crm__get_weather", '{"city": "Rome"}')
EDIT = CALL % ("apply_patch", json.dumps({"input": PATCH}))
NOTE = CALL % ("crm__note", '{"input": "call back"}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted(tmp_path_factory.mktemp("scripted") / "tools", HERMES) as running:
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
    asked = {"model": "script", "input": "Do it.", **fields}
    return client.responses.create(**asked)


def grammar(server: ScriptedServer) -> Grammar | None:
    return server.client.asked[-1].sampling.grammar


CALLS: list[tuple[str, dict[str, Any]]] = [
    (FORECAST, {"type": "function_call", "namespace": "crm", "name": "get_weather",
                "arguments": '{"city": "Rome"}'}),
    (EDIT, {"type": "custom_tool_call", "namespace": None, "name": "apply_patch", "input": PATCH}),
    (NOTE, {"type": "custom_tool_call", "namespace": "crm", "name": "note", "input": "call back"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), CALLS)
def test_a_call_comes_back_as_the_tool_that_was_declared(
    server: ScriptedServer, client: openai.OpenAI, text: str, wanted: dict[str, Any]
) -> None:
    server.says(text, text)
    response = respond(client, tools=[APPLY, CRM])
    (item,) = response.output
    assert {name: getattr(item, name) for name in wanted} == wanted
    assert [tool.type for tool in response.tools] == ["custom", "namespace"]
    with client.responses.stream(model="script", input="Do it.", tools=[APPLY, CRM]) as stream:
        events = list(stream)
    (streamed,) = stream.get_final_response().output
    assert {name: getattr(streamed, name) for name in wanted} == wanted
    kind = "custom_tool_call_input" if "input" in wanted else "function_call_arguments"
    deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
    assert "".join(deltas) == wanted.get("input", wanted.get("arguments"))
    prompt = server.client.prompt
    assert all(name in prompt for name in ("apply_patch", "crm__get_weather", "crm__note"))
    assert "Customers of ours." in prompt and "Edit files." in prompt


def test_a_conversation_with_these_tools_goes_on(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """By the items that the client sends back, and by the id of the stored response."""
    server.says(f"{EDIT}\n{FORECAST}", "Done.", "Done.")
    tools = [APPLY, CRM]
    first = respond(client, tools=tools)
    results: Any = [
        {
            "type": "custom_tool_call_output",
            "call_id": first.output[0].call_id,
            "output": "patched",
        },
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "18 °C"},
    ]
    sent = [item.model_dump(exclude_none=True) for item in first.output]
    prompts = []
    for more in (
        {"input": [{"role": "user", "content": "Do it."}, *sent, *results]},
        {"input": results, "previous_response_id": first.id},
    ):
        assert respond(client, tools=tools, **more).output_text == "Done."
        prompts.append(server.client.prompt)
    assert prompts[0] == prompts[1]
    for part in ("crm__get_weather", json.dumps(PATCH)[1:20], "patched", "18 °C"):
        assert part in prompts[0]


def test_these_tools_can_be_chosen(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(EDIT, NOTE, FORECAST, EDIT)
    tools = [APPLY, CRM]
    choices: list[tuple[Any, list[str]]] = [
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "custom", "name": "note", "namespace": "crm"}, ["crm__note"]),
        ({"type": "function", "name": "crm__get_weather"}, ["crm__get_weather"]),
    ]
    for choice, names in choices:
        respond(client, tools=tools, tool_choice=choice)
        text = grammar(server)
        assert text is not None
        found = [n for n in ("apply_patch", "crm__note", "crm__get_weather") if n in text.text]
        assert found == names
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [choices[0][0]]}
    respond(client, tools=tools, tool_choice=allowed)
    assert "crm__note" not in grammar(server).text  # type: ignore[union-attr]


def test_a_format_is_kept_to_or_told_and_named(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|[0-9]+"}
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    server.says("Fine.", "Fine.")
    respond(client, tools=[{**APPLY, "format": regex}])
    held = grammar(server)
    assert held is not None and "^(?:[a-z]+|[0-9]+)$" in held.text
    raw = client.responses.with_raw_response.create(
        model="script", input="Do it.", tools=[{**APPLY, "format": lark}]
    )
    assert raw.headers["x-headway-ignored-fields"] == "tools[0].format"
    assert "*** Begin Patch" in server.client.prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    *[
        ({"tools": [WEATHER, {"type": kind}]}, "tools[1].type")
        for kind in ("web_search", "local_shell", "shell", "mcp", "apply_patch", "file_search",
                     "code_interpreter", "image_generation", "computer_use_preview", "tool_search")
    ],
    ({"tools": [{**CRM, "tools": [{"type": "mcp", "name": "x"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{**CRM, "tools": "none"}]}, "tools[0].tools"),
    ({"tools": [{**CRM, "tools": [{**WEATHER, "name": "no name"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [{**APPLY, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [CRM, {**WEATHER, "name": "crm__get_weather"}]}, "tools[1].name"),
    ({"tools": [APPLY], "tool_choice": {"type": "function", "name": "apply_patch"}}, "tool_choice"),
    ({"tools": [APPLY], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ({"tools": [APPLY], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "custom", "name": "apply_patch"}, {"type": "mcp", "server_label": "x"}]}},
     "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_the_client_cannot_run_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **fields)
    assert caught.value.param == param


# ── Messages ────────────────────────────────────────────────────────────────────────────────

INPUTS: dict[str, list[dict[str, Any]]] = {
    "bash_20250124": [{"command": "ls"}, {"restart": True}],
    "text_editor_20250728": [
        {"command": "view", "path": "/a", "view_range": [1, -1]},
        {"command": "create", "path": "/a", "file_text": "b"},
        {"command": "str_replace", "path": "/a", "old_str": "b", "new_str": ""},
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "b"},
    ],
    "memory_20250818": [
        {"command": "view", "path": "/memories"},
        {"command": "delete", "path": "/memories/a"},
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    ],
}


def message(claude: anthropic.Anthropic, **fields: Any) -> Any:
    asked = {"model": "script", "messages": [{"role": "user", "content": "Do it."}], **fields}
    return claude.messages.create(**{"max_tokens": 200, **asked})


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_anthropics_client_run_tools_have_their_inputs(
    server: ScriptedServer, claude: anthropic.Anthropic, kind: str
) -> None:
    name, _, inputs = CLIENT_TOOLS[kind]
    for given in INPUTS[kind]:
        jsonschema.validate(given, {"anyOf": inputs})
        server.says(CALL % (name, json.dumps(given)))
        made = message(claude, tools=[{"type": kind, "name": name}])
        assert (made.content[0].name, made.content[0].input) == (name, given)
    assert name in server.client.prompt
    server.says("x")
    message(claude, tools=[{"type": kind, "name": name}], tool_choice={"type": "any"})
    assert f'"{name}' in grammar(server).text  # type: ignore[union-attr]
    wrong = {"command": "format"} if kind != "bash_20250124" else {"restart": False}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, {"anyOf": inputs})


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"type": "code_execution_20250825", "name": "code_execution"}, "tools[0].type"),
        ({"type": "computer_20250124", "name": "computer"}, "tools[0].type"),
        ({"type": "bash_20250124", "name": "shell"}, "tools[0].name"),
        ({"type": "memory_20250818"}, "tools[0].name"),
    ],
)
def test_tools_that_only_anthropic_runs_are_refused_by_name(
    claude: anthropic.Anthropic, tool: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools") as caught:
        message(claude, tools=[tool])
    assert named in str(caught.value)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.count_tokens(
            model="script",
            messages=[{"role": "user", "content": "x"}],
            tools=[tool],  # type: ignore[list-item]
        )
