"""The tasks by name, and how they are selected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import UsageError
from headway.evals.tasks import choices, gsm8k, humaneval, ifeval
from headway.evals.tasks.task import EvalTask
from headway.evals.text import LAMBADA


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A task's file in a data folder, and the function that reads a number of its questions."""

    file: str
    read: Callable[[Path, int], EvalTask]


TASKS = {
    choices.NAME: TaskSource(LAMBADA, choices.read),
    "gsm8k": TaskSource(gsm8k.FILE, gsm8k.read),
    "ifeval": TaskSource(ifeval.FILE, ifeval.read),
    humaneval.NAME: TaskSource(humaneval.FILE, humaneval.read),
}
CODE_TASKS = frozenset({humaneval.NAME})
"""Tasks whose answers are programs, which run only with --run-code."""


def named_tasks(names: Sequence[str], data: str, limit: int, run_code: bool) -> list[EvalTask]:
    """Return the tasks that a user names; raises UsageError if one is unknown or its file is
    missing.

    Without `run_code` tasks of CODE_TASKS are skipped; the text suite scores them.
    """
    tasks = []
    for name in names:
        if name not in TASKS:
            if not Path(name).is_file():
                raise UsageError(
                    f"--tasks: there is no task and no file {name!r}.",
                    f"{', '.join(TASKS)}, or a file: {choices.EXAMPLE}.",
                )
            tasks.append(choices.read_own(Path(name), limit))
            continue
        source = TASKS[name]
        if not data or not (Path(data) / source.file).exists():
            raise UsageError(
                f"--tasks {name} reads {source.file} of a data folder.",
                f"--data FOLDER that holds {source.file}.",
            )
        if run_code or name not in CODE_TASKS:
            tasks.append(source.read(Path(data), limit))
    return tasks


def tasks_at_hand(data: str, limit: int, run_code: bool) -> list[EvalTask]:
    """Return the tasks whose files are in the data folder."""
    names = [name for name, source in TASKS.items() if data and (Path(data) / source.file).exists()]
    return named_tasks(names, data, limit, run_code)
