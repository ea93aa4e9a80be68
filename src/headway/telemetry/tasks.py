"""Cost per successful task: the cost of all judged tasks over the number of successful ones.

    task t1   0.02 $ + a retry of 0.02 $    success
    task t2   0.02 $                        no success
    cost per success = 0.06 $; a task that is never judged is not counted

Cost and success are summed in all, by key, by task class and by route; a task counts once in each
group, however many requests it took. `MachineTime` prices a request by the seconds of the steps.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from headway.core.errors import RequestError
from headway.core.records import StepRecord
from headway.telemetry.snapshot import TaskCost

MAX_TASKS = 100_000
MAX_GROUPS = 1000
"""Groups of one dimension; later ones are summed as `other`."""
OTHER = "other"
DIMENSIONS = ("all", "key", "task", "route")
MAX_ID, MAX_SOURCE = 200, 64
Group = tuple[str, str]


class Outcome(msgspec.Struct, kw_only=True):
    """Body of POST /v1/outcomes."""

    task_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
    success: bool
    score: float | None = None
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SOURCE)] = "api"


@dataclass(slots=True)
class TaskTotals:
    """Cost and success of one group; `judged` is the cost (dollars) of tasks with an outcome."""

    requests: int = 0
    dollars: float = 0.0
    judged: float = 0.0
    succeeded: int = 0
    failed: int = 0

    @property
    def cost_per_success(self) -> float | None:
        """Return dollars per successful task; None before the first success."""
        return self.judged / self.succeeded if self.succeeded else None


class TaskSpend(msgspec.Struct, gc=False):
    """One task: dollars by group, and its outcome once judged.

    100,000 of these are stored, so the garbage collector must not track them: a dict is untracked
    while its keys are, and each group is one shared tuple of strings.
    """

    dollars: dict[Group, float] = {}
    success: bool | None = None


class Tasks:
    """The stored tasks (least recently used ones are dropped) and the totals by group."""

    def __init__(self) -> None:
        self.totals: dict[Group, TaskTotals] = {}
        self._groups: dict[Group, Group] = {}
        """Interned groups: the one tuple that all tasks share."""
        self._tasks: OrderedDict[tuple[str, str], TaskSpend] = OrderedDict()

    def spend(self, owner: str, task_id: str, kind: str, route: str, dollars: float) -> None:
        """Add the cost of an ended request to its task; `dollars` includes retries."""
        task = self._task(owner, task_id)
        for group in self._groups_of(owner, kind, route):
            totals = self.totals[group]
            totals.requests += 1
            totals.dollars += dollars
            if task.success is not None:
                if group not in task.dollars:  # a new group of a task that is judged already
                    count(totals, task.success, 1)
                totals.judged += dollars
            task.dollars[group] = task.dollars.get(group, 0.0) + dollars

    def judge(self, owner: str, task_id: str, success: bool) -> bool:
        """Set the outcome of a task, replacing an earlier one; return False for an unknown task."""
        task = self._tasks.get((owner, task_id))
        if task is None:
            return False
        self._tasks.move_to_end((owner, task_id))
        for group, dollars in task.dollars.items():
            totals = self.totals[group]
            if task.success is None:
                totals.judged += dollars
            else:
                count(totals, task.success, -1)
            count(totals, success, 1)
        task.success = success
        return True

    def rows(self) -> Iterator[tuple[str, str, TaskTotals]]:
        """Yield (dimension, name, totals) of each group."""
        for (dimension, name), totals in self.totals.items():
            yield dimension, name, totals

    def most_expensive(self, most: int) -> list[TaskCost]:
        """Return the `most` most expensive groups, the sum of all first."""
        rows = sorted(self.rows(), key=lambda row: (row[0] != "all", -row[2].dollars))
        return [
            TaskCost(
                dimension=dimension,
                name=name,
                requests=totals.requests,
                usd=totals.dollars,
                succeeded=totals.succeeded,
                failed=totals.failed,
                usd_per_success=totals.cost_per_success,
            )
            for dimension, name, totals in rows[:most]
        ]

    def _task(self, owner: str, task_id: str) -> TaskSpend:
        task = self._tasks.setdefault((owner, task_id), TaskSpend())
        self._tasks.move_to_end((owner, task_id))
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)
        return task

    def _groups_of(self, owner: str, kind: str, route: str) -> list[Group]:
        groups = []
        for group in zip(DIMENSIONS, ("", owner, kind, route), strict=True):
            if group not in self.totals:
                many = sum(dimension == group[0] for dimension, _ in self.totals) >= MAX_GROUPS
                group = (group[0], OTHER) if many else group
                self.totals.setdefault(group, TaskTotals())
            groups.append(self._groups.setdefault(group, group))
        return groups

    def check_integrity(self) -> None:
        """Assert that no count is negative and judged cost is at most the whole cost."""
        for totals in self.totals.values():
            assert totals.succeeded >= 0 and totals.failed >= 0
            assert totals.judged <= totals.dollars + 1e-9


def count(totals: TaskTotals, success: bool, by: int) -> None:
    if success:
        totals.succeeded += by
    else:
        totals.failed += by


def no_such_task(task_id: str) -> RequestError:
    return RequestError(
        f"No request of this key belongs to the task {task_id[:80]!r}.",
        param="task_id",
        code="task_not_found",
        status=404,
    )


class Retries:
    """Map from the body of a request to its task, so that a retry belongs to the first try's."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, int], str] = OrderedDict()

    def task_of(self, owner: str, body_hash: int, is_retry: bool, fresh: str) -> str:
        """Return `fresh` for a first try, else the task of the same body sent before."""
        key = owner, body_hash
        known = self._tasks.get(key) if is_retry else None
        task = known or fresh
        self._tasks[key] = task
        self._tasks.move_to_end(key)
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)
        return task


class MachineTime:
    """Machine seconds per prompt token and per output token, from the steps of one model.

    1 s of decode steps with 100 tokens and 1 s of steps with 300 prompt and 100 output tokens:
    0.75 s / 300 per prompt token, 1.25 s / 200 per output token. Idle time is not counted.
    """

    def __init__(self) -> None:
        self._prompt_s = self._answer_s = 0.0
        self._prompt_tokens = self._answer_tokens = 0.0

    def add(self, record: StepRecord) -> None:
        """Add a step; the time of a mixed step is divided by tokens."""
        prompt, decode = record.num_prefill_tokens, record.num_decode_tokens
        if not prompt + decode:
            return
        share = prompt / (prompt + decode)
        self._prompt_s += record.duration_s * share
        self._answer_s += record.duration_s * (1 - share)
        self._prompt_tokens += prompt
        decodes = decode - record.num_drafts - record.num_forced_rows
        self._answer_tokens += max(0.0, decodes * record.tokens_per_decode)

    def seconds(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Return the machine seconds of a request with so many computed and generated tokens."""
        prompt = prompt_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0
        answer = answer_tokens * self._answer_s / self._answer_tokens if self._answer_tokens else 0
        return prompt + answer
