"""One question with its answer, and the rule that separates test questions from training.

A reply is right as a whole: the same text, or the same JSON value.
"""

import json
import random
import re
import zlib
from dataclasses import dataclass

TOOL_OPEN, TOOL_CLOSE = "<tool_call>\n", "\n</tool_call>"

Turn = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A chat up to its question, with one right answer.

    `before` holds earlier turns as (user, assistant). `pattern` is a regular expression for the
    whole reply if several answers are right; if it is empty, only `answer` is.
    """

    prompt: str
    answer: str
    pattern: str = ""
    before: tuple[Turn, ...] = ()
    system: str = ""

    @property
    def full_prompt(self) -> str:
        """The system message, the user's earlier turns and the question, one per line."""
        return "\n".join((self.system, *(prompt for prompt, _ in self.before), self.prompt))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat in OpenAI's format."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": content}
            for turn in self.before
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*first, *turns, {"role": "user", "content": self.prompt}]

    def accepts(self, reply: str) -> bool:
        """Whether the whole reply is a right answer."""
        if self.pattern:
            return re.fullmatch(self.pattern, reply.strip(), re.DOTALL) is not None
        return normal(reply) == normal(self.answer)


def normal(reply: str) -> object:
    """Return what is compared: the value of JSON or of a tool call's JSON, else the text.

    '{"a": 1}' and '{ "a":1 }' are equal, "7" and "7.0" are not, "a b" and "a  b" are not.
    """
    text = reply.strip()
    called = text.startswith(TOOL_OPEN) and text.endswith(TOOL_CLOSE)
    inner = text[len(TOOL_OPEN) : -len(TOOL_CLOSE)] if called else text
    if not inner.startswith("{"):
        return text
    try:
        return called, json.loads(inner)
    except (ValueError, RecursionError):
        return text


def is_held_out(prompt: str, always: frozenset[str] = frozenset()) -> bool:
    """Whether a prompt is for testing: a tenth of all prompts by their hash, and those in
    `always`."""
    return prompt.strip() in always or zlib.crc32(prompt.encode()) % 10 == 0


def typed(rng: random.Random, prompt: str) -> str:
    """Return the prompt as if typed in a hurry: "What is 2 + 3?" may become "what is 2 + 3"."""
    if rng.random() < 0.15:
        prompt = prompt[:1].lower() + prompt[1:]
    if rng.random() < 0.15:
        prompt = prompt.rstrip("?.!")
    return prompt


def phrased(rng: random.Random, templates: tuple[str, ...], **slots: object) -> str:
    """Fill in a random template and apply `typed` to it."""
    return typed(rng, rng.choice(templates).format(**slots))
