"""Training data: text files, files of chats, and the skills' training seeds, as `TokenSource`s.

Text is cut into paragraphs, and a training row may begin at any of them. In a chat, a token of the
answer counts ten times one of the prompt. Paragraphs that `headway eval` tests are skipped; chats
and files that it tests are refused.
"""

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from headway.compress.calibration import HeldOut, refuse_by_name
from headway.compress.train.data import Document, TokenSource
from headway.core.errors import RequestError, UsageError
from headway.core.scoring import transcript
from headway.evals.skills.suite import training_examples

SKILLS = "skills"
NUM_CHATS = 20_000
"""Chats of the skills' seeds: 1.3 million tokens of headway-tiny."""
PROMPT_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0
"""Loss weight of a token of the prompt, and of the answer."""


class TrainingTokenizer(Protocol):
    """The part of `frontend.text.Tokenizer` that training uses."""

    template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str: ...


def read_sources(
    data: list[str], tokenizer: TrainingTokenizer, seed: int, tested: HeldOut | None = None
) -> list[TokenSource]:
    """Read the sources of `--data`; UsageError says which one cannot be used, and why.

    `tested` is the test data of evaluations; by default the questions of the skills.
    """
    tested = tested or HeldOut()
    if not data:
        raise UsageError("--data is missing.", "Give a text, a file of chats, or the word skills.")
    sources = []
    for given in data:
        name, share = parse_source(given)
        source = TokenSource.of(name, share, documents_of(name, tokenizer, seed, tested))
        if not len(source.tokens_N):
            raise UsageError(f"--data {name} holds no text.", "Leave it out.")
        sources.append(source)
    return sources


def parse_source(given: str) -> tuple[str, float]:
    """books.txt:0.7 → (books.txt, 0.7); the default share is 1."""
    name, sign, share = given.rpartition(":")
    if not sign:
        return given, 1.0
    try:
        number = float(share)
    except ValueError:
        return given, 1.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--data {given}: the share must be above 0.", f"--data {name}:0.5")
    return name, number


def documents_of(
    name: str, tokenizer: TrainingTokenizer, seed: int, tested: HeldOut
) -> Iterator[Document]:
    """Yield the documents of one source."""
    if name == SKILLS:
        for example in islice(training_examples(seed), NUM_CHATS):
            answer = {"role": "assistant", "content": example.answer}
            yield chat([*example.messages, answer], tokenizer)
        return
    refuse_by_name(Path(name))
    try:
        with Path(name).open(encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                yield from records(file, name, tokenizer, tested)
            else:
                yield from paragraphs(file, tokenizer, tested)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {name} cannot be read: {error}.", "Check the path.") from error


def paragraphs(
    lines: Iterator[str], tokenizer: TrainingTokenizer, tested: HeldOut
) -> Iterator[Document]:
    """Yield each paragraph of a text with the blank line after it; empty if it is tested."""
    lines_of_paragraph: list[str] = []
    for line in chain(lines, [""]):
        lines_of_paragraph.append(line)
        if not line.strip() and (text := "".join(lines_of_paragraph)):
            yield (
                []
                if tested.has(text)
                else [(tokenizer.encode(text, add_special_tokens=False), ANSWER_WEIGHT)]
            )
            lines_of_paragraph = []


def records(
    lines: Iterator[str], name: str, tokenizer: TrainingTokenizer, tested: HeldOut
) -> Iterator[Document]:
    """Yield a document per JSON line: `messages` of a chat that ends with its answer, `text`,
    `prompt`."""
    for number, line in enumerate(lines, 1):
        place = f"{name}, line {number},"
        try:
            if line.strip():
                yield record(json.loads(line), place, tokenizer, tested)
        except (ValueError, LookupError, AttributeError, TypeError, RequestError) as error:
            raise UsageError(
                f"{place[:-1]} is no text and no chat: {str(error)[:100]}.",
                'Write {"text": "…"} or {"messages": […]} in each line.',
            ) from error


def record(
    line: dict[str, Any], place: str, tokenizer: TrainingTokenizer, tested: HeldOut
) -> Document:
    """Return the document of one line; raises UsageError if an evaluation tests it."""
    if isinstance(line.get("messages"), list):
        tested.refuse_chat(line["messages"], place)
        return chat(line["messages"], tokenizer)
    text = line.get("text") or line["prompt"]
    tested.refuse_text(text, place)
    return [(tokenizer.encode(text), ANSWER_WEIGHT)]


def chat(messages: list[dict[str, Any]], tokenizer: TrainingTokenizer) -> Document:
    """Return the prompt with a small weight, and the last answer with its end with the full
    weight."""
    if tokenizer.template is None:
        before, whole = transcript(messages[:-1]), f"{transcript(messages[:-1])} "
        whole += str(messages[-1]["content"]) + "\n"
    else:
        before = tokenizer.render(messages[:-1])
        whole = tokenizer.render(messages, add_generation_prompt=False)
    if not whole.startswith(before):
        return [(tokenizer.encode(whole, add_special_tokens=False), ANSWER_WEIGHT)]
    parts = (before, PROMPT_WEIGHT), (whole[len(before) :], ANSWER_WEIGHT)
    return [(tokenizer.encode(text, add_special_tokens=False), weight) for text, weight in parts]
