"""Whether a silent process was let run: what Linux tells of its threads in /proc.

A stopped process (SIGSTOP) or one whose threads all sleep has no thread that could run. On a busy
machine a thread that could run waits for a processor; `schedstat` counts that wait when it ends,
and until then the thread's state is R while its processor time stands still:

    idle machine, busy loop    R, ran 0.25 s of 0.25 s     waited 0
    64 others on two cores     R, ran 0.01 s of 0.25 s     waited 0.24 s
    stopped                    T, ran 0                    waited 0
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
NS = 1e-9


class Thread(NamedTuple):
    """A thread at one moment: its processor time, its wait for processors, whether it could run."""

    ran_s: float
    waited_s: float
    is_runnable: bool


class RunQueue:
    """The threads of one process, from look to look."""

    def __init__(self) -> None:
        self._before: dict[str, Thread] = {}

    def waited_s(self, pid: int, seconds: float) -> float:
        """Of the `seconds` since the last look, the longest that a thread waited for a processor.

        0 at the first look, and where the system does not tell.
        """
        now, found_s = threads_of(pid), 0.0
        for name, thread in now.items():
            before = self._before.get(name)
            if before is None:
                continue
            waited_s = thread.waited_s - before.waited_s
            if thread.is_runnable:
                waited_s = max(waited_s, seconds - (thread.ran_s - before.ran_s))
            found_s = max(found_s, min(waited_s, seconds))
        self._before = now
        return found_s


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, SIGTSTP, a debugger); False without /proc."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def threads_of(pid: int) -> dict[str, Thread]:
    """Each thread of a process by its id; {} where there is no such process, or no /proc."""
    found: dict[str, Thread] = {}
    with contextlib.suppress(OSError):
        for folder in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                ran, waited, _ = (folder / "schedstat").read_text().split()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                found[folder.name] = Thread(int(ran) * NS, int(waited) * NS, state == "R")
    return found
