"""The embedded model calls tools by itself, through both official clients.

Held-out questions of the skill `tool`, their tools given as a client gives them; nothing forces a
call, so what comes back is what the model wrote and the parser read.
"""

import itertools
import json

import anthropic
import openai
import pytest

from conftest import StartServer
from headway.cli.common import model_folder
from headway.evals.skills.example import TOOL_CLOSE, TOOL_OPEN, Example
from headway.evals.skills.suite import examples

MODEL = "headway-tiny"
COUNT, ENOUGH = 6, 5


def offered(example: Example) -> list[dict[str, object]]:
    """The tools that the example's system message lists."""
    lines = example.system.splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"type"')]


def wanted(example: Example) -> tuple[str, object]:
    """The right call: its name and arguments."""
    called = json.loads(example.answer.removeprefix(TOOL_OPEN).removesuffix(TOOL_CLOSE))
    return called["name"], called["arguments"]


@pytest.fixture(scope="module")
def questions() -> list[Example]:
    return [
        example
        for level in (1, 2)
        for example in itertools.islice(examples("tool", level, seed=1), COUNT)
    ]


def test_headway_tiny_calls_tools(start_server: StartServer, questions: list[Example]) -> None:
    """Five of six at least, by each client, at one tool and at two or three to choose from."""
    live = start_server(folder=model_folder(None)).wait_ready()
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as chat,
        anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as messages,
    ):
        by_chat = [asked_openai(chat, example) for example in questions]
        by_messages = [asked_anthropic(messages, example) for example in questions]
    right = [wanted(example) for example in questions]
    for told in (by_chat, by_messages):
        for begin in (0, COUNT):
            level = slice(begin, begin + COUNT)
            hits = sum(a == b for a, b in zip(told[level], right[level], strict=True))
            assert hits >= ENOUGH, list(zip(told[level], right[level], strict=True))


def asked_openai(client: openai.OpenAI, example: Example) -> tuple[str, object] | None:
    """The one call of a streamed chat, put together as the client's users do."""
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": example.prompt}],
        tools=offered(example),  # type: ignore[arg-type]
        temperature=0,
        stream=True,
    ):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                assert call.index == 0 and call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return (name, json.loads(arguments)) if reason == "tool_calls" else None


def asked_anthropic(client: anthropic.Anthropic, example: Example) -> tuple[str, object] | None:
    """The one call of a message."""
    functions = [tool["function"] for tool in offered(example)]
    message = client.messages.create(
        model=MODEL,
        max_tokens=200,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": example.prompt}],
        tools=[  # type: ignore[arg-type]
            {
                "name": function["name"],  # type: ignore[index]
                "description": function["description"],  # type: ignore[index]
                "input_schema": function["parameters"],  # type: ignore[index]
            }
            for function in functions
        ],
    )
    calls = [block for block in message.content if block.type == "tool_use"]
    if message.stop_reason != "tool_use" or len(calls) != 1:
        return None
    return calls[0].name, calls[0].input
