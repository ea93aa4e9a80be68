"""Rows of tokens that a model is calibrated on: from texts, recorded traffic, the skills' seeds, or
the model itself.

Sources are named by share, as `books.txt:0.5 skills:0.5`, and fill rows of one length. What is
tested is never among them: thirteen words in a row that an evaluation text has as well, or a chat
that an evaluation asks, refuse the source.
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
BEGINNINGS = (
    *("The", "In", "She said", "How do I", "According to", "I", "Question:", "It was", "1.", "A"),
    *("def ", "import ", "#include", "SELECT ", "<html>", "{", "# ", "\\begin{", "Der", "Les"),
    *("El", "On Monday", "Chapter 1", "To", "We", "There are", "What is", "Dear", "He", "If"),
    "This is",
)
"""First words of the rows that a model samples itself."""
OWN_SOURCES = (SKILLS_SOURCE, SELF_SOURCE)
SHINGLE = 13
"""Words in a row that two texts do not share by chance, as in GPT-3's own check."""
QUESTIONS = 100
"""Questions of each skill and level that count as tested."""
BYTES_A_TOKEN = 12
"""Read for each token wanted: more than tokens have."""
MOST_LINES = 100_000
WORD = re.compile(r"\w+")

Chat = list[dict[str, Any]]


Writer = Callable[[list[list[int]], int], list[list[int]]]
"""(beginnings of rows, tokens of a row) → rows."""


class Tokens(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def chat_ids(self, messages: Chat, /) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from: a .txt or .jsonl file, `skills` or `self`; and their share."""

    name: str
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rows of token ids, and what they are in a line for each source."""

    rows: list[list[int]]
    told: list[str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def digest(self) -> str:
        """Changes with any token."""
        return f"{zlib.crc32(json.dumps(self.rows).encode()):08x}"


class HeldOut:
    """Hashes of what evaluations test: of SHINGLE words in a row, and of whole questions."""

    def __init__(self) -> None:
        self.shingles: set[int] = set()

    @staticmethod
    def of(data: Path | None) -> "HeldOut":
        """The skills' questions; with `data` the texts below it as well."""
        tested = HeldOut()
        for name in (*TEXTS.values(), LAMBADA) if data is not None else ():
            path = Path(data or "", name)
            if path.exists():
                tested.shingles.update(shingles(path.read_text(encoding="utf-8")))
        return tested

    def has(self, text: str) -> bool:
        """Whether an evaluation has SHINGLE words in a row of it."""
        return bool(self.shingles) and not self.shingles.isdisjoint(shingles(text))

    def refuse_text(self, text: str, place: str) -> None:
        """UsageError when an evaluation has some of it."""
        if self.has(text):
            raise UsageError(
                f"{place} has passages that an evaluation tests.",
                "Give other texts: figures on these would be too good.",
            )

    def refuse_chat(self, chat: Chat, place: str) -> None:
        """UsageError when an evaluation asks it."""
        told = [str(turn["content"]) for turn in chat if turn["role"] != "assistant"]
        whole = "\n".join(told if chat[0]["role"] == "system" else ["", *told])
        if hashed(whole) in tested_questions():
            raise UsageError(f"{place} is a question of an evaluation.", "Leave it out.")
        self.refuse_text("\n".join(told), place)


@cache
def tested_questions() -> frozenset[int]:
    """Of the first QUESTIONS of each skill and level."""
    return frozenset(
        hashed(each.full_prompt)
        for skill in SKILLS
        for level in LEVELS
        for each in islice(examples(skill, level, TEST_SEED), QUESTIONS)
    )


def hashed(text: str) -> int:
    return hash(text.strip())


def shingles(text: str) -> Iterator[int]:
    """A hash for each SHINGLE words in a row, whatever their case and what stands between."""
    words = [hash(word) for word in WORD.findall(text.lower())]
    for at in range(len(words) - SHINGLE + 1):
        yield hash(tuple(words[at : at + SHINGLE]))


def parse_sources(given: Sequence[str]) -> list[Source]:
    """`books.txt:0.5` → Source; without a share each counts as much as another."""
    found = []
    for text in given:
        name, colon, share = text.rpartition(":")
        try:
            source = Source(name=name, share=float(share)) if colon else Source(name=text)
        except ValueError:
            source = Source(name=text)
        if not 0 < source.share < float("inf"):
            raise UsageError(f"--calibrate {text}: the share must be above 0.", "books.txt:0.5")
        if source.name not in OWN_SOURCES and not Path(source.name).is_file():
            raise UsageError(
                f"--calibrate {text}: there is no file {source.name}.",
                "Give a .txt file, a .jsonl file of chats, skills or self.",
            )
        found.append(source)
    return found


def read_calibration(
    sources: Sequence[Source],
    tokenizer: Tokens,
    *,
    rows: int,
    length: int,
    seed: int,
    tested: HeldOut,
    chats: bool = True,
    write: Writer | None = None,
) -> Calibration:
    """`rows` rows of `length` tokens, by share; chats are in their template where there is one.

    `write` samples continuations of token ids, for `self`. Raises UsageError for a source that is
    tested, empty, or not of its kind.
    """
    total = sum(source.share for source in sources)
    found: list[list[int]] = []
    told, wanted = [], 0.0
    for number, source in enumerate(sources):
        wanted += rows * source.share / total
        count = round(wanted) - len(found) if number + 1 < len(sources) else rows - len(found)
        if source.name == SELF_SOURCE:
            mine = written_rows(tokenizer, length, count, write)
        else:
            found_rows = rows_from(source, tokenizer, length, count, seed, tested, chats)
            mine = list(islice(found_rows, count))
        if not mine and count:
            raise UsageError(f"{source.name} holds no row of tokens.", "Give another source.")
        found += mine
        few = "" if len(mine) == count else f" ({count} were asked for)"
        told.append(f"{len(mine)} rows of {Path(source.name).name}{few}")
    return Calibration(rows=found, told=told)


def rows_from(
    source: Source,
    tokenizer: Tokens,
    length: int,
    count: int,
    seed: int,
    tested: HeldOut,
    chats: bool,
) -> Iterator[list[int]]:
    """Rows of one source; texts at `count` places evenly spread, chats one behind the other."""
    if source.name == SKILLS_SOURCE:
        turns = ([*one.messages, answer(one.answer)] for one in training_examples(seed))
        yield from packed((chat_ids(tokenizer, chat, chats) for chat in turns), length)
    elif source.name.endswith((".jsonl", ".json")):
        yield from packed(traffic(source, tokenizer, seed, tested, chats), length)
    else:
        yield from text_rows(Path(source.name), tokenizer, length, count, tested)


def written_rows(
    tokenizer: Tokens, length: int, count: int, write: Writer | None
) -> list[list[int]]:
    """Sample rows from the model at temperature 1 (Williams et al., "Self-calibration for
    language model quantization and pruning", 2025)."""
    if write is None:
        raise UsageError("--calibrate self is not offered here.", "Give a text.")
    begins = [tokenizer.encode(BEGINNINGS[i % len(BEGINNINGS)]) for i in range(count)]
    return write(begins, length)


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat_ids(tokenizer: Tokens, chat: Chat, chats: bool) -> list[int]:
    """The chat as it is served: the template up to the last answer, then its tokens."""
    *before, last = chat
    if not chats:
        text = "\n".join(str(turn["content"]) for turn in chat)
        return tokenizer.encode(text)
    if last["role"] != "assistant":
        return tokenizer.chat_ids(chat)
    ids = tokenizer.chat_ids(before) if before else []
    return ids + tokenizer.encode(str(last["content"]), add_special_tokens=False)


def packed(pieces: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens out of the pieces in turn; the last may be shorter."""
    row: list[int] = []
    for piece in pieces:
        row += piece
        while len(row) >= length:
            yield row[:length]
            row = row[length:]
    if row:
        yield row


def text_rows(
    path: Path, tokenizer: Tokens, length: int, count: int, tested: HeldOut
) -> Iterator[list[int]]:
    """A row from each of `count` places of a text; only these are read."""
    refuse_by_name(path)
    size, span = path.stat().st_size, length * BYTES_A_TOKEN
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
    """UsageError for a file that `headway eval` scores, wherever it lies."""
    whole = path.resolve().as_posix()
    if any(whole.endswith(f"/{name}") for name in (*TEXTS.values(), LAMBADA)):
        raise UsageError(f"{path} is what an evaluation tests.", "Give other texts.")


def traffic(
    source: Source, tokenizer: Tokens, seed: int, tested: HeldOut, chats: bool
) -> Iterator[list[int]]:
    """The chats and prompts of a .jsonl file, in an order drawn from the seed."""
    path = Path(source.name)
    refuse_by_name(path)
    with path.open(encoding="utf-8") as file:
        lines = [line for line in islice(file, MOST_LINES) if line.strip()]
    random.Random(seed).shuffle(lines)
    for line in lines:
        try:
            found = read_line(json.loads(line))
            if isinstance(found, str):
                ids = tokenizer.encode(found)
            else:
                ids = chat_ids(tokenizer, found, chats) if found else []
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, HeadwayError):
            raise UsageError(
                f"{path}: a line is no request: {line[:80].strip()!r}.",
                'Give lines such as {"messages": […]} or {"prompt": "…"}, or those of a batch.',
            ) from None
        if isinstance(found, str):
            tested.refuse_text(found, f"A line of {path}")
        elif found:
            tested.refuse_chat(found, f"A line of {path}")
        yield ids


def read_line(line: dict[str, Any]) -> Chat | str:
    """The messages or the prompt of a request, of a batch's line (`body`), or of ShareGPT's."""
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
