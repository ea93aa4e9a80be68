"""What shortening costs in right answers: questions of a document, whole, cut, and cut at random.

It is given a server that takes the field `context`. Lookups, extractions and refusals of the suite
`skills` are asked with their text as a document among stories, at several shares that are kept, by
surprisal and at random. It promises the same questions in every column, so that columns are paired.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from headway.evals.questions import most_tokens
from headway.evals.skills.example import Example
from headway.evals.skills.reading import filler
from headway.evals.skills.suite import LEVELS, examples
from headway.evals.statistics import holm, mcnemar_worse, wilson

SKILLS = ("lookup", "extract", "refuse")
KEEPS = (0.8, 0.5, 0.3)
METHODS = ("surprisal", "random")
AROUND = 300
"""Characters of stories before and behind the text, each at most."""
SURE = 0.05
Body = dict[str, Any]


class Asks(Protocol):
    """Who answers bodies of chats whole: a server behind a URL."""

    def whole_answers(self, bodies: Sequence[Body]) -> list[Body]: ...


class Column(msgspec.Struct, kw_only=True):
    """One share that is kept, in one way: which questions came right, and tokens of the prompts."""

    keep: float
    method: str
    skills: list[str]
    right: list[bool]
    prompt_tokens: list[int]

    def share(self, skill: str = "") -> tuple[int, int, float, float]:
        """Right, asked, and Wilson's 95% interval; "" is all skills."""
        mine = [
            right for right, own in zip(self.right, self.skills, strict=True) if skill in ("", own)
        ]
        return (sum(mine), len(mine), *wilson(sum(mine), len(mine)))

    def saved(self, whole: "Column", skill: str = "") -> float:
        """The share of the whole prompts' tokens that is saved."""
        pairs = [
            (own, all_of_it)
            for own, all_of_it, of in zip(
                self.prompt_tokens, whole.prompt_tokens, self.skills, strict=True
            )
            if skill in ("", of)
        ]
        return 1 - sum(own for own, _ in pairs) / max(sum(most for _, most in pairs), 1)


class ShortenedReport(msgspec.Struct, kw_only=True):
    """Every column; the first is the whole prompt."""

    seed: int
    questions: int
    columns: list[Column]

    def column(self, keep: float, method: str) -> Column:
        """The column of one share and way."""
        return next(c for c in self.columns if (c.keep, c.method) == (keep, method))

    def chances(self) -> dict[float, float]:
        """For each share the probability that random cuts are as good, by exact McNemar over the
        pairs and Holm over the shares."""
        ps = []
        for keep in KEEPS:
            pairs = list(
                zip(
                    *(self.column(keep, method).right for method in METHODS),
                    strict=True,
                )
            )
            ps.append(
                mcnemar_worse(
                    sum(own and not other for own, other in pairs),
                    sum(other and not own for own, other in pairs),
                )
            )
        return dict(zip(KEEPS, holm(ps), strict=True))

    @property
    def better_than_random(self) -> bool:
        """Whether cuts by surprisal keep surely more answers right at every share."""
        return all(chance < SURE for chance in self.chances().values())


# ── questions ───────────────────────────────────────────────────────────────────────────────


def parted(example: Example, skill: str) -> tuple[str, str, str]:
    """What stands before the text, the text, and what stands behind it.

    "Remember this list: fox: 12, cat: 30.\nLook up cat." has its list in the middle.
    """
    lines = example.prompt.split("\n")
    if skill == "lookup":
        head, _, rest = "\n".join(lines[:-1]).partition(": ")
        return f"{head}:", rest, lines[-1]
    if skill == "extract":
        place = len(lines) - 1
    else:
        place = next(i for i, line in enumerate(lines) if " has a " in line)
    head, colon, text = lines[place].partition(": ")
    if not colon:
        head, text = "", lines[place]
    before = [*lines[:place], *([f"{head}:"] if head else [])]
    return "\n".join(before), text, "\n".join(lines[place + 1 :])


def questions_of(skill: str, level: int, seed: int) -> Iterator[tuple[Example, Body]]:
    """Endless questions that are asked at once, and the chats that ask them of a document."""
    rng = random.Random(f"{seed} stories around {skill} {level}")
    for example in examples(skill, level, seed):
        if example.before:
            continue
        before, text, behind = parted(example, skill)
        if skill != "lookup":  # its own texts have stories, at level 3
            around = [filler(rng, rng.randint(0, AROUND)) for _ in range(2)]
            text = " ".join(part for part in (around[0], text, around[1]) if part)
        yield example, chat_of(before, text, behind)


def chat_of(before: str, document: str, behind: str) -> Body:
    """A user's message with a document in it."""
    parts: list[Body] = [{"type": "text", "text": before}] if before else []
    parts.append({"type": "document", "document": {"data": document}})
    if behind:
        parts.append({"type": "text", "text": behind})
    return {"messages": [{"role": "user", "content": parts}]}


# ── asking ──────────────────────────────────────────────────────────────────────────────────


def ask(
    model: Asks,
    *,
    questions: int,
    seed: int,
    skills: Sequence[str] = SKILLS,
    levels: Sequence[int] = LEVELS,
    on_column: Callable[[Column], None] = lambda _: None,
) -> ShortenedReport:
    """Ask `questions` of each skill at each level, whole and cut in every way."""
    asked = [
        (skill, example, body)
        for skill in skills
        for level in levels
        for example, body in islice(questions_of(skill, level, seed), questions)
    ]
    ways = [(1.0, "whole"), *((keep, method) for keep in KEEPS for method in METHODS)]
    columns = []
    for keep, method in ways:
        columns.append(ask_column(model, asked, keep, method))
        on_column(columns[-1])
    return ShortenedReport(seed=seed, questions=questions, columns=columns)


def ask_column(
    model: Asks, asked: Sequence[tuple[str, Example, Body]], keep: float, method: str
) -> Column:
    """All questions with one share kept."""
    extra: Body = {"context": {"keep": keep, "method": method}} if keep < 1 else {}
    bodies = [{**body, **extra, "max_tokens": most_tokens(skill)} for skill, _, body in asked]
    answers = model.whole_answers(bodies)
    replies = [str(answer["choices"][0]["message"].get("content") or "") for answer in answers]
    return Column(
        keep=keep,
        method=method,
        skills=[skill for skill, _, _ in asked],
        right=[
            example.accepts(reply) for (_, example, _), reply in zip(asked, replies, strict=True)
        ],
        prompt_tokens=[int(answer["usage"]["prompt_tokens"]) for answer in answers],
    )


# ── the table ───────────────────────────────────────────────────────────────────────────────


def table(report: ShortenedReport) -> str:
    """A Markdown table: tokens saved against answers right, with 95%, by skill and for all."""
    named = ["", *dict.fromkeys(report.columns[0].skills)]
    chances, whole = report.chances(), report.columns[0]
    lines = [
        f"| keep | cut by | tokens saved | {' | '.join(name or 'all right' for name in named)} "
        "| better than random, p |",
        "| --- " * (4 + len(named)) + "|",
    ]
    for column in report.columns:
        cells = [f"{column.keep:g}", "–" if column is whole else column.method]
        cells.append(f"{column.saved(whole):.0%}")
        for name in named:
            right, asked, low, high = column.share(name)
            cells.append(f"{right / max(asked, 1):.0%} ({100 * low:.0f} to {100 * high:.0f})")
        by_surprisal = column.method == METHODS[0]
        cells.append(f"{chances[column.keep]:.1e}" if by_surprisal else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
