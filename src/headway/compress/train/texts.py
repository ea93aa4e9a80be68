"""What is learned from: text files, files of chats, the skills' training seeds, as `Source`s.

Text is cut into paragraphs, and a row of training may begin at any of them. Of a chat, the answer
counts ten times what is read before it. Paragraphs that `headway eval` scores too are left out; a
chat that it asks and a file that it scores are refused.
"""

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from headway.compress.calibration import HeldOut, refuse_by_name
from headway.compress.train.data import Document, Source
from headway.core.errors import RequestError, UsageError
from headway.core.scoring import transcript
from headway.evals.skills.suite import training_examples

SKILLS = "skills"
NUM_CHATS = 20_000
"""Chats of the skills' seeds: 1.3 million tokens of headway-tiny."""
READ, WRITTEN = 0.1, 1.0
"""What a token counts that is read, and one that is answered."""


class Tokens(Protocol):
    """A tokenizer, as `frontend.text.Tokenizer` is one."""

    template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str: ...


def read_sources(
    data: list[str], tokenizer: Tokens, seed: int, tested: HeldOut | None = None
) -> list[Source]:
    """The sources that `--data` names; UsageError says which cannot be used, and why.

    `tested` is what evaluations test; by default the questions that the skills ask.
    """
    tested = tested or HeldOut()
    if not data:
        raise UsageError("--data is missing.", "Give a text, a file of chats, or the word skills.")
    found = []
    for given in data:
        name, share = named(given)
        source = Source.of(name, share, documents_of(name, tokenizer, seed, tested))
        if not len(source.tokens_N):
            raise UsageError(f"--data {name} holds no text.", "Leave it out.")
        found.append(source)
    return found


def named(given: str) -> tuple[str, float]:
    """books.txt:0.7 → (books.txt, 0.7); without a share 1."""
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


def documents_of(name: str, tokenizer: Tokens, seed: int, tested: HeldOut) -> Iterator[Document]:
    """The documents of one source."""
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


def paragraphs(lines: Iterator[str], tokenizer: Tokens, tested: HeldOut) -> Iterator[Document]:
    """Each paragraph of a text with the blank line behind it; empty where it is tested."""
    held: list[str] = []
    for line in chain(lines, [""]):
        held.append(line)
        if not line.strip() and (text := "".join(held)):
            yield (
                []
                if tested.has(text)
                else [(tokenizer.encode(text, add_special_tokens=False), WRITTEN)]
            )
            held = []


def records(
    lines: Iterator[str], name: str, tokenizer: Tokens, tested: HeldOut
) -> Iterator[Document]:
    """A JSON object a line: `messages` of a chat that ends with its answer, `text` or `prompt`."""
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


def record(line: dict[str, Any], place: str, tokenizer: Tokens, tested: HeldOut) -> Document:
    """One line; UsageError where an evaluation tests it."""
    if isinstance(line.get("messages"), list):
        tested.refuse_chat(line["messages"], place)
        return chat(line["messages"], tokenizer)
    text = line.get("text") or line["prompt"]
    tested.refuse_text(text, place)
    return [(tokenizer.encode(text), WRITTEN)]


def chat(messages: list[dict[str, Any]], tokenizer: Tokens) -> Document:
    """(what is read, little), (the last answer with its end, whole)."""
    if tokenizer.template is None:
        before, whole = transcript(messages[:-1]), f"{transcript(messages[:-1])} "
        whole += str(messages[-1]["content"]) + "\n"
    else:
        before = tokenizer.render(messages[:-1])
        whole = tokenizer.render(messages, add_generation_prompt=False)
    if not whole.startswith(before):
        return [(tokenizer.encode(whole, add_special_tokens=False), WRITTEN)]
    parts = (before, READ), (whole[len(before) :], WRITTEN)
    return [(tokenizer.encode(text, add_special_tokens=False), weight) for text, weight in parts]
