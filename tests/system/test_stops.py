"""Where an answer ends and what it says of it: stop strings, `min_tokens`, calls that are cut."""

from typing import Any

import anthropic
import openai
import pytest
from scripted import ScriptedServer
from tool_scripts import CITY, MESSAGES, ROME, calls_of
from tool_server import chat, client, server

FIXTURES = (client, server)
COUNTED = "one two three one two three"


def after(server: ScriptedServer, text: str) -> int:
    """The tokens of `text` at the beginning of an answer."""
    return len(server.client.tokenizer.encode(text, add_special_tokens=False))


def ends(chunks: Any) -> tuple[str, str, Any]:
    """The text of a stream, and the reasons in its last choice."""
    text, last = "", None
    for chunk in chunks:
        for last in chunk.choices:
            text += (last.text if hasattr(last, "text") else last.delta.content) or ""
    assert last is not None
    return text, last.finish_reason, last.stop_reason


@pytest.mark.parametrize("pace", [1, 4, 1000])
def test_no_stop_string_ends_an_answer_before_its_min_tokens(
    server: ScriptedServer, client: openai.OpenAI, pace: int
) -> None:
    """The first "two" is of the tokens that there must be, the second is not."""
    least = after(server, "one two")
    for more, text in (({}, "one "), ({"min_tokens": least}, "one two three one ")):
        asked: Any = {"tools": None, "stop": ["two"], "extra_body": more}
        server.says(COUNTED, COUNTED, pace=pace)
        (choice,) = chat(client, **asked).choices
        assert (choice.message.content, choice.stop_reason) == (text, "two")
        assert ends(chat(client, stream=True, **asked)) == (text, "stop", "two")


def test_a_stop_string_that_ends_behind_the_min_tokens_counts(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """It may begin among them: then none of it is shown."""
    asked: Any = {"tools": None, "stop": ["two three"], "stream": True}
    server.says(COUNTED)
    least = {"min_tokens": after(server, "one two")}
    assert ends(chat(client, extra_body=least, **asked)) == ("one ", "stop", "two three")


def test_the_other_dialects_keep_to_min_tokens_too(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    least = {"min_tokens": after(server, "one two")}
    server.says(COUNTED, COUNTED)
    response = client.responses.create(
        model="script", input="Count.", extra_body={"stop": ["two"], **least}
    )
    assert response.output_text == "one two three one "
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model="script",
            messages=MESSAGES,
            max_tokens=99,
            stop_sequences=["two"],
            extra_body=least,
        )
    assert (message.content[0].text, message.stop_sequence) == ("one two three one ", "two")  # type: ignore[union-attr]


def test_the_one_call_that_is_wanted_waits_for_min_tokens(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.says(f"{ROME}\n{ROME} and more")
    least = after(server, ROME) + 5
    answer = chat(client, parallel_tool_calls=False, extra_body={"min_tokens": least})
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and len(calls_of(choice.message)) == 1
    assert answer.usage.completion_tokens == least + 1


CUTS = [
    ("Rome", "stop", "Rome"),
    ('"city', "stop", '"city'),
    ("</tool_call>", "tool_calls", "</tool_call>"),
]
"""A stop string, and the reasons for the end where it stands in a call, or behind its arguments."""


@pytest.mark.parametrize("pace", [1, 1000])
@pytest.mark.parametrize(("stop", "finish", "reason"), CUTS)
def test_a_call_that_a_stop_string_cuts_is_none_to_run(
    server: ScriptedServer, client: openai.OpenAI, pace: int, stop: str, finish: str, reason: str
) -> None:
    server.says(ROME, ROME, pace=pace)
    (choice,) = chat(client, stop=[stop]).choices
    assert (choice.finish_reason, choice.stop_reason) == (finish, reason)
    assert ends(chat(client, stop=[stop], stream=True))[1:] == (finish, reason)


def test_messages_name_the_stop_sequence_that_cut_a_call(server: ScriptedServer) -> None:
    server.says(ROME)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model="script",
            messages=MESSAGES,
            tools=[{"name": "get_weather", "input_schema": CITY}],
            max_tokens=99,
            stop_sequences=["Rome"],
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Rome")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"stop": ["three"]}, ("stop", "three")),
        ({"max_tokens": 2}, ("length", None)),
        ({}, ("stop", None)),
    ],
)
def test_a_stream_says_what_a_whole_answer_says_of_its_end(
    server: ScriptedServer, client: openai.OpenAI, more: Any, wanted: tuple[str, str | None]
) -> None:
    server.says(COUNTED, COUNTED)
    text: Any = {"model": "script", "prompt": "Count", "max_tokens": 99, **more}
    for asked in (
        client.completions.create(stream=True, **text),
        chat(client, tools=None, stream=True, **more),
    ):
        assert ends(asked)[1:] == wanted
