"""The suite `context`: answers on whole documents, on shortened ones, and on random cuts of the
same size.

The server must accept the field `context`. Lookups, extractions and refusals of the suite `skills`
become documents: their text between filler stories. Each column has one kept share and one method;
all columns have the same questions, so that they can be compared in pairs.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from headway.evals.questions import max_tokens_of
from headway.evals.skills.example import Example
from headway.evals.skills.reading import filler
from headway.evals.skills.suite import LEVELS, examples
from headway.evals.statistics import holm, mcnemar_worse, wilson

SKILLS = ("lookup", "extract", "refuse")
KEEPS = (0.8, 0.5, 0.3)
METHODS = ("surprisal", "random")
MAX_FILLER_CHARS = 300
"""Maximum characters of stories before the text, and after it."""
ALPHA = 0.05
"""Significance level of `better_than_random`."""
Body = dict[str, Any]


class ChatEndpoint(Protocol):
    """A server that returns the full JSON of chat completions."""

    def whole_answers(self, bodies: Sequence[Body]) -> list[Body]: ...


class Column(msgspec.Struct, kw_only=True):
    """One kept share and method: right or wrong by question, and the prompt tokens of each."""

    keep: float
    method: str
    skills: list[str]
    right: list[bool]
    prompt_tokens: list[int]

    def share(self, skill: str = "") -> tuple[int, int, float, float]:
        """Return right answers, questions, and Wilson's 95% interval; `skill` "" is all skills."""
        mine = [
            right for right, own in zip(self.right, self.skills, strict=True) if skill in ("", own)
        ]
        return (sum(mine), len(mine), *wilson(sum(mine), len(mine)))

    def saved(self, whole: "Column", skill: str = "") -> float:
        """Return the fraction of the whole prompts' tokens that shortening saves."""
        pairs = [
            (own, full)
            for own, full, skill_of in zip(
                self.prompt_tokens, whole.prompt_tokens, self.skills, strict=True
            )
            if skill in ("", skill_of)
        ]
        return 1 - sum(own for own, _ in pairs) / max(sum(full for _, full in pairs), 1)


class ShortenedReport(msgspec.Struct, kw_only=True):
    """All columns; the first is the whole prompt."""

    seed: int
    questions: int
    columns: list[Column]

    def column(self, keep: float, method: str) -> Column:
        """Return the column of one kept share and method."""
        return next(c for c in self.columns if (c.keep, c.method) == (keep, method))

    def chances(self) -> dict[float, float]:
        """Return, for each kept share, the p-value that random cuts are as good: exact McNemar,
        corrected by Holm over the shares.
        """
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
        """Whether cuts by surprisal give significantly more right answers at every kept share."""
        return all(chance < ALPHA for chance in self.chances().values())


# ── questions ───────────────────────────────────────────────────────────────────────────────


def split_document(example: Example, skill: str) -> tuple[str, str, str]:
    """Split a question into (before the document, document, after the document).

    In "Remember this list: fox: 12, cat: 30.\nLook up cat." the document is the list.
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
    """Yield single-turn questions, each with its chat that contains a document."""
    rng = random.Random(f"{seed} stories around {skill} {level}")
    for example in examples(skill, level, seed):
        if example.before:
            continue
        before, text, behind = split_document(example, skill)
        if skill != "lookup":  # at level 3 a lookup's own text contains stories
            around = [filler(rng, rng.randint(0, MAX_FILLER_CHARS)) for _ in range(2)]
            text = " ".join(part for part in (around[0], text, around[1]) if part)
        yield example, chat_of(before, text, behind)


def chat_of(before: str, document: str, behind: str) -> Body:
    """Return a chat with one user message that contains a document."""
    parts: list[Body] = [{"type": "text", "text": before}] if before else []
    parts.append({"type": "document", "document": {"data": document}})
    if behind:
        parts.append({"type": "text", "text": behind})
    return {"messages": [{"role": "user", "content": parts}]}


# ── asking ──────────────────────────────────────────────────────────────────────────────────


def ask(
    model: ChatEndpoint,
    *,
    questions: int,
    seed: int,
    skills: Sequence[str] = SKILLS,
    levels: Sequence[int] = LEVELS,
    on_column: Callable[[Column], None] = lambda _: None,
) -> ShortenedReport:
    """Ask `questions` of each skill at each level, on whole prompts and with every kept share and
    method."""
    rows = [
        (skill, example, body)
        for skill in skills
        for level in levels
        for example, body in islice(questions_of(skill, level, seed), questions)
    ]
    variants = [(1.0, "whole"), *((keep, method) for keep in KEEPS for method in METHODS)]
    columns = []
    for keep, method in variants:
        columns.append(ask_column(model, rows, keep, method))
        on_column(columns[-1])
    return ShortenedReport(seed=seed, questions=questions, columns=columns)


def ask_column(
    model: ChatEndpoint, rows: Sequence[tuple[str, Example, Body]], keep: float, method: str
) -> Column:
    """Ask all questions with one kept share and method."""
    extra: Body = {"context": {"keep": keep, "method": method}} if keep < 1 else {}
    bodies = [{**body, **extra, "max_tokens": max_tokens_of(skill)} for skill, _, body in rows]
    answers = model.whole_answers(bodies)
    replies = [str(answer["choices"][0]["message"].get("content") or "") for answer in answers]
    return Column(
        keep=keep,
        method=method,
        skills=[skill for skill, _, _ in rows],
        right=[
            example.accepts(reply) for (_, example, _), reply in zip(rows, replies, strict=True)
        ],
        prompt_tokens=[int(answer["usage"]["prompt_tokens"]) for answer in answers],
    )


# ── the table ───────────────────────────────────────────────────────────────────────────────


def table(report: ShortenedReport) -> str:
    """Return a Markdown table: tokens saved and right answers with 95% intervals, by skill and in
    all."""
    skills = ["", *dict.fromkeys(report.columns[0].skills)]
    chances, whole = report.chances(), report.columns[0]
    lines = [
        f"| keep | cut by | tokens saved | {' | '.join(name or 'all right' for name in skills)} "
        "| better than random, p |",
        "| --- " * (4 + len(skills)) + "|",
    ]
    for column in report.columns:
        cells = [f"{column.keep:g}", "–" if column is whole else column.method]
        cells.append(f"{column.saved(whole):.0%}")
        for name in skills:
            right, total, low, high = column.share(name)
            cells.append(f"{right / max(total, 1):.0%} ({100 * low:.0f} to {100 * high:.0f})")
        by_surprisal = column.method == METHODS[0]
        cells.append(f"{chances[column.keep]:.1e}" if by_surprisal else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
