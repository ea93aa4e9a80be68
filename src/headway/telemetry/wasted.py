"""What prompts and answers have too much of, as far as tokens and lengths can tell. Numbers only.

Of prompts: runs of tokens that stand twice in one prompt, tools that were offered and never called,
documents that no answer drew on (`documents`), and examples (`examples`): whether these help is for
`headway eval --suite examples` to say. Of answers: what a length cap, a schema or a stop rule would
have saved of those that ended.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from headway.telemetry.documents import DocumentUse
from headway.telemetry.examples import ExampleUse

RUN = 16
"""Tokens that make a run: fewer stand twice by accident, a template's marks for one."""
FEW_OFFERS = 10
"""Requests that offered a tool before it is said that none called it."""
MOST_TOOLS, MOST_NAMED = 256, 8
CAP = 90
"""The percentile of answer lengths at which a cap is tried."""
PERIODS, CYCLES, MIN_LOOP = 32, 3, 24
"""An answer loops where its end repeats a piece of at most so many tokens so often, and so long."""
FEW_ANSWERS = 5


class IdleTool(msgspec.Struct, kw_only=True):
    """A tool that `requests` offered and no answer called; `share` of their bodies' tools."""

    name: str
    requests: int
    num_bytes: int


class PromptWaste(msgspec.Struct, kw_only=True):
    """Of the last prompts' beginnings: tokens, those that stand in a run that stood before in the
    same prompt, and what computing these takes a prompt, at the measured seconds a prompt token.
    Tools, documents and examples as far as requests had any, of all `seen` prompts since the start;
    `token_s` are those seconds."""

    prompts: int = 0
    tokens: int = 0
    twice_tokens: int = 0
    twice_s: float = 0.0
    token_s: float = 0.0
    seen: int = 0
    tools: list[IdleTool] = []
    documents: DocumentUse | None = None
    examples: ExampleUse | None = None

    @property
    def twice_share(self) -> float:
        """Of the tokens that were looked at."""
        return self.twice_tokens / self.tokens if self.tokens else 0.0

    def in_mean(self, tokens: float, requests: int) -> float:
        """Tokens of a mean prompt, where so many of all prompts have `tokens` each."""
        return tokens * min(requests / self.seen, 1.0) if self.seen else tokens


class AnswerWaste(msgspec.Struct, kw_only=True):
    """Of the answers that ended in a window, a request each: tokens, and what could have been less.

    `above_cap` tokens lie behind `cap`, the 90th percentile of lengths; `unbounded` requests named
    no limit. `structured` had a grammar and `prose` had none. `looped_tokens` repeat the end of
    their answer.
    """

    answers: int
    tokens: int
    cap: int
    above_cap: int
    unbounded: int = 0
    structured: int = 0
    structured_tokens: int = 0
    prose: int = 0
    prose_tokens: int = 0
    looped_tokens: int = 0

    @property
    def schema_saves(self) -> float | None:
        """The share of all tokens that prose would not have had at the length of structured
        answers; None where there are too few of either to compare."""
        if min(self.structured, self.prose) < FEW_ANSWERS or not self.tokens:
            return None
        each = self.structured_tokens / self.structured
        return max(self.prose_tokens - each * self.prose, 0.0) / self.tokens


class Answered(Protocol):
    """One request that ended."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def is_bounded(self) -> bool: ...

    @property
    def is_structured(self) -> bool: ...

    @property
    def looped_tokens(self) -> int: ...


# ── prompts ─────────────────────────────────────────────────────────────────────────────────


def said_twice(pieces: Sequence[int] | Sequence[str], run: int = RUN) -> int:
    """How many pieces of one prompt lie in a run that stands before in it, not overlapping.

    >>> said_twice([1, 2, 3, 9, 1, 2, 3], run=3), said_twice([1, 1, 1, 1], run=3)
    (3, 0)
    """
    first: dict[tuple[object, ...], int] = {}
    covered, count = 0, 0
    for start in range(len(pieces) - run + 1):
        key = tuple(pieces[start : start + run])
        before = first.setdefault(key, start)
        if before + run <= start:
            count += start + run - max(covered, start)
            covered = start + run
    return count


class ToolTally:
    """How often each tool was offered and called, the oldest forgotten first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, list[int]] = OrderedDict()

    def offered(self, name: str, num_bytes: int) -> None:
        """A request's prompt shows it, described in so many bytes."""
        counts = self._seen.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[2] = num_bytes
        self._seen.move_to_end(name)
        while len(self._seen) > MOST_TOOLS:
            self._seen.popitem(last=False)

    def called(self, name: str) -> None:
        """An answer called it."""
        if name in self._seen:
            self._seen[name][1] += 1

    def idle(self) -> list[IdleTool]:
        """Those that were offered often and never called, the dearest first."""
        found = [
            IdleTool(name=name, requests=offers, num_bytes=num_bytes)
            for name, (offers, calls, num_bytes) in self._seen.items()
            if offers >= FEW_OFFERS and not calls
        ]
        return sorted(found, key=lambda t: (-t.requests * t.num_bytes, t.name))[:MOST_NAMED]


# ── answers ─────────────────────────────────────────────────────────────────────────────────


def looped(ids: Sequence[int]) -> int:
    """Tokens at the end of an answer that repeat what stands before them, at least three times.

    >>> looped([7] + [1, 2, 3] * 10), looped([1, 2, 3] * 2)
    (27, 0)
    """
    best = 0
    for period in range(1, min(PERIODS, len(ids) // CYCLES) + 1):
        length = 0
        for i in range(len(ids) - 1, period - 1, -1):
            if ids[i] != ids[i - period]:
                break
            length += 1
        if length >= max((CYCLES - 1) * period, MIN_LOOP):
            best = max(best, length)
    return best


def answer_waste(answers: Sequence[Answered]) -> AnswerWaste | None:
    """What could have been less of these answers; None of none."""
    lengths = np.array([each.output_tokens for each in answers])
    if not len(lengths) or not lengths.sum():
        return None
    cap = max(round(float(np.percentile(lengths, CAP))), 1)
    structured = np.array([each.is_structured for each in answers])
    return AnswerWaste(
        answers=len(answers),
        tokens=int(lengths.sum()),
        cap=cap,
        above_cap=int(np.maximum(lengths - cap, 0).sum()),
        unbounded=sum(not each.is_bounded for each in answers),
        structured=int(structured.sum()),
        structured_tokens=int(lengths[structured].sum()),
        prose=int((~structured).sum()),
        prose_tokens=int(lengths[~structured].sum()),
        looped_tokens=sum(each.looped_tokens for each in answers),
    )
