"""Does a busy server get slower with its age? Steady traffic, half minute by half minute.

    python benchmarks/aging.py headway-tiny --rate 400 --minutes 5

sends `--rate` short requests a second to one server, and tells of each half minute the share in
their objectives, the CPU time of the server's process for a request, what its engine takes of a
core, and what the server's process holds in memory. What is kept of requests that are over (five
minutes of them, 100,000 tasks) costs more the longer the server runs, if it costs anything: a
server that does not age says the same in the last row as in the first.
"""

import argparse
import os
import time
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from common import children, cpu_s, markdown, serving
from headway.bench.latency import latency
from headway.bench.report import misses
from headway.core.slo import parse_slo
from served import Kind, Stream, conversations, drive, objectives, poisson_times

SPELL_S, AFTER_S = 30.0, 5.0
"""Of a row of the table, and how much longer there are requests than rows."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """What two processes have used, and one holds: CPU seconds and bytes."""

    server_s: float
    engine_s: float
    rss: int


def held(server: int, engine: int) -> Held:
    """That of a server's process and its engine's at this moment."""
    pages = int(Path(f"/proc/{server}/statm").read_text().split()[1])
    return Held(cpu_s(server), cpu_s(engine), pages * PAGE)


def busiest(pids: list[int]) -> int:
    """The one that has used most."""
    return max(pids, key=cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--slo", type=parse_slo, default="ttft=250ms,tpot=5ms")
    parser.add_argument("--flags", default="--threads 1 --max-num-seqs 64 --no-log-requests")
    given = parser.parse_args()
    seconds = 60 * given.minutes
    kind = Kind(name="chat", share=1, prompt="uniform:20-60", output="uniform:20-60", slo=given.slo)
    times = poisson_times(given.rate, int(given.rate * (seconds + AFTER_S)), 0)
    told: list[Held] = []
    flags = f"{given.flags} {objectives([kind])}".split()
    stream = Stream(conversations=conversations([kind], times, 0))
    with serving(given.folder, *flags) as (url, pid):
        watch, over = watching(pid, told)
        driven = drive(url, [stream], seed=0, drain_s=20.0)
        over.set()
        watch.join()
    rows = []
    for number, (a, b) in enumerate(pairwise(told)):
        due = [x for x in driven.exchanges[0] if number <= x.scheduled_s / SPELL_S < number + 1]
        if not due:
            continue
        timed = [(x, latency(x)) for x in due]
        met = sum(t is not None and not misses(given.slo, x, t) for x, t in timed)
        rows.append(
            [
                f"{SPELL_S * number:.0f} s",
                f"{met / len(due):.1%}",
                f"{1e3 * (b.server_s - a.server_s) / len(due):.2f} ms",
                f"{(b.server_s - a.server_s) / SPELL_S:.0%}",
                f"{(b.engine_s - a.engine_s) / SPELL_S:.0%}",
                f"{b.rss / 2**20:.0f} MiB",
            ]
        )
    columns = ["from", "in SLO", "CPU a request", "server", "engine", "held"]
    print(markdown(columns, rows))


def watching(pid: int, told: list[Held]) -> tuple[Thread, Event]:
    """Appends to `told` now and every `SPELL_S`, until it is over."""
    engine, over = busiest(children(pid)), Event()

    def watch() -> None:
        began_s = time.monotonic()
        while not over.wait(began_s + SPELL_S * len(told) - time.monotonic()):
            told.append(held(pid, engine))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    return thread, over


if __name__ == "__main__":
    main()
