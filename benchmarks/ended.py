"""Ends of engines as `replicas.py` makes and follows them: how, when, and who took their place."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import children, get_json

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked to end": signal.SIGTERM}
WAYS = ("killed", "stopped", "hung", "asked to end")
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_ALL = 0x4206, 0x4207, 0x40000000
LOOK_S = 0.05


@dataclass(slots=True)
class Ended:
    """An engine that was ended, and the one in its place; times of the monotonic clock, seconds.

    `again_s` is when the new engine's process began, `ready_s` when it took requests, `answered_s`
    when it had made a step with one: each seen a look late at the most, but for `again_s`.
    """

    way: str
    number: int
    at_s: float
    again_s: float = 0.0
    ready_s: float = 0.0
    answered_s: float = 0.0

    @property
    def load_s(self) -> float:
        """What the new engine took from its process's start until it was ready."""
        return self.ready_s - self.again_s

    @property
    def away_s(self) -> float:
        """From the signal to the first step with a request in the new engine."""
        return self.answered_s - self.at_s


class Fleet:
    """The engines of the server `pid` at `url`, by number."""

    def __init__(self, url: str, pid: int) -> None:
        """The order of the processes is not that of the server's own numbers."""
        self.url, self._pid = url, pid
        self.pids = engines(pid)
        self._away = set[int]()
        """Those that are followed, by the server's numbers."""

    def end(self, number: int, way: str) -> Ended:
        """End an engine in one of the `WAYS`."""
        pid, at_s = self.pids[number], time.monotonic()
        if way in SIGNALS:
            os.kill(pid, SIGNALS[way])
        else:
            threading.Thread(target=hold, args=(busiest(pid),), daemon=True).start()
        return Ended(way, number, at_s)

    async def follow(self, ended: Ended) -> None:
        """Wait until another engine answers in its place; somebody has to go on asking.

        Which number it has is seen where the server says that it is not ready.
        """
        known, number = set(self.pids), -1
        while not ended.answered_s:
            await asyncio.sleep(LOOK_S)
            if not ended.again_s:
                for pid in set(engines(self._pid)) - known:
                    self.pids[ended.number], ended.again_s = pid, began_s(pid)
            told = (await asyncio.to_thread(get_json, f"{self.url}/stats"))["engines"]
            if number < 0:
                away = {at for at, engine in enumerate(told) if not engine["ready"]} - self._away
                number = min(away, default=-1)
                self._away |= {number}
            elif ended.again_s and told[number]["ready"]:
                ended.ready_s = ended.ready_s or time.monotonic()
                if told[number]["num_running"]:
                    ended.answered_s = time.monotonic()
        self._away.discard(number)


def engines(pid: int) -> list[int]:
    """The processes of the server's engines."""
    found = []
    for child in children(pid):
        try:
            if b"headway.assemble" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:  # it has just ended
            continue
    return found


def began_s(pid: int) -> float:
    """When a process began, by the monotonic clock: in the system's ticks of 10 ms."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep_s


def busiest(pid: int) -> int:
    """The thread of a process that has computed most."""

    def ticks(thread: int) -> int:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    return max((int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()), key=ticks)


def hold(thread: int) -> None:
    """Keep a thread of another process where it is until somebody kills that."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(ctypes.c_long(request), thread, None, None):
            why = os.strerror(ctypes.get_errno())
            print(f"thread {thread} is not held: ptrace says {why}", file=sys.stderr)
            return
    while os.WIFSTOPPED(os.waitpid(thread, WAIT_ALL)[1]):
        pass


def told_by_way(ends: Sequence[Ended]) -> list[list[object]]:
    """A row for each way: of its ends the longest time away, beside the load in it."""
    rows: list[list[object]] = []
    for way in dict.fromkeys(ended.way for ended in ends):
        of_way = [ended for ended in ends if ended.way == way]
        worst = max(of_way, key=lambda ended: ended.away_s - ended.load_s)
        rows.append(
            [
                *(way, len(of_way), f"{worst.away_s:.1f} s", f"{worst.load_s:.1f} s"),
                *(f"{worst.away_s - worst.load_s:.1f} s", f"{worst.again_s - worst.at_s:.1f} s"),
            ]
        )
    return rows
