"""Multiple choice by log-likelihood: LAMBADA's last words, and files of the user's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.evals.tasks.task import EvalTask, MultipleChoice, TaskQuestion
from headway.evals.text import last_word, read_data, read_lambada, spread

NAME = "lambada-choices"
NUM_WRONG_CHOICES = 3
OWN_MAX_TOKENS = 128
EXAMPLE = (
    '{"question": "…", "answer": "…"} or '
    '{"context": "…", "choices": ["…", "…"], "answer": 0} a line'
)


def read(data: Path, limit: int) -> EvalTask:
    """Read `limit` passages of LAMBADA, evenly spread: which of four words is the last?"""
    return EvalTask(NAME, (), spread(last_words(read_lambada(data)), limit))


def last_words(passages: Sequence[str]) -> list[MultipleChoice]:
    """Return the true last word of each passage as choice 0, then those of the next passages that
    differ.

    "… the tree", "… the tree", "… a cat", "… his hat", "… my car" give for the first passage: tree,
    cat, hat, car. The search wraps around at the end. Chance level is one in four.
    """
    windows = [last_word(passage) for passage in passages]
    choices = []
    for i, window in enumerate(windows):
        words = [window.target]
        for other in (*windows[i + 1 :], *windows[:i]):
            if len(words) > NUM_WRONG_CHOICES:
                break
            if other.target.lower() not in map(str.lower, words):
                words.append(other.target)
        if len(words) > NUM_WRONG_CHOICES:
            choices.append(MultipleChoice(window.context, words, 0))
    return choices


def read_own(path: Path, limit: int) -> EvalTask:
    """Read a file of the user's own; raises UsageError that names the invalid line."""
    questions: list[TaskQuestion] = []
    choices: list[MultipleChoice] = []
    for number, line in enumerate(read_data(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            parsed = choice(row) if "choices" in row else question(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(
                f"--tasks {path.name}, line {number}: {type(error).__name__} {error}.",
                f"Write {EXAMPLE}.",
            ) from error
        if isinstance(parsed, MultipleChoice):
            choices.append(parsed)
        else:
            questions.append(parsed)
    if not questions and not choices:
        raise UsageError(f"--tasks {path.name} has no questions.", f"Write {EXAMPLE}.")
    return EvalTask(path.stem, spread(questions, limit), spread(choices, limit), OWN_MAX_TOKENS)


def choice(row: dict[str, Any]) -> MultipleChoice:
    """Parse a row with choices; a choice without a leading space gets one if the context ends in a
    word."""
    context, words = str(row.get("context", row.get("question"))), list(map(str, row["choices"]))
    if not context or len(words) < 2:
        raise ValueError("a context and two choices are needed")
    answer = row["answer"]
    place = words.index(answer) if isinstance(answer, str) else range(len(words))[answer]
    glue = "" if context[-1].isspace() else " "
    return MultipleChoice(context, [w if w[:1].isspace() else glue + w for w in words], place)


def question(row: dict[str, Any]) -> TaskQuestion:
    """Parse a row with an answer; the reply must contain the answer as whole words."""
    answer = words_of(str(row["answer"]))
    messages = row.get("messages") or [{"role": "user", "content": str(row["question"])}]
    if not answer:
        raise ValueError("the answer is empty")
    return TaskQuestion(messages, str(row["answer"]), lambda r: f" {answer} " in f" {words_of(r)} ")


def words_of(text: str) -> str:
    """Return lower-case words without punctuation: "Paris, France." becomes "paris france"."""
    return " ".join("".join(c.lower() if c.isalnum() else " " for c in text).split())
