"""The three special tokens and how a conversation is written with them.

It is given roles and contents, here as Python functions and below as a chat template.
Both promise the same text: one message is "<|im_start|>user\\nHello!<|im_end|>\\n".
"""

from headway.evals.skills.structured import POSTAMBLE, PREAMBLE

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)


def quoted(text: str) -> str:
    """A text as a Jinja literal: a newline becomes \\n, a quote \\'."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


TEMPLATE = (
    "{%- set first = messages[0] %}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if first.role == 'system' %}{{- first.content + '\\n\\n' }}{%- endif %}"
    "{{- " + quoted(PREAMBLE) + " }}"
    "{%- for tool in tools %}"
    "{{- tool | tojson }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{{- " + quoted(POSTAMBLE) + " + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content"
    " + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set called = call.function or call %}"
    "{%- if not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + called.name + \'", "arguments": \' }}'
    "{%- if called.arguments is string %}{{- called.arguments }}"
    "{%- else %}{{- called.arguments | tojson }}{%- endif %}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def opened(role: str) -> str:
    """The start of a message: "<|im_start|>assistant\\n"."""
    return f"{IM_START}{role}\n"


def message(role: str, content: str) -> str:
    """One whole message."""
    return f"{opened(role)}{content}{IM_END}\n"
