"""Tools for a model whose template has none: described in the system message, called as in Hermes.

`with_tools` does the work of a template: it writes the tools and the rules into the system message,
earlier calls in the format of the model, and results as messages of the user. Example:

    user "How is Rome?"            system "… get_weather …"
    assistant get_weather(Rome)    user "How is Rome?"
    tool "18 °C"                   assistant '<tool_call>\n{"name": "get_weather", …}\n</tool_call>'
                                   user "<tool_response>\n18 °C\n</tool_response>"
"""

import json
from typing import Any

from headway.frontend.text.tools.hermes import CLOSE, OPEN

RULES = (
    "You may call tools. Each line is a function as JSON, with a schema of its arguments:\n%s\n\n"
    "To call one, write its name and its arguments as JSON between these tags, and nothing after:\n"
    f'{OPEN}\n{{"name": "the name", "arguments": {{"an argument": "its value"}}}}\n{CLOSE}\n'
    "The result comes in <tool_response> tags. Where no tool is needed, answer in plain text."
)
INSTRUCTIONS = ("system", "developer")


def with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls and results as text and `tools` described in the first."""
    rendered = [plain(message) for message in messages]
    if tools:
        rules = RULES % "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
        if rendered[0]["role"] in INSTRUCTIONS:
            rendered[0] = {**rendered[0], "content": f"{rendered[0]['content']}\n\n{rules}"}
        else:
            rendered.insert(0, {"role": "system", "content": rules})
    return joined_results(rendered)


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return one message as plain text."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content, "is_result": True}
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    lines = [message["content"], *(format_call(call["function"]) for call in calls)]
    return {**rest, "content": "\n".join(line for line in lines if line)}


def format_call(function: dict[str, Any]) -> str:
    """Return a call in the format of the model."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def joined_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive results and the user's text after them into one message of the user.

    Many templates require alternating turns.
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.get("is_result") and message["role"] == "user":
            last["content"] += f"\n{message['content']}"
        else:
            joined.append(dict(message))
    for message in joined:
        message.pop("is_result", None)
    return joined
