"""A template that shows what it was given, and a user's message."""

from typing import Any

USER: Any = [{"role": "user", "content": "How is Rome?"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}"
    '{{ \'<tool_call>{"name": …, "arguments": …}</tool_call>\' }}{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
