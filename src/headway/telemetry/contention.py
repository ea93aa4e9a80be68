"""Who else uses the cores that we compute on, as /proc tells it.

Two readings of /proc/stat and of our own processes' times give shares of our cores' time between
them. Two cores for 1 s are 2 s: the system counts 1.9 s of work, we used 1.1 s, so that others had
0.8 s, 40%. On a system without /proc nothing is known, and nothing is said.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

PROC = Path("/proc")
MOST_PAUSE_S = 2.0
"""Between two calls, so that what was computed belongs to about one second."""
MAX_SECONDS = 5.0
"""Readings further apart say nothing of the moment that is asked about."""


class CoreUse(msgspec.Struct, kw_only=True):
    """Shares of our cores' time over some seconds.

    `steal_share` went to other virtual machines, `others_share` to processes that are not ours,
    `idle_share` to nobody. `run_queue` counts tasks that ran or waited for a core, ours too, for
    each core of the system.
    """

    seconds: float
    num_cores: int
    steal_share: float
    others_share: float
    idle_share: float
    run_queue: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """One moment: clock ticks of our cores since they started, and of our processes."""

    at_s: float
    total: int
    idle: int
    steal: int
    own: int
    runnable_per_core: float
    num_cores: int


class CoreWatch:
    """Tells between two calls who used the cores.

    Ours is this process and all that it has started: engines, templates, trials of grammars.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        proc: Path = PROC,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._now_s, self._proc, self._max_s = now_s, proc, max_seconds
        self._last: CoreTimes | None = None

    def sample(self) -> CoreUse | None:
        """Since the last call; None at the first, after a long pause and where nothing is known.

        A process of ours that has ended since takes its ticks along: then it says nothing either.
        """
        before, self._last = self._last, self._read()
        now = self._last
        if before is None or now is None or now.num_cores != before.num_cores:
            return None
        total, seconds = now.total - before.total, now.at_s - before.at_s
        own = now.own - before.own
        if total <= 0 or own < 0 or not 0 < seconds <= self._max_s:
            return None
        steal, idle = now.steal - before.steal, now.idle - before.idle
        return CoreUse(
            seconds=seconds,
            num_cores=now.num_cores,
            steal_share=share(steal, total),
            others_share=share(total - steal - idle - own, total),
            idle_share=share(idle, total),
            run_queue=now.runnable_per_core,
        )

    def _read(self) -> CoreTimes | None:
        try:
            lines = (self._proc / "stat").read_text(encoding="ascii").splitlines()
            ticks = core_ticks(lines)
            fields = dict(line.split()[:2] for line in lines if line.startswith("procs_running"))
            return CoreTimes(
                at_s=self._now_s(),
                total=sum(sum(each) for each in ticks),
                idle=sum(each[3] + each[4] for each in ticks),
                steal=sum(each[7] for each in ticks),
                own=sum(process_ticks(self._proc, pid) for pid in family(self._proc, os.getpid())),
                runnable_per_core=int(fields["procs_running"]) / num_cores_of(lines),
                num_cores=len(ticks),
            )
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None


class CpuWatch:
    """Tells what this process alone has computed between two calls, all of its threads."""

    def __init__(
        self,
        cpu_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s, self._now_s = cpu_s, now_s
        self._last: tuple[float, float] | None = None

    def seconds(self) -> float:
        """CPU seconds since the last call; 0 at the first and after a pause, of which nobody knows
        what came in it."""
        before, now = self._last, (self._now_s(), self._cpu_s())
        self._last = now
        if before is None or now[0] - before[0] > MOST_PAUSE_S:
            return 0.0
        return now[1] - before[1]


def share(part: int, whole: int) -> float:
    """Between 0 and 1: the system counts in ticks of 10 ms, and not all at one moment."""
    return min(max(part / whole, 0.0), 1.0)


def core_ticks(lines: list[str]) -> list[list[int]]:
    """User, nice, system, idle, iowait, irq, softirq and steal of each core that we may use."""
    may = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    found = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name.startswith("cpu") and name != "cpu" and (may is None or int(name[3:]) in may):
            found.append([int(value) for value in rest.split()[:8]])
    return found


def num_cores_of(lines: list[str]) -> int:
    """All cores of the system, which its run queue is of."""
    return sum(line.startswith("cpu") for line in lines) - 1


def family(proc: Path, pid: int) -> set[int]:
    """A process and all that it and its children have started, of what still runs."""
    found: set[int] = set()
    left = {pid}
    while left:
        one = left.pop()
        found.add(one)
        for children in (proc / str(one)).glob("task/*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended since
                left |= set(map(int, children.read_text(encoding="ascii").split())) - found
    return found


def process_ticks(proc: Path, pid: int) -> int:
    """User and system time of a process and of its children that have ended; 0 when it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))


def over(samples: list[CoreUse]) -> CoreUse | None:
    """Means by time; None of none."""
    seconds = sum(each.seconds for each in samples)
    if not seconds:
        return None

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) * each.seconds for each in samples)) / seconds

    names = ("steal_share", "others_share", "idle_share", "run_queue")
    return CoreUse(
        seconds=seconds,
        num_cores=samples[-1].num_cores,
        **{name: mean(name) for name in names},
    )
