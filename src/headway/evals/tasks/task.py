"""What a task is, and how a model is asked it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.core.scoring import Model
from headway.evals.questions import Advance, Item, SkillsReport, all_shares
from headway.evals.text import Window, nats, score_targets

TOGETHER = 32
"""Questions given to a model at once; the bar moves in such steps."""
PROBED, NEEDED = 8, 2
"""A task is asked by itself where the model has so many of so many first questions right."""
LEVEL = 1
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Question:
    """A chat, a right answer to show, and whether a reply is right."""

    messages: Chat
    answer: str
    accepts: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Choice:
    """A context and its continuations, of which number `answer` is right."""

    context: str
    choices: list[str]
    answer: int


@dataclass(frozen=True, slots=True)
class Task:
    """One task; answers of `questions` have at most `max_tokens`."""

    name: str
    questions: Sequence[Question] = ()
    choices: Sequence[Choice] = ()
    max_tokens: int = 0

    def __len__(self) -> int:
        return len(self.questions) + len(self.choices)

    def first(self, count: int) -> "Task":
        """Its first questions alone."""
        return replace(self, questions=self.questions[:count], choices=self.choices[:count])


def ask(model: Model, tasks: Sequence[Task], advance: Advance = lambda: None) -> SkillsReport:
    """Ask every question; a task stands where a skill does in the report, at level 1."""
    items = [
        item
        for task in tasks
        for item in (*answered(model, task, advance), *chosen(model, task, advance))
    ]
    return SkillsReport(
        seed=0,
        questions=max(map(len, tasks), default=0),
        unfit=sum(item.reply is None for item in items),
        shares=list(all_shares(items)),
        items=items,
    )


def answered(model: Model, task: Task, advance: Advance) -> Iterator[Item]:
    """Questions answered greedily; one that exceeds the context is not right."""
    for start in range(0, len(task.questions), TOGETHER):
        asked = task.questions[start : start + TOGETHER]
        replies = model.generate([one.messages for one in asked], max_tokens=task.max_tokens)
        for one, reply in zip(asked, replies, strict=True):
            advance()
            yield Item(
                skill=task.name,
                level=LEVEL,
                prompt=one.messages,
                answer=one.answer,
                reply=reply,
                right=reply is not None and one.accepts(reply),
            )


def chosen(model: Model, task: Task, advance: Advance) -> Iterator[Item]:
    """The choice with the highest log-probability behind its context; of equal ones the first."""
    for start in range(0, len(task.choices), TOGETHER):
        asked = task.choices[start : start + TOGETHER]
        windows = [Window(context=c.context, target=each) for c in asked for each in c.choices]
        scores = iter(score_targets(model, windows))
        for one in asked:
            losses = [nats(next(scores)) for _ in one.choices]
            best = losses.index(min(losses))
            advance()
            yield Item(
                skill=task.name,
                level=LEVEL,
                prompt=[{"role": "user", "content": one.context}],
                answer=one.choices[one.answer].strip(),
                reply=one.choices[best].strip(),
                right=best == one.answer,
            )


def able(model: Model, tasks: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """The tasks that the model can do, by measurement, and a note on those that it cannot.

    Choices are always asked: they cost little.
    """
    found, notes = [], []
    for task in tasks:
        if not task.questions:
            found.append(task)
            continue
        report = ask(model, [task.first(PROBED)])
        right = sum(item.right for item in report.items)
        if right >= NEEDED:
            found.append(task)
        else:
            notes.append(
                f"{task.name} not asked, for {model.name} has {right} of {PROBED} right: "
                f"--tasks {task.name} asks it"
            )
    return found, notes
