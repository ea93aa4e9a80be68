"""Use of the server's cores by other processes and virtual machines, read from /proc.

Two readings of /proc/stat and of the times of the server's own processes give shares of the cores'
time between them. Example: two cores for 1 s are 2 s; the system counts 1.9 s of work and the
server used 1.1 s, so other processes used 0.8 s, 40%. Without /proc there is no figure.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

PROC = Path("/proc")
MAX_PAUSE_S = 2.0
"""Longest pause between two calls whose CPU seconds are attributed to one second."""
MAX_SAMPLE_SPAN_S = 5.0
"""Longest time between two readings that give a sample of the present."""


class CoreUse(msgspec.Struct, kw_only=True):
    """Shares of the time of the server's cores over some seconds.

    `steal_share` is the share of other virtual machines, `others_share` that of other processes.
    `run_queue` is the number of running and waiting tasks per core of the system, the server's own
    tasks included.
    """

    seconds: float
    num_cores: int
    steal_share: float
    others_share: float
    idle_share: float
    run_queue: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """Reading of one moment: clock ticks of the cores since boot, and of the server's processes."""

    at_s: float
    total: int
    idle: int
    steal: int
    own: int
    runnable_per_core: float
    num_cores: int


class CoreWatch:
    """Sampler of the use of the cores between two calls.

    The server's own processes are this one and all its descendants: engines, templates, trials of
    grammars.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        proc: Path = PROC,
        max_seconds: float = MAX_SAMPLE_SPAN_S,
    ) -> None:
        self._now_s, self._proc, self._max_s = now_s, proc, max_seconds
        self._last: CoreTimes | None = None

    def sample(self) -> CoreUse | None:
        """Return the use since the last call; None at the first, after a long pause, without /proc.

        None also where a process of the server ended: its ticks are lost.
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
            own = process_tree(self._proc, os.getpid())
            return CoreTimes(
                at_s=self._now_s(),
                total=sum(sum(each) for each in ticks),
                idle=sum(each[3] + each[4] for each in ticks),
                steal=sum(each[7] for each in ticks),
                own=sum(process_ticks(self._proc, pid) for pid in own),
                runnable_per_core=int(fields["procs_running"]) / num_cores_of(lines),
                num_cores=len(ticks),
            )
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None


class CpuWatch:
    """Meter of the CPU time of this process (all threads) between two calls."""

    def __init__(
        self,
        cpu_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s, self._now_s = cpu_s, now_s
        self._last: tuple[float, float] | None = None

    def seconds(self) -> float:
        """Return CPU seconds since the last call; 0 at the first and after a long pause."""
        before, now = self._last, (self._now_s(), self._cpu_s())
        self._last = now
        if before is None or now[0] - before[0] > MAX_PAUSE_S:
            return 0.0
        return now[1] - before[1]


def share(part: int, whole: int) -> float:
    """Return part / whole, limited to 0 … 1: ticks of 10 ms are not all counted at one moment."""
    return min(max(part / whole, 0.0), 1.0)


def core_ticks(lines: list[str]) -> list[list[int]]:
    """Return (user, nice, system, idle, iowait, irq, softirq, steal) of each allowed core."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    ticks = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "cpu" or not name.startswith("cpu"):
            continue
        if allowed is None or int(name[3:]) in allowed:
            ticks.append([int(value) for value in rest.split()[:8]])
    return ticks


def num_cores_of(lines: list[str]) -> int:
    """Return the number of cores of the system, which its run queue refers to."""
    return sum(line.startswith("cpu") for line in lines) - 1


def process_tree(proc: Path, pid: int) -> set[int]:
    """Return the ids of a process and of its running descendants."""
    tree: set[int] = set()
    pending = {pid}
    while pending:
        one = pending.pop()
        tree.add(one)
        for children in (proc / str(one)).glob("task/*/children"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                pending |= set(map(int, children.read_text(encoding="ascii").split())) - tree
    return tree


def process_ticks(proc: Path, pid: int) -> int:
    """Return user and system ticks of a process and of its ended children; 0 when it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))


def mean_core_use(samples: list[CoreUse]) -> CoreUse | None:
    """Return the means of `samples` weighted by their seconds; None without samples."""
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
