"""The suite `skills`: ask a model held-out questions and count the right answers.

The questions and their order depend only on skills, levels, seed and their number.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from headway.core.errors import UsageError
from headway.core.scoring import ScoringModel
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, SKILLS, examples, lookups
from headway.evals.statistics import wilson

MAX_TOKENS = {"story": 192, "extract": 128, "tool": 128, "copy": 96, "reverse": 64, "sort": 64}
"""Maximum answer length by skill: twice what a right answer takes. All others: OTHER_TOKENS."""
OTHER_TOKENS = 48
BATCH_QUESTIONS = 50
"""Questions passed to the model at once; the progress bar moves in such steps."""

Advance = Callable[[], None]


class Item(msgspec.Struct, kw_only=True):
    """One question. `reply` is null where the chat exceeds the context: this counts as wrong."""

    skill: str
    level: int
    prompt: list[dict[str, str]]
    answer: str
    reply: str | None
    right: bool

    @property
    def key(self) -> tuple[str, int, str]:
        """Return the key by which the items of two runs are paired."""
        return self.skill, self.level, msgspec.json.encode(self.prompt).decode()


class Share(msgspec.Struct, kw_only=True):
    """Right answers with Wilson's 95% interval. `skill` "" is all skills, `level` 0 all levels."""

    skill: str
    level: int
    right: int
    total: int = msgspec.field(name="asked")
    low: float
    high: float

    @property
    def share(self) -> float:
        """The fraction of right answers."""
        return self.right / self.total if self.total else 0.0


class SkillsReport(msgspec.Struct, kw_only=True):
    """The questions of a run with their replies, and shares: all, by level, by skill, by both."""

    seed: int
    questions: int
    unfit: int
    shares: list[Share]
    items: list[Item]

    def find(self, skill: str, level: int) -> Share | None:
        """Return one share, such as ("copy", 1), ("copy", 0) or ("", 0)."""
        return next((s for s in self.shares if (s.skill, s.level) == (skill, level)), None)


def check_skills(skills: Sequence[str]) -> list[str]:
    """Return the given skills in table order, or all of them; UsageError names an unknown skill."""
    for skill in skills:
        if skill not in SKILLS:
            raise UsageError(f"--skills: there is no skill {skill!r}.", f"{', '.join(SKILLS)}.")
    return [skill for skill in SKILLS if skill in skills] if skills else list(SKILLS)


def max_tokens_of(skill: str) -> int:
    """Return the maximum number of tokens of an answer to a question of `skill`."""
    return MAX_TOKENS.get(skill, OTHER_TOKENS)


def lookup_name(distance: int) -> str:
    """Return the name of lookups with `distance` characters between list and question."""
    return f"lookup at {distance}"


def ask(
    model: ScoringModel,
    *,
    skills: Sequence[str] = tuple(SKILLS),
    levels: Sequence[int] = LEVELS,
    questions: int,
    seed: int,
    distances: Sequence[int] = (),
    advance: Advance = lambda: None,
) -> SkillsReport:
    """Ask `questions` of each skill at each level; `advance` is called after each answer.

    For each of `distances` as many lookups are asked as a skill has questions at all levels; they
    are named "lookup at 300".
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
    model: ScoringModel,
    skill: str,
    level: int,
    stream: Iterator[Example],
    questions: int,
    advance: Advance,
) -> Iterator[Item]:
    """Ask one skill at one level; a skill with few phrasings may have fewer questions."""
    max_tokens = max_tokens_of(skill)
    for start in range(0, questions, BATCH_QUESTIONS):
        batch = list(islice(stream, min(BATCH_QUESTIONS, questions - start)))
        replies = model.generate([one.messages for one in batch], max_tokens=max_tokens)
        for one, reply in zip(batch, replies, strict=True):
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
    """Yield the shares of all rows: ("", 0), ("", 1), …, ("sort", 0), ("sort", 1), …"""
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
                skill=skill, level=level, right=sum(mine), total=len(mine), low=low, high=high
            )
