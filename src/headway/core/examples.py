"""Examples in a chat, and the same chat with the first few of them alone.

Examples are pairs of question and answer before the last question, or blocks of one shape in a text
of a system message or of the last question:

    Text: I love it.        two labels, twice, with text behind the last of them
    Mood: good
                            a blank line between
    Text: It broke.
    Mood: bad

    Text: Fine, I guess.    no example: nothing stands behind its last label
    Mood:

A conversation has pairs as well: whoever asks has to see whether they come before other questions.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Messages = Sequence[dict[str, Any]]

PARAGRAPH = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")
LABEL = re.compile(r"^[ \t]*([^\W\d][\w ]{0,24}):(?=\s|\Z)", re.MULTILINE)
MOST_CHARACTERS = 1 << 15
"""Longer texts are not looked through for blocks."""
INSTRUCTS = ("system", "developer")


class Examples(NamedTuple):
    """The text of each, the text of all else that may differ, and the messages with `first(k)`."""

    texts: list[str]
    question: str
    first: Callable[[int], list[dict[str, Any]]]


def examples_of(messages: Messages) -> Examples | None:
    """The examples of a chat; None where it has none that are seen here."""
    return pairs_of(messages) or blocks_of(messages)


def pairs_of(messages: Messages) -> Examples | None:
    """Pairs of question and answer, nothing else between them and the last question.

    >>> found = pairs_of([{"role": "user", "content": "1 + 1?"}, {"role": "assistant",
    ...     "content": "2"}, {"role": "user", "content": "2 + 2?"}])
    >>> found.texts, found.question, found.first(0)
    (['1 + 1?\\n2'], '2 + 2?', [{'role': 'user', 'content': '2 + 2?'}])
    """
    head = next((i for i, m in enumerate(messages) if m.get("role") not in INSTRUCTS), 0)
    rest = list(messages[head:])
    said = [text for m in rest if isinstance(text := m.get("content"), str)]
    roles = [m.get("role") for m in rest]
    if len(rest) < 3 or len(said) < len(rest):
        return None
    if roles != ["user", "assistant"] * (len(rest) // 2) + ["user"]:
        return None
    texts = [f"{asked}\n{answer}" for asked, answer in zip(said[:-1:2], said[1::2], strict=True)]
    return Examples(texts, said[-1], lambda k: [*messages[:head], *rest[:-1][: 2 * k], rest[-1]])


def blocks_of(messages: Messages) -> Examples | None:
    """Blocks of one shape in a system message, or in the last message."""
    asked = messages[-1].get("content") if messages else None
    for i, message in enumerate(messages):
        text = message.get("content")
        if i < len(messages) - 1 and message.get("role") not in INSTRUCTS:
            continue
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            continue
        places = blocks_in(text)
        if not places:
            continue
        texts = [text[begin:end].strip() for begin, end in places]
        own = i == len(messages) - 1
        question = without(text, places, 0) if own else asked if isinstance(asked, str) else ""

        def first(
            k: int, i: int = i, text: str = text, places: list[tuple[int, int]] = places
        ) -> list[dict[str, Any]]:
            changed = {**messages[i], "content": without(text, places, k)}
            return [*messages[:i], changed, *messages[i + 1 :]]

        return Examples(texts, question, first)
    return None


def blocks_in(text: str) -> list[tuple[int, int]]:
    """(begin, end) of the blocks of the longest run of one shape; none of fewer than two."""
    best: list[tuple[int, int]] = []
    run: list[tuple[int, int]] = []
    shape: list[str] = []
    for match in PARAGRAPH.finditer(text):
        labels = LABEL.findall(match[0])
        whole = len(labels) > 1 and not match[0].rstrip().endswith(":")
        run = ([*run, match.span()] if labels == shape else [match.span()]) if whole else []
        shape = labels
        if len(run) > len(best):
            best = run
    return best if len(best) > 1 else []


def without(text: str, places: list[tuple[int, int]], k: int) -> str:
    """The text with the first `k` of its blocks alone, and the blanks behind the others gone."""
    if k >= len(places):
        return text
    rest = text[places[-1][1] :]
    return text[: places[k][0]] + rest.lstrip("\n")
