"""Liveness of an engine process: its heartbeats, and whether Linux let its threads run.

A process that hangs computes nothing, or takes no messages (`Heartbeat`). A process that is silent
may only lack a processor (`RunQueue`): on a busy machine a runnable thread waits, and `schedstat`
counts that wait when it ends; until then the state is R while the processor time stands still:

    idle machine, busy loop    R, ran 0.25 s of 0.25 s     waited 0
    64 others on two cores     R, ran 0.01 s of 0.25 s     waited 0.24 s
    stopped (SIGSTOP)          T, ran 0                    waited 0
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from headway.engine.messages import BEAT_INTERVAL_S, Beat

PROC = Path("/proc")
NS = 1e-9
IDLE = Beat(0.0, 0.0)
HANG_FACTOR = 10
"""Factor for steps that compute. A step without computation hangs after --step-timeout. A step that
computes hangs after --step-timeout of computing if it is also this many times longer than the
longest before, or after this many times --step-timeout on a machine that gives it no processor."""


class Heartbeat:
    """Last heartbeat of an engine process, and the time for which it has not taken messages.

    A process that is blocked between two steps is not busy, but takes no messages. Beats every
    0.5 s, with a message sent between the first two of them:

        taken before, and since    4 of 4, 4 of 5, 4 of 5, 4 of 5
        waits                      0, 0, 0.5 s, 1 s
    """

    def __init__(self) -> None:
        self.last = IDLE
        self.num_sent = 0
        """Number of messages sent to the process; the beats report how many it has taken."""
        self._num_sent_before, self._waits_s = 0, 0.0

    def record(self, beat: Beat) -> None:
        """Take a heartbeat."""
        waits = beat.num_received == self.last.num_received < self._num_sent_before
        self._waits_s = self._waits_s + BEAT_INTERVAL_S if waits and not beat.busy_s else 0.0
        self.last, self._num_sent_before = beat, self.num_sent

    def fault(self, step_timeout_s: float) -> str | None:
        """Return the reason why a ready process does not advance, or None."""
        beat = self.last
        if beat.still_s >= step_timeout_s:
            return f"computed nothing of its step for {beat.still_s:.1f} s"
        if self._waits_s >= step_timeout_s:
            return f"took no message for {self._waits_s:.1f} s"
        longest_s = max(step_timeout_s, HANG_FACTOR * beat.longest_s)
        most_s = HANG_FACTOR * max(step_timeout_s, beat.longest_s)
        if beat.computed_s > longest_s or beat.busy_s > most_s:
            return f"was in one step for {beat.busy_s:.1f} s"
        return None


class Thread(NamedTuple):
    """State of a thread at one moment: processor time, waiting time for processors, runnable."""

    ran_s: float
    waited_s: float
    is_runnable: bool


class RunQueue:
    """Waiting time of the threads of one process for processors, between two calls."""

    def __init__(self) -> None:
        self._before: dict[str, Thread] = {}

    def waited_s(self, pid: int, seconds: float) -> float:
        """Return the longest time that a thread waited for a processor in the last `seconds`.

        0 at the first call, and without /proc.
        """
        now, longest_s = threads_of(pid), 0.0
        for name, thread in now.items():
            before = self._before.get(name)
            if before is None:
                continue
            waited_s = thread.waited_s - before.waited_s
            if thread.is_runnable:
                waited_s = max(waited_s, seconds - (thread.ran_s - before.ran_s))
            longest_s = max(longest_s, min(waited_s, seconds))
        self._before = now
        return longest_s


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, SIGTSTP, a debugger); False without /proc."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def threads_of(pid: int) -> dict[str, Thread]:
    """Return thread id → thread of a process; {} without such a process or without /proc."""
    threads: dict[str, Thread] = {}
    with contextlib.suppress(OSError):
        for folder in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                ran, waited, _ = (folder / "schedstat").read_text().split()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                threads[folder.name] = Thread(int(ran) * NS, int(waited) * NS, state == "R")
    return threads
