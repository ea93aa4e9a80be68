"""Interface of a model for evaluations: answers to chats, and log-probabilities of texts.

A folder's engine and any OpenAI-compatible URL are both a `ScoringModel`; `evals` knows no more.
Logarithms are natural; answers and scores are in the order of the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Scores of one text: for three tokens three entries, the first of them None.

    `token_ids` is empty if a server does not return ids. `logprobs` are natural logarithms; the
    first is None, because nothing comes before it. `top` has per position the best alternatives by
    id, or by text without ids; its dictionaries are empty if none were requested.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[dict[str | int, float]]


class ScoringModel(Protocol):
    """Model that answers chats and scores texts: a folder's engine, or a server behind a URL."""

    name: str

    def generate(
        self, chats: Sequence[list[dict[str, str]]], *, max_tokens: int
    ) -> Sequence[str | None]:
        """Return the greedy answers to chats, in order; None if one exceeds the context."""
        ...

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        """Return the log-probability of every token of these texts, in order."""
        ...


class WholeModel(ScoringModel, Protocol):
    """Model in a folder: all probabilities are available."""

    def encode(self, text: str) -> list[int]: ...

    def distributions(self, token_ids: list[int]) -> "np.ndarray":
        """Return float32 [T, V]: log-probabilities of the token after each of the T positions."""
        ...


STOP = "\nUser:"
"""End of the answer to a `transcript`."""


def transcript(messages: Sequence[dict[str, str]]) -> str:
    """Format a chat for a model without a chat template, to be continued up to STOP.

    "User: Hi\nAssistant: Hello!\nUser: 2 + 3?\nAssistant:"
    """
    names = {"user": "User: ", "assistant": "Assistant: "}
    turns = [names.get(message["role"], "") + message["content"] for message in messages]
    return "\n".join([*turns, "Assistant:"])
