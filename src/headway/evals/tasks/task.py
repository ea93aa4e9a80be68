"""Types of tasks, and how a task is put to a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.core.scoring import ScoringModel
from headway.evals.questions import Advance, Item, SkillsReport, all_shares
from headway.evals.text import TextWindow, nats, score_targets

BATCH_QUESTIONS = 32
"""Questions passed to the model at once; the progress bar moves in such steps."""
PROBE_QUESTIONS, MIN_PROBE_RIGHT = 8, 2
"""A task is selected automatically if the model has MIN_PROBE_RIGHT of PROBE_QUESTIONS right."""
LEVEL = 1
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """A chat, a right answer to show, and the check of a reply."""

    messages: Chat
    answer: str
    accepts: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """A context and its continuations; `answer` is the index of the right one."""

    context: str
    choices: list[str]
    answer: int


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One task; answers to `questions` have at most `max_tokens` tokens."""

    name: str
    questions: Sequence[TaskQuestion] = ()
    choices: Sequence[MultipleChoice] = ()
    max_tokens: int = 0

    def __len__(self) -> int:
        return len(self.questions) + len(self.choices)

    def first(self, count: int) -> "EvalTask":
        """Return the task with its first `count` questions and choices."""
        return replace(self, questions=self.questions[:count], choices=self.choices[:count])


def ask(
    model: ScoringModel, tasks: Sequence[EvalTask], advance: Advance = lambda: None
) -> SkillsReport:
    """Ask all tasks; in the report a task takes the place of a skill, at level 1."""
    items = [
        item
        for task in tasks
        for item in (*ask_questions(model, task, advance), *score_choices(model, task, advance))
    ]
    return SkillsReport(
        seed=0,
        questions=max(map(len, tasks), default=0),
        unfit=sum(item.reply is None for item in items),
        shares=list(all_shares(items)),
        items=items,
    )


def ask_questions(model: ScoringModel, task: EvalTask, advance: Advance) -> Iterator[Item]:
    """Answer questions greedily; one that exceeds the context counts as wrong."""
    for start in range(0, len(task.questions), BATCH_QUESTIONS):
        batch = task.questions[start : start + BATCH_QUESTIONS]
        replies = model.generate([one.messages for one in batch], max_tokens=task.max_tokens)
        for one, reply in zip(batch, replies, strict=True):
            advance()
            yield Item(
                skill=task.name,
                level=LEVEL,
                prompt=one.messages,
                answer=one.answer,
                reply=reply,
                right=reply is not None and one.accepts(reply),
            )


def score_choices(model: ScoringModel, task: EvalTask, advance: Advance) -> Iterator[Item]:
    """Take the choice with the highest log-likelihood after its context; on a tie the first."""
    for start in range(0, len(task.choices), BATCH_QUESTIONS):
        batch = task.choices[start : start + BATCH_QUESTIONS]
        windows = [TextWindow(context=c.context, target=each) for c in batch for each in c.choices]
        scores = iter(score_targets(model, windows))
        for one in batch:
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


def feasible_tasks(
    model: ScoringModel, tasks: Sequence[EvalTask]
) -> tuple[list[EvalTask], list[str]]:
    """Return the tasks that the model can do in a short probe, and a note on each other task.

    Tasks of choices are always selected: they are cheap.
    """
    feasible, notes = [], []
    for task in tasks:
        if not task.questions:
            feasible.append(task)
            continue
        report = ask(model, [task.first(PROBE_QUESTIONS)])
        right = sum(item.right for item in report.items)
        if right >= MIN_PROBE_RIGHT:
            feasible.append(task)
        else:
            notes.append(
                f"{task.name} not asked, for {model.name} has {right} of {PROBE_QUESTIONS} right: "
                f"--tasks {task.name} asks it"
            )
    return feasible, notes
