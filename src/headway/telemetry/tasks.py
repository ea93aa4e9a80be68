"""Cost per successful task: what was spent on tasks that were judged, by those that succeeded.

    task t1   0.02 $ + a retry of 0.02 $    success
    task t2   0.02 $                        no success
    cost per success = 0.06 $; a task that nobody judges counts for neither

Spend and success are kept in all, by key, by task class and by route; a task counts once in each
of them that it touched, however many requests it took.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from headway.core.errors import RequestError
from headway.telemetry.snapshot import TaskCost

MAX_TASKS = 100_000
MAX_GROUPS = 1000
"""Of one dimension; what comes later counts as `other`."""
OTHER = "other"
DIMENSIONS = ("all", "key", "task", "route")
MAX_ID, MAX_SOURCE = 200, 64
Group = tuple[str, str]


class Outcome(msgspec.Struct, kw_only=True):
    """POST /v1/outcomes."""

    task_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
    success: bool
    score: float | None = None
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SOURCE)] = "api"


@dataclass(slots=True)
class Totals:
    """What one group has spent and reached; `judged` dollars are of tasks with an outcome."""

    requests: int = 0
    dollars: float = 0.0
    judged: float = 0.0
    succeeded: int = 0
    failed: int = 0

    @property
    def cost_per_success(self) -> float | None:
        """Dollars; None before a task has succeeded."""
        return self.judged / self.succeeded if self.succeeded else None


class Task(msgspec.Struct, gc=False):
    """One task: dollars by group, and its outcome once there is one.

    100,000 of them are kept, so the garbage collector visits neither them nor their dollars: a
    dict is not tracked while its keys are not, and a group is one tuple, old and of text alone.
    """

    dollars: dict[Group, float] = {}
    success: bool | None = None


class Tasks:
    """The tasks that are remembered, the least recently touched go first, and the totals."""

    def __init__(self) -> None:
        self.totals: dict[Group, Totals] = {}
        self._groups: dict[Group, Group] = {}
        """Each to the one tuple that stands for it in all tasks."""
        self._tasks: OrderedDict[tuple[str, str], Task] = OrderedDict()

    def spend(self, owner: str, task_id: str, kind: str, route: str, dollars: float) -> None:
        """A request of a task is over; its attempts and retries are in `dollars`."""
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
        """The outcome of a task, the last one holds; False where nothing is known of the task."""
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

    def rows(self) -> Iterator[tuple[str, str, Totals]]:
        """(dimension, name, totals) of each group."""
        for (dimension, name), totals in self.totals.items():
            yield dimension, name, totals

    def dearest(self, most: int) -> list[TaskCost]:
        """What `/stats` shows: the groups that cost most, at most so many."""
        found = sorted(self.rows(), key=lambda row: (row[0] != "all", -row[2].dollars))
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
            for dimension, name, totals in found[:most]
        ]

    def _task(self, owner: str, task_id: str) -> Task:
        task = self._tasks.setdefault((owner, task_id), Task())
        self._tasks.move_to_end((owner, task_id))
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)
        return task

    def _groups_of(self, owner: str, kind: str, route: str) -> list[Group]:
        found = []
        for group in zip(DIMENSIONS, ("", owner, kind, route), strict=True):
            if group not in self.totals:
                many = sum(dimension == group[0] for dimension, _ in self.totals) >= MAX_GROUPS
                group = (group[0], OTHER) if many else group
                self.totals.setdefault(group, Totals())
            found.append(self._groups.setdefault(group, group))
        return found

    def check_integrity(self) -> None:
        """Totals are the sums of the tasks, as long as none was forgotten."""
        for totals in self.totals.values():
            assert totals.succeeded >= 0 and totals.failed >= 0
            assert totals.judged <= totals.dollars + 1e-9


def count(totals: Totals, success: bool, by: int) -> None:
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
    """The task of a request that a client's library sends again: that of its first try."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, int], str] = OrderedDict()

    def task_of(self, owner: str, body_hash: int, is_retry: bool, fresh: str) -> str:
        """`fresh` for a first try, else the task of the body that was sent before."""
        key = owner, body_hash
        known = self._tasks.get(key) if is_retry else None
        task = known or fresh
        self._tasks[key] = task
        self._tasks.move_to_end(key)
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)
        return task
