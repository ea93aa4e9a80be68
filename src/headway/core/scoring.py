"""What an evaluation asks of a model: answers to chats, and the log-probabilities of texts.

A folder's engine and any OpenAI-compatible URL are both a `Model`; `evals` knows no more.
It promises natural logarithms, and answers and scores in the order of what was asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One text scored: for "a b c" of three tokens, three entries, the first of them None.

    `token_ids` is empty where a server does not tell ids. `logprobs` are natural logarithms; the
    first is None, for nothing comes before it. `top` holds per position the best alternatives by
    id, or by text where ids are not told; its dictionaries are empty when none were asked for.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[dict[str | int, float]]


class Model(Protocol):
    """Whatever answers chats and scores texts: a folder's engine, or a server behind a URL."""

    name: str

    def generate(
        self, chats: Sequence[list[dict[str, str]]], *, max_tokens: int
    ) -> Sequence[str | None]:
        """The greedy answers to these chats, in their order; None where one exceeds the context."""
        ...

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        """The log-probability of every token of these texts, in their order."""
        ...


class WholeModel(Model, Protocol):
    """A folder: every probability is at hand."""

    def encode(self, text: str) -> list[int]: ...

    def distributions(self, token_ids: list[int]) -> "np.ndarray":
        """float32 [T, V]: the log-probabilities of the token after each of the T positions."""
        ...


STOP = "\nUser:"
"""Where the answer to a `transcript` ends."""


def transcript(messages: Sequence[dict[str, str]]) -> str:
    """A chat for a model without a chat template, to be continued up to STOP.

    "User: Hi\nAssistant: Hello!\nUser: 2 + 3?\nAssistant:"
    """
    names = {"user": "User: ", "assistant": "Assistant: "}
    turns = [names.get(message["role"], "") + message["content"] for message in messages]
    return "\n".join([*turns, "Assistant:"])
