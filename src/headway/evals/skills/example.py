"""One question with its answer, and the rule that keeps questions for testing apart.

It is given messages and an answer by the skills.
It promises that right is decided by the whole reply: the same text, or the same JSON value.
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
    """A chat up to its question, one right answer, and what else counts as right.

    `before` holds earlier turns, each what was said and what was answered. `pattern` is a regular
    expression for the whole reply where several answers are right; empty, the answer alone is.
    """

    prompt: str
    answer: str
    pattern: str = ""
    before: tuple[Turn, ...] = ()
    system: str = ""

    @property
    def asked(self) -> str:
        """All that the model is told: the system message, the earlier turns, the question."""
        return "\n".join((self.system, *(prompt for prompt, _ in self.before), self.prompt))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat as an OpenAI-compatible server takes it."""
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
    """What is compared: the value of JSON, of a tool call's JSON with its tags, or the text.

    '{"a": 1}' and '{ "a":1 }' are the same, "7" and "7.0" are not, "a b" and "a  b" are not.
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


def is_held_out(asked: str, always: frozenset[str] = frozenset()) -> bool:
    """A tenth of all questions, and those named, are kept for testing."""
    return asked.strip() in always or zlib.crc32(asked.encode()) % 10 == 0


def typed(rng: random.Random, prompt: str) -> str:
    """The prompt as a hurried person types it: "What is 2 + 3?" may become "what is 2 + 3"."""
    if rng.random() < 0.15:
        prompt = prompt[:1].lower() + prompt[1:]
    if rng.random() < 0.15:
        prompt = prompt.rstrip("?.!")
    return prompt


def phrased(rng: random.Random, templates: tuple[str, ...], **slots: object) -> str:
    """One of the phrasings, filled in and typed by somebody."""
    return typed(rng, rng.choice(templates).format(**slots))
