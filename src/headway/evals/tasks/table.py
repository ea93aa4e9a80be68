"""The tasks by name, and which of them are asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import UsageError
from headway.evals.tasks import choices, gsm8k, humaneval, ifeval
from headway.evals.tasks.task import Task
from headway.evals.text import LAMBADA


@dataclass(frozen=True, slots=True)
class Source:
    """A task's file in a data folder, and the function that reads so many of its questions."""

    file: str
    read: Callable[[Path, int], Task]


TASKS = {
    choices.NAME: Source(LAMBADA, choices.read),
    "gsm8k": Source(gsm8k.FILE, gsm8k.read),
    "ifeval": Source(ifeval.FILE, ifeval.read),
    humaneval.NAME: Source(humaneval.FILE, humaneval.read),
}
EXECUTED = frozenset({humaneval.NAME})
"""Tasks whose answers are programs: asked with --run-code alone."""


def named_tasks(names: Sequence[str], data: str, limit: int, run_code: bool) -> list[Task]:
    """The tasks that a user names; UsageError for one that is not known or not at hand.

    Without `run_code` those whose answers would run are left to the text suite.
    """
    found = []
    for name in names:
        if name not in TASKS:
            if not Path(name).is_file():
                raise UsageError(
                    f"--tasks: there is no task and no file {name!r}.",
                    f"{', '.join(TASKS)}, or a file: {choices.EXAMPLE}.",
                )
            found.append(choices.read_own(Path(name), limit))
            continue
        source = TASKS[name]
        if not data or not (Path(data) / source.file).exists():
            raise UsageError(
                f"--tasks {name} reads {source.file} of a data folder.",
                f"--data FOLDER that holds {source.file}.",
            )
        if run_code or name not in EXECUTED:
            found.append(source.read(Path(data), limit))
    return found


def tasks_at_hand(data: str, limit: int, run_code: bool) -> list[Task]:
    """The tasks whose files a data folder has."""
    names = [name for name, source in TASKS.items() if data and (Path(data) / source.file).exists()]
    return named_tasks(names, data, limit, run_code)
