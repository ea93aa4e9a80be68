"""Multiple choice by log-likelihood: LAMBADA's last words, and files of the user's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.evals.tasks.task import Choice, Question, Task
from headway.evals.text import last_word, read_data, read_lambada, spread

NAME = "lambada-choices"
OTHERS = 3
OWN_MAX_TOKENS = 128
EXAMPLE = (
    '{"question": "…", "answer": "…"} or '
    '{"context": "…", "choices": ["…", "…"], "answer": 0} a line'
)


def read(data: Path, limit: int) -> Task:
    """`limit` passages of LAMBADA, evenly spread: which of four words ends them?"""
    return Task(NAME, (), spread(last_words(read_lambada(data)), limit))


def last_words(passages: Sequence[str]) -> list[Choice]:
    """The true last word of each passage, then those of the next passages that differ.

    "… the tree", "… the tree", "… a cat", "… his hat", "… my car" make of the first: tree against
    cat, hat and car. The last passages go on with the first. One of four is right by chance.
    """
    windows = [last_word(passage) for passage in passages]
    found = []
    for i, window in enumerate(windows):
        words = [window.target]
        for other in (*windows[i + 1 :], *windows[:i]):
            if len(words) > OTHERS:
                break
            if other.target.lower() not in map(str.lower, words):
                words.append(other.target)
        if len(words) > OTHERS:
            found.append(Choice(window.context, words, 0))
    return found


def read_own(path: Path, limit: int) -> Task:
    """A file of the user's own; UsageError names the line that cannot be read."""
    questions: list[Question] = []
    choices: list[Choice] = []
    for number, line in enumerate(read_data(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = choice(row) if "choices" in row else question(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(
                f"--tasks {path.name}, line {number}: {type(error).__name__} {error}.",
                f"Write {EXAMPLE}.",
            ) from error
        if isinstance(found, Choice):
            choices.append(found)
        else:
            questions.append(found)
    if not questions and not choices:
        raise UsageError(f"--tasks {path.name} has no questions.", f"Write {EXAMPLE}.")
    return Task(path.stem, spread(questions, limit), spread(choices, limit), OWN_MAX_TOKENS)


def choice(row: dict[str, Any]) -> Choice:
    """A row with choices; a space is put before those that have none behind a word."""
    context, words = str(row.get("context", row.get("question"))), list(map(str, row["choices"]))
    if not context or len(words) < 2:
        raise ValueError("a context and two choices are needed")
    answer = row["answer"]
    place = words.index(answer) if isinstance(answer, str) else range(len(words))[answer]
    glue = "" if context[-1].isspace() else " "
    return Choice(context, [w if w[:1].isspace() else glue + w for w in words], place)


def question(row: dict[str, Any]) -> Question:
    """A row with an answer, which must stand in the reply as words of its own."""
    wanted = words_of(str(row["answer"]))
    messages = row.get("messages") or [{"role": "user", "content": str(row["question"])}]
    if not wanted:
        raise ValueError("the answer is empty")
    return Question(messages, str(row["answer"]), lambda r: f" {wanted} " in f" {words_of(r)} ")


def words_of(text: str) -> str:
    """Lower case, and one space for all that is no letter or digit: "Paris, France." to "paris
    france"."""
    return " ".join("".join(c.lower() if c.isalnum() else " " for c in text).split())
