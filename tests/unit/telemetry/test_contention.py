"""Who else uses the cores: figures of a made-up /proc, and a process that really spins."""

import os
import signal
import subprocess
import sys
import time

import pytest

from headway.telemetry.contention import PROC, CoreUse, CoreWatch, mean_core_use, process_tree
from headway.telemetry.verdict import CONTENTION, THRESHOLDS
from telemetry_cases import VirtualClock, step, telemetry

SPINNING = "print(flush=True)\nwhile True: pass"
STRANGERS = f"""
import subprocess, sys
for _ in range(int(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", {SPINNING!r}], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
"""
"""Starts processes that spin and ends: they are nobody's children then."""


class Proc:
    """A /proc of two cores; ticks of 10 ms."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.user, self.idle, self.steal, self.running = [0, 0], [0, 0], [0, 0], 1
        self.own = {os.getpid(): 0}
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def write(self):
        rows = [
            f"cpu{i} {self.user[i]} 0 0 {self.idle[i]} 0 0 0 {self.steal[i]} 0 0" for i in (0, 1)
        ]
        text = "\n".join(["cpu 1 2 3 4 5 6 7 8 9 0", *rows, f"procs_running {self.running}"])
        (self.folder / "stat").write_text(text)
        for pid, ticks in self.own.items():
            (self.folder / str(pid)).mkdir(exist_ok=True)
            fields = [f"{pid} (a name) of) R", *map(str, range(1, 11)), f"{ticks} 0 0 0"]
            (self.folder / str(pid) / "stat").write_text(" ".join(fields))
        task = self.folder / str(os.getpid()) / "task" / "1"
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text("77 " if 77 in self.own else "")

    def passes(self, clock, *, user, own, steal=0, runnable=1):
        """A second in which both cores worked `user` ticks in all, ours `own` of them."""
        clock.advance(1.0)
        for i in (0, 1):
            self.user[i] += user // 2
            self.steal[i] += steal // 2
            self.idle[i] += 100 - (user + steal) // 2
        self.own[os.getpid()] += own // 2
        self.own[77] = self.own.get(77, 0) + own - own // 2
        self.running = runnable
        self.write()


@pytest.fixture
def proc(tmp_path, monkeypatch):
    found = Proc(tmp_path, monkeypatch)
    found.write()
    return found


def test_shares_of_our_cores(proc):
    """The docstring's example: 190 of 200 ticks of work, 110 of them ours and our engine's."""
    clock = VirtualClock()
    proc.own[77] = 0
    proc.write()
    watch = CoreWatch(clock.now_s, proc.folder)
    assert watch.sample() is None, "the first has nothing before it"
    proc.passes(clock, user=190, own=110, runnable=5)
    assert watch.sample() == CoreUse(
        seconds=1.0,
        num_cores=2,
        steal_share=0.0,
        others_share=0.4,
        idle_share=0.05,
        run_queue=2.5,
    )
    proc.passes(clock, user=100, own=100, steal=60)
    found = watch.sample()
    assert found.steal_share == pytest.approx(0.3) and found.others_share == 0


def test_it_says_nothing_where_nothing_is_known(proc, tmp_path_factory):
    clock = VirtualClock()
    elsewhere = CoreWatch(clock.now_s, proc=tmp_path_factory.mktemp("no") / "proc")
    empty = tmp_path_factory.mktemp("empty")
    (empty / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")  # as in a sandbox that hides it
    hidden = CoreWatch(clock.now_s, proc=empty)
    for watch in (elsewhere, hidden):
        assert watch.sample() is None
        clock.advance(1)
        assert watch.sample() is None
    watch = CoreWatch(clock.now_s, proc.folder)
    watch.sample()
    proc.passes(clock, user=100, own=50)
    clock.advance(60)
    assert watch.sample() is None, "a minute's mean says nothing of now"
    proc.own[77] = 0  # a new engine in the place of one that had worked
    proc.passes(clock, user=100, own=0)
    assert watch.sample() is None


def test_means_are_by_time():
    first = CoreUse(
        seconds=1, num_cores=2, steal_share=0.4, others_share=0, idle_share=0, run_queue=4
    )
    second = CoreUse(
        seconds=3, num_cores=2, steal_share=0, others_share=0, idle_share=0, run_queue=0
    )
    found = mean_core_use([first, second])
    assert found.steal_share == pytest.approx(0.1) and found.run_queue == 1 and found.seconds == 4
    assert mean_core_use([]) is None


def test_a_window_has_the_verdict(proc):
    """The same steps, with the cores to ourselves and without."""
    clock = VirtualClock()
    model = telemetry(clock)
    model.core_watch = CoreWatch(clock.now_s, proc.folder)
    kinds = []
    for others in (0, 90):
        for number in range(12):
            proc.passes(clock, user=100 + others, own=100, runnable=2 + bool(others) * 2)
            for _ in range(99):
                model.on_step(step(number))
        kinds.append(model.window(10).verdict.kind)
        clock.advance(1)
    assert kinds[0] != CONTENTION and kinds[1] == CONTENTION
    assert model.window(10).cores.others_share > 0.3
    assert b'headway:bottleneck{engine="0",kind="contention",model_name="made-up"} 1.0' in (
        model.render()
    )


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="this system has no /proc/stat")
def test_a_process_that_spins_beside_us_is_seen():
    """As many as would fill the cores twice; we wait until it shows, however long that takes."""
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", STRANGERS, str(2 * cores)]
    spinning = [int(pid) for pid in subprocess.check_output(command, text=True).split()]
    try:
        watch = CoreWatch(time.monotonic)
        while True:  # the test's own timeout is the limit
            found = watch.sample()
            seen = found is not None and found.others_share > THRESHOLDS["others_share"]
            if seen and found.run_queue > THRESHOLDS["run_queue"]:
                break
            time.sleep(0.1)
    finally:
        for pid in spinning:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="this system has no /proc")
def test_what_we_start_is_ours():
    """A child, and one of its own that spins, for as long as they run: nobody else's time."""
    ours = process_tree(PROC, os.getpid())
    command = [sys.executable, "-c", STRANGERS + "\nsys.stdin.read()", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        try:
            assert {child.pid, grandchild} <= process_tree(PROC, os.getpid()) - ours
            child.stdin.close()
            child.wait()
            assert child.pid not in process_tree(PROC, os.getpid())
        finally:
            os.kill(grandchild, signal.SIGKILL)
