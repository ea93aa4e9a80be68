"""Rows of tokens for calibration: from texts, recorded traffic, the skills' seeds, or the model.

Sources have shares, as `books.txt:0.5 skills:0.5`, and fill rows of equal length. Test data is
never used: a source is refused if thirteen consecutive words, or a whole chat, occur in an
evaluation.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from headway.core.errors import HeadwayError, UsageError
from headway.core.regular_file import open_regular
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples, training_examples
from headway.evals.text import LAMBADA, TEXTS

SKILLS_SOURCE, SELF_SOURCE = "skills", "self"
ROW_BEGINNINGS = (
    *("The", "In", "She said", "How do I", "According to", "I", "Question:", "It was", "1.", "A"),
    *("def ", "import ", "#include", "SELECT ", "<html>", "{", "# ", "\\begin{", "Der", "Les"),
    *("El", "On Monday", "Chapter 1", "To", "We", "There are", "What is", "Dear", "He", "If"),
    "This is",
)
"""First words of the rows that the model samples for the source `self`."""
BUILT_IN_SOURCES = (SKILLS_SOURCE, SELF_SOURCE)
SHINGLE_WORDS = 13
"""Consecutive words that two texts do not share by chance, as in GPT-3's contamination check."""
NUM_TEST_QUESTIONS = 100
"""Test questions of each skill and level."""
READ_BYTES_PER_TOKEN = 12
"""Bytes to read for each token: more than a token has."""
MAX_LINES = 100_000
WORD = re.compile(r"\w+")

Chat = list[dict[str, Any]]


Writer = Callable[[list[list[int]], int], list[list[int]]]
"""(beginnings of rows, tokens of a row) → rows."""


class CalibrationTokenizer(Protocol):
    """The part of a tokenizer that calibration uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def chat_ids(self, messages: Chat, /) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSource:
    """A .txt or .jsonl file, `skills` or `self`, with its share of the rows."""

    name: str
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRows:
    """Rows of token ids, with a line of description for each source."""

    rows: list[list[int]]
    descriptions: list[str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def digest(self) -> str:
        """A checksum that changes with any token."""
        return f"{zlib.crc32(json.dumps(self.rows).encode()):08x}"


class HeldOut:
    """Hashes of test data: of SHINGLE_WORDS consecutive words, and of whole questions."""

    def __init__(self) -> None:
        self.shingles: set[int] = set()

    @staticmethod
    def of(data: Path | None) -> "HeldOut":
        """Hash the skills' questions and, with `data`, the evaluation texts below it."""
        tested = HeldOut()
        for name in (*TEXTS.values(), LAMBADA) if data is not None else ():
            path = Path(data or "", name)
            if path.exists():
                tested.shingles.update(shingles(path.read_text(encoding="utf-8")))
        return tested

    def has(self, text: str) -> bool:
        """Whether an evaluation contains SHINGLE_WORDS consecutive words of the text."""
        return bool(self.shingles) and not self.shingles.isdisjoint(shingles(text))

    def refuse_text(self, text: str, place: str) -> None:
        """Raise UsageError if an evaluation contains a part of the text."""
        if self.has(text):
            raise UsageError(
                f"{place} has passages that an evaluation tests.",
                "Give other texts: figures on these would be too good.",
            )

    def refuse_chat(self, chat: Chat, place: str) -> None:
        """Raise UsageError if an evaluation contains the chat."""
        turns = [str(turn["content"]) for turn in chat if turn["role"] != "assistant"]
        whole = "\n".join(turns if chat[0]["role"] == "system" else ["", *turns])
        if text_hash(whole) in tested_questions():
            raise UsageError(f"{place} is a question of an evaluation.", "Leave it out.")
        self.refuse_text("\n".join(turns), place)


@cache
def tested_questions() -> frozenset[int]:
    """Return hashes of the first NUM_TEST_QUESTIONS of each skill and level."""
    return frozenset(
        text_hash(each.full_prompt)
        for skill in SKILLS
        for level in LEVELS
        for each in islice(examples(skill, level, TEST_SEED), NUM_TEST_QUESTIONS)
    )


def text_hash(text: str) -> int:
    return hash(text.strip())


def shingles(text: str) -> Iterator[int]:
    """Yield a hash of each SHINGLE_WORDS consecutive words, without case and punctuation."""
    words = [hash(word) for word in WORD.findall(text.lower())]
    for at in range(len(words) - SHINGLE_WORDS + 1):
        yield hash(tuple(words[at : at + SHINGLE_WORDS]))


def parse_sources(given: Sequence[str]) -> list[CalibrationSource]:
    """Parse `books.txt:0.5`; sources without a share have share 1."""
    sources = []
    for text in given:
        name, colon, share = text.rpartition(":")
        try:
            source = (
                CalibrationSource(name=name, share=float(share))
                if colon
                else CalibrationSource(name=text)
            )
        except ValueError:
            source = CalibrationSource(name=text)
        if not 0 < source.share < float("inf"):
            raise UsageError(f"--calibrate {text}: the share must be above 0.", "books.txt:0.5")
        if source.name not in BUILT_IN_SOURCES and not Path(source.name).is_file():
            raise UsageError(
                f"--calibrate {text}: there is no file {source.name}.",
                "Give a .txt file, a .jsonl file of chats, skills or self.",
            )
        sources.append(source)
    return sources


def read_calibration(
    sources: Sequence[CalibrationSource],
    tokenizer: CalibrationTokenizer,
    *,
    rows: int,
    length: int,
    seed: int,
    tested: HeldOut,
    chats: bool = True,
    write: Writer | None = None,
) -> CalibrationRows:
    """Return `rows` rows of `length` tokens, divided by share; chats use the chat template if any.

    `write` samples continuations of token ids for the source `self`. Raises UsageError for a source
    that contains test data, is empty, or has the wrong format.
    """
    total = sum(source.share for source in sources)
    all_rows: list[list[int]] = []
    descriptions, quota = [], 0.0
    for number, source in enumerate(sources):
        quota += rows * source.share / total
        count = round(quota) - len(all_rows) if number + 1 < len(sources) else rows - len(all_rows)
        if source.name == SELF_SOURCE:
            mine = sampled_rows(tokenizer, length, count, write)
        else:
            found_rows = rows_from(source, tokenizer, length, count, seed, tested, chats)
            mine = list(islice(found_rows, count))
        if not mine and count:
            raise UsageError(f"{source.name} holds no row of tokens.", "Give another source.")
        all_rows += mine
        shortage = "" if len(mine) == count else f" ({count} were asked for)"
        descriptions.append(f"{len(mine)} rows of {Path(source.name).name}{shortage}")
    return CalibrationRows(rows=all_rows, descriptions=descriptions)


def rows_from(
    source: CalibrationSource,
    tokenizer: CalibrationTokenizer,
    length: int,
    count: int,
    seed: int,
    tested: HeldOut,
    chats: bool,
) -> Iterator[list[int]]:
    """Yield rows of one source; texts at `count` even positions, chats concatenated."""
    if source.name == SKILLS_SOURCE:
        turns = ([*one.messages, answer(one.answer)] for one in training_examples(seed))
        yield from pack_rows((chat_ids(tokenizer, chat, chats) for chat in turns), length)
    elif source.name.endswith((".jsonl", ".json")):
        yield from pack_rows(traffic(source, tokenizer, seed, tested, chats), length)
    else:
        yield from text_rows(Path(source.name), tokenizer, length, count, tested)


def sampled_rows(
    tokenizer: CalibrationTokenizer, length: int, count: int, write: Writer | None
) -> list[list[int]]:
    """Sample rows from the model at temperature 1 (Williams et al., "Self-calibration for
    language model quantization and pruning", 2025).
    """
    if write is None:
        raise UsageError("--calibrate self is not offered here.", "Give a text.")
    begins = [tokenizer.encode(ROW_BEGINNINGS[i % len(ROW_BEGINNINGS)]) for i in range(count)]
    return write(begins, length)


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat_ids(tokenizer: CalibrationTokenizer, chat: Chat, chats: bool) -> list[int]:
    """Return the tokens of a chat as served: the template up to the last answer, then the
    answer."""
    *before, last = chat
    if not chats:
        text = "\n".join(str(turn["content"]) for turn in chat)
        return tokenizer.encode(text)
    if last["role"] != "assistant":
        return tokenizer.chat_ids(chat)
    ids = tokenizer.chat_ids(before) if before else []
    return ids + tokenizer.encode(str(last["content"]), add_special_tokens=False)


def pack_rows(pieces: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Yield rows of `length` tokens from the concatenated pieces; the last may be shorter."""
    row: list[int] = []
    for piece in pieces:
        row += piece
        while len(row) >= length:
            yield row[:length]
            row = row[length:]
    if row:
        yield row


def text_rows(
    path: Path, tokenizer: CalibrationTokenizer, length: int, count: int, tested: HeldOut
) -> Iterator[list[int]]:
    """Yield a row from each of `count` positions of a text; only these parts are read."""
    refuse_by_name(path)
    size, span = path.stat().st_size, length * READ_BYTES_PER_TOKEN
    with open_regular(path) as file:
        for number in range(count):
            file.seek(max(0, min(size * number // count, size - span)))
            text = file.read(span).decode("utf-8", errors="ignore")
            begin = text.find(" ") + 1 if number else 0
            tested.refuse_text(text[begin:], str(path))
            row = tokenizer.encode(text[begin:])[:length]
            if row:
                yield row


def refuse_by_name(path: Path) -> None:
    """Raise UsageError for a file that `headway eval` scores, in any folder."""
    whole = path.resolve().as_posix()
    if any(whole.endswith(f"/{name}") for name in (*TEXTS.values(), LAMBADA)):
        raise UsageError(f"{path} is what an evaluation tests.", "Give other texts.")


def traffic(
    source: CalibrationSource,
    tokenizer: CalibrationTokenizer,
    seed: int,
    tested: HeldOut,
    chats: bool,
) -> Iterator[list[int]]:
    """Yield the chats and prompts of a .jsonl file, shuffled by the seed."""
    path = Path(source.name)
    refuse_by_name(path)
    with path.open(encoding="utf-8") as file:
        lines = [line for line in islice(file, MAX_LINES) if line.strip()]
    random.Random(seed).shuffle(lines)
    for line in lines:
        try:
            request = read_line(json.loads(line))
            if isinstance(request, str):
                ids = tokenizer.encode(request)
            else:
                ids = chat_ids(tokenizer, request, chats) if request else []
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, HeadwayError):
            raise UsageError(
                f"{path}: a line is no request: {line[:80].strip()!r}.",
                'Give lines such as {"messages": […]} or {"prompt": "…"}, or those of a batch.',
            ) from None
        if isinstance(request, str):
            tested.refuse_text(request, f"A line of {path}")
        elif request:
            tested.refuse_chat(request, f"A line of {path}")
        yield ids


def read_line(line: dict[str, Any]) -> Chat | str:
    """Return the messages or prompt of a request, a batch line (`body`), or a ShareGPT line."""
    body = line.get("body", line)
    if "conversations" in body:
        roles = {"human": "user", "gpt": "assistant", "system": "system"}
        return [{"role": roles[t["from"]], "content": t["value"]} for t in body["conversations"]]
    if "messages" in body:
        return [{"role": str(t["role"]), "content": t["content"] or ""} for t in body["messages"]]
    prompt = body["prompt"]
    if not isinstance(prompt, str):
        raise TypeError("a prompt that is no text")
    return prompt
