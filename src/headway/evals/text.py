"""Bits per byte of a text by sliding windows, and accuracy of last words.

Every model is scored on the same bytes after the same context, whatever its tokenizer: windows are
cut out of the text, not out of its tokens. For example, with context 8 and stride 8:

    the text     the cat sat on the mat and slept
    window 0     [the cat][ sat on the]                  context, then the scored target
    window 1          [sat on the][ mat and]
    window 2                  [mat and][ slept]

Cuts move forward to the next word. The first context is never scored; all later text is, once.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeVar

from headway.core import regular_file
from headway.core.errors import UsageError
from headway.core.scoring import Score, ScoringModel

CONTEXT_CHARS, STRIDE_CHARS = 256, 256
LAMBADA_CHARS = 512
BATCH = 16
WORD = re.compile(r"(?<=\S) (?=[A-Za-z])")

TEXTS = {
    "wikitext-2": "eval/wikitext-2/test.txt",
    "books": "text/val.txt",
}
"""Name → file in the data folder. wikitext-2 is the tokenized variant, with <unk> and @-@."""
LAMBADA = "eval/lambada/lambada_test.jsonl"

T = TypeVar("T")
Advance = Callable[[], None]
"""Called after each item, for a progress bar."""


def no_progress() -> None:
    """Do nothing: there is no progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindow:
    """A passage to score (`target`) and the text before it (`context`)."""

    context: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The score of one window: negative log-probability of its bytes, in nats."""

    nats: float
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """The scores of all windows of a text, in order, so that two models can be compared item by
    item."""

    name: str
    context_chars: int
    stride_chars: int
    passages: list[Passage]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.passages)

    @property
    def bits_per_byte(self) -> float:
        """−log2 p of the text over its bytes: 8 is no knowledge, about 1 is good for English."""
        return sum(each.nats for each in self.passages) / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        """e^(nats per token); comparable only between models with the same tokenizer."""
        count = sum(each.num_tokens for each in self.passages)
        return math.exp(sum(each.nats for each in self.passages) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """A passage's last word: whether greedy decoding produces it, and its nats."""

    word: str
    right: bool
    nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """All passages, in order."""

    name: str
    items: list[LastWord]

    @property
    def num_right(self) -> int:
        return sum(item.right for item in self.items)

    @property
    def accuracy(self) -> float:
        return self.num_right / len(self.items)

    @property
    def perplexity(self) -> float:
        """e^(nats per word)."""
        return math.exp(sum(item.nats for item in self.items) / len(self.items))


def windows(
    text: str,
    *,
    context_chars: int = CONTEXT_CHARS,
    stride_chars: int = STRIDE_CHARS,
    limit: int | None = None,
) -> list[TextWindow]:
    """Return the windows of `text`, or `limit` of them at even distances.

    A text that is no longer than the context has no window.
    """
    starts = range(context_chars, len(text), stride_chars)
    cuts = sorted({next_word(text, at, stride_chars) for at in starts})
    spans = [span for span in pairwise([*cuts, len(text)]) if span[0] < span[1]]
    starts_of = [context_start(text, begin, context_chars) for begin, _ in spans]
    cut = [
        TextWindow(context=text[start:begin], target=text[begin:end])
        for start, (begin, end) in zip(starts_of, spans, strict=True)
    ]
    return spread(cut, limit)


def next_word(text: str, at: int, within: int) -> int:
    """Return the position of the first space before a word from `at` on; `at` if none is near."""
    space = WORD.search(text, at, at + within + 1)
    return space.start() if space else at


def context_start(text: str, end: int, length: int) -> int:
    """Return the start of a context of about `length` characters before `end`, at a word
    boundary."""
    if end <= length:
        return 0
    begin = next_word(text, end - length - 1, length)
    return begin + 1 if begin < end - 1 else end - length


def spread(items: list[T], limit: int | None) -> list[T]:
    """Return `limit` items at even distances: 3 of 0 … 8 are 0, 3 and 6."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def score_text(
    model: ScoringModel,
    text: str,
    *,
    name: str = "",
    context_chars: int = CONTEXT_CHARS,
    stride_chars: int = STRIDE_CHARS,
    limit: int | None = None,
    advance: Advance = no_progress,
) -> TextScore:
    """Return bits per byte of `text`; raises RequestError if a window exceeds the model's
    context."""
    cut = windows(text, context_chars=context_chars, stride_chars=stride_chars, limit=limit)
    if not cut:
        raise UsageError(
            f"The text {name or 'given'} has {len(text)} characters, all of them context.",
            f"Give a longer text, or a context below {context_chars} characters.",
        )
    passages = score_windows(model, cut, advance)
    return TextScore(
        name=name, context_chars=context_chars, stride_chars=stride_chars, passages=passages
    )


def score_windows(
    model: ScoringModel, cut: Sequence[TextWindow], advance: Advance = no_progress
) -> list[Passage]:
    """Score each window's target after its context."""
    passages = []
    for at in range(0, len(cut), BATCH):
        batch = cut[at : at + BATCH]
        for window, score in zip(batch, score_targets(model, batch), strict=True):
            passages.append(
                Passage(
                    nats=nats(score),
                    num_bytes=len(window.target.encode()),
                    num_tokens=len(score.logprobs),
                )
            )
            advance()
    return passages


def score_last_words(
    model: ScoringModel,
    passages: Sequence[str],
    *,
    name: str = "lambada",
    context_chars: int = LAMBADA_CHARS,
    advance: Advance = no_progress,
) -> LastWords:
    """Return whether greedy decoding produces each passage's last word.

    All tokens of the word must be the most likely ones; a tie counts as right. Passages longer than
    `context_chars` are cut at the beginning.
    """
    items = []
    for at in range(0, len(passages), BATCH):
        batch = [last_word(passage, context_chars) for passage in passages[at : at + BATCH]]
        for window, score in zip(batch, score_targets(model, batch, top=1), strict=True):
            likeliest = all(
                logprob is not None and logprob >= max(top.values())
                for logprob, top in zip(score.logprobs, score.top, strict=True)
            )
            items.append(LastWord(word=window.target[1:], right=likeliest, nats=nats(score)))
            advance()
    return LastWords(name=name, items=items)


def last_word(passage: str, context_chars: int = LAMBADA_CHARS) -> TextWindow:
    """Split "I like red apples" into the context "I like red" and the target " apples"."""
    context, _, word = passage.rstrip().rpartition(" ")
    begin = context_start(context, len(context), context_chars)
    return TextWindow(context=context[begin:], target=f" {word}")


def score_targets(model: ScoringModel, batch: Sequence[TextWindow], *, top: int = 0) -> list[Score]:
    """Return the scores of each window's target alone, read after its context."""
    wholes = model.score([each.context + each.target for each in batch], top=top)
    scores = []
    for whole, begin in zip(wholes, context_lengths(model, batch, wholes), strict=True):
        scores.append(
            Score(
                token_ids=whole.token_ids[begin:],
                logprobs=whole.logprobs[begin:],
                top=whole.top[begin:],
            )
        )
    return scores


def context_lengths(
    model: ScoringModel, batch: Sequence[TextWindow], wholes: Sequence[Score]
) -> list[int]:
    """Return the number of context tokens at the start of each whole text.

    If the model has `encode`, this is the common prefix of both token sequences, and a token across
    the cut belongs to the target. Otherwise the contexts are scored alone and their tokens counted.
    """
    encode = getattr(model, "encode", None)
    if encode is None:
        contexts = model.score([each.context for each in batch])
        return [len(each.logprobs) for each in contexts]
    return [
        num_shared(encode(each.context), whole.token_ids)
        for each, whole in zip(batch, wholes, strict=True)
    ]


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix: [5, 6, 7] and [5, 6, 8, 9] give 2."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def nats(score: Score) -> float:
    """Return −log p of all tokens but the first, which has no log-probability."""
    return -sum(each for each in score.logprobs if each is not None)


def read_text(data: Path, name: str) -> str:
    """Read one of `TEXTS`; raises UsageError that names a missing file."""
    return read_data(data / TEXTS[name])


def read_lambada(data: Path, limit: int | None = None) -> list[str]:
    """Read LAMBADA's test set (OpenAI's variant), or `limit` passages at even distances."""
    lines = read_data(data / LAMBADA).splitlines()
    return [json.loads(line)["text"] for line in spread(lines, limit)]


def read_data(path: Path) -> str:
    """Read a data file as text; raises UsageError if that fails."""
    try:
        return regular_file.read_text(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            "Give the folder that holds eval/ and text/.",
        ) from error
