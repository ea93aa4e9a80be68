"""Chat templates and scripted answers of models that call tools, and what was read of them."""

from typing import Any

MESSAGES: Any = [{"role": "user", "content": "How is Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tell the weather", "parameters": CITY},
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
ROME = CALL % ("get_weather", '{"city": "Rome"}')
NOON = CALL % ("get_time", "{}")
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '{{ \'<tool_call>{"name": …, "arguments": …}</tool_call>\' }}<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{{ '\n' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else "
    "'<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}:{{ m.content }}{% else %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name }}"
    "{{ '[CALL_ID]' + call.id + '[ARGS]' }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in message.tool_calls or []]


def gathered(chunks: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Content, reasoning, calls and finish reason of a stream, checked to be well formed."""
    content, thought, calls, reason = "", "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function"
                assert call.function.arguments == "" and call.id
                calls.append([call.function.name, ""])
            else:
                assert call.index == len(calls) - 1 and call.function.name is None
                calls[-1][1] += call.function.arguments
        assert reason is None
        reason = choice.finish_reason
    return content, thought, [(name, arguments) for name, arguments in calls], reason
