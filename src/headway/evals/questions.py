"""The suite `skills`: held-out questions to a model, and how many of the answers are right.

It is given a `core.scoring.Model`, skills, levels, a seed and a number of questions.
It promises every question with its reply, in an order that depends on nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from headway.core.errors import UsageError
from headway.core.scoring import Model
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, SKILLS, examples, lookups
from headway.evals.statistics import wilson

MAX_TOKENS = {"story": 192, "extract": 128, "tool": 128, "copy": 96, "reverse": 64, "sort": 64}
"""Longest answer of a skill; of the others OTHER_TOKENS. Twice what a right one takes."""
OTHER_TOKENS = 48
TOGETHER = 50
"""Questions given to a model at once; the bar moves in such steps."""

Advance = Callable[[], None]


class Item(msgspec.Struct, kw_only=True):
    """One question. `reply` is null where the chat does not fit into the context: not right."""

    skill: str
    level: int
    prompt: list[dict[str, str]]
    answer: str
    reply: str | None
    right: bool

    @property
    def key(self) -> tuple[str, int, str]:
        """What two runs are paired by."""
        return self.skill, self.level, msgspec.json.encode(self.prompt).decode()


class Share(msgspec.Struct, kw_only=True):
    """Right answers with Wilson's 95% interval. `skill` "" is all skills, `level` 0 all levels."""

    skill: str
    level: int
    right: int
    asked: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Right answers of those asked."""
        return self.right / self.asked if self.asked else 0.0


class SkillsReport(msgspec.Struct, kw_only=True):
    """What was asked, every item, and shares: all, by level, by skill, by both."""

    seed: int
    questions: int
    unfit: int
    shares: list[Share]
    items: list[Item]

    def find(self, skill: str, level: int) -> Share | None:
        """One share, such as ("copy", 1), ("copy", 0) or ("", 0)."""
        return next((s for s in self.shares if (s.skill, s.level) == (skill, level)), None)


def check_skills(skills: Sequence[str]) -> list[str]:
    """The skills asked for, all without any; UsageError names one that does not exist."""
    for skill in skills:
        if skill not in SKILLS:
            raise UsageError(f"--skills: there is no skill {skill!r}.", f"{', '.join(SKILLS)}.")
    return [skill for skill in SKILLS if skill in skills] if skills else list(SKILLS)


def most_tokens(skill: str) -> int:
    """The longest answer to a question of a skill."""
    return MAX_TOKENS.get(skill, OTHER_TOKENS)


def lookup_name(distance: int) -> str:
    """What lookups with so many characters between list and question are called."""
    return f"lookup at {distance}"


def num_cells(skills: Sequence[str], levels: Sequence[int]) -> int:
    """Skills × levels."""
    return len(skills) * len(levels)


def ask(
    model: Model,
    *,
    skills: Sequence[str] = tuple(SKILLS),
    levels: Sequence[int] = LEVELS,
    questions: int,
    seed: int,
    distances: Sequence[int] = (),
    advance: Advance = lambda: None,
) -> SkillsReport:
    """Ask `questions` of each skill at each level; `advance` is called once an answer.

    Lookups at each of `distances` are as many as all levels of a skill, and named "lookup at 300".
    """
    cells = [
        (skill, level, examples(skill, level, seed), questions)
        for skill in skills
        for level in levels
    ] + [(lookup_name(d), 1, lookups(d, seed), questions * len(levels)) for d in distances]
    items = [item for cell in cells for item in ask_cell(model, *cell, advance)]
    return SkillsReport(
        seed=seed,
        questions=questions,
        unfit=sum(item.reply is None for item in items),
        shares=list(all_shares(items)),
        items=items,
    )


def ask_cell(
    model: Model,
    skill: str,
    level: int,
    stream: Iterator[Example],
    questions: int,
    advance: Advance,
) -> Iterator[Item]:
    """One skill at one level; a skill with few phrasings may have fewer questions."""
    max_tokens = most_tokens(skill)
    for start in range(0, questions, TOGETHER):
        asked = list(islice(stream, min(TOGETHER, questions - start)))
        replies = model.generate([one.messages for one in asked], max_tokens=max_tokens)
        for one, reply in zip(asked, replies, strict=True):
            advance()
            yield Item(
                skill=skill,
                level=level,
                prompt=one.messages,
                answer=one.answer,
                reply=reply,
                right=reply is not None and one.accepts(reply),
            )


def all_shares(items: Sequence[Item]) -> Iterator[Share]:
    """Every row of the tables: ("", 0), ("", 1), …, ("sort", 0), ("sort", 1), …"""
    skills = list(dict.fromkeys(item.skill for item in items))
    levels = sorted({item.level for item in items})
    for skill in ("", *skills):
        for level in (0, *levels):
            mine = [
                item.right
                for item in items
                if skill in ("", item.skill) and level in (0, item.level)
            ]
            low, high = wilson(sum(mine), len(mine))
            yield Share(
                skill=skill, level=level, right=sum(mine), asked=len(mine), low=low, high=high
            )
