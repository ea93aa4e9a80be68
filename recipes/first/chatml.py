"""The three special tokens and how a conversation is written with them.

It is given roles and contents, here as a Python function and below as a chat template.
Both promise the same text: one message is "<|im_start|>user\\nHello!<|im_end|>\\n".
"""

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def opened(role: str) -> str:
    """The start of a message: "<|im_start|>assistant\\n"."""
    return f"{IM_START}{role}\n"


def message(role: str, content: str) -> str:
    """One whole message."""
    return f"{opened(role)}{content}{IM_END}\n"
