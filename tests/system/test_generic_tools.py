"""Tools on a model whose template has none: refused with the way out, or in the generic format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from scripted import ScriptedServer, scripted
from tool_scripts import CITY, MESSAGES, NOON, ROME, calls_of, gathered
from tool_server import chat, connected

PLAIN = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted") / "generic"
    with scripted(folder, PLAIN, parser="generic") as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with connected(server) as opened:
        yield opened


def test_without_it_tools_are_refused_and_the_refusal_names_it(tmp_path: Path) -> None:
    with scripted(tmp_path / "plain", PLAIN) as running, connected(running) as opened:
        for choice in ("auto", "required"):
            with pytest.raises(
                openai.BadRequestError, match="--tool-call-parser generic"
            ) as caught:
                chat(opened, tool_choice=choice)
            assert caught.value.param == "tools"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_described_and_calls_are_read(
    server: ScriptedServer, client: openai.OpenAI, stream: bool
) -> None:
    server.says(f"Let me see.\n{ROME}")
    answer = chat(client, stream=stream)
    if stream:
        content, _, calls, reason = gathered(answer)
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        content, calls = message.content, calls_of(message)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert calls == [("get_weather", '{"city": "Rome"}')]
    prompt = server.client.prompt
    assert prompt.startswith("[system]You may call tools.") and '"Tell the weather"' in prompt
    assert "<tool_call>" in prompt and prompt.endswith("[user]How is Rome?[assistant]")


def test_required_is_a_grammar_and_none_shows_nothing(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says(ROME, "Fine.")
    chat(client, tool_choice="required")
    forced = server.client.asked[-1].sampling.grammar
    assert forced is not None and forced.kind == "structural" and "<tool_call>" in forced.text
    chat(client, tool_choice="none")
    assert server.client.prompt == "[user]How is Rome?[assistant]"


def test_a_conversation_with_results_goes_on(server: ScriptedServer, client: openai.OpenAI) -> None:
    """The system message stays first, calls are text, results and what follows are one turn."""
    server.says(f"{ROME}\n{NOON}", "Warm.")
    start: Any = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    called = chat(client, messages=start).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(called.tool_calls, ("18 °C", "noon"), strict=True)
    ]
    more = [*start, called, *results, {"role": "user", "content": "And?"}]
    assert chat(client, messages=more).choices[0].message.content == "Warm."
    prompt = server.client.prompt
    assert prompt.startswith("[system]Be brief.\n\nYou may call tools.")
    assert prompt.count("[system]") == 1 and prompt.count("[user]") == 2
    assert f"[assistant]{ROME}\n{NOON}[user]<tool_response>\n18 °C\n" in prompt
    assert prompt.endswith("noon\n</tool_response>\nAnd?[assistant]")


def test_the_other_dialects_have_it_too(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.says(ROME, ROME)
    function: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
    response = client.responses.create(model="script", input="How is Rome?", tools=[function])
    assert response.output[0].type == "function_call"
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        tools: Any = [{"name": "get_weather", "input_schema": CITY}]
        message = claude.messages.create(
            model="script", messages=MESSAGES, tools=tools, max_tokens=99
        )
    assert message.stop_reason == "tool_use"
