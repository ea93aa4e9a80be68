"""What does it take ranks to add up, and stages to pass rows on? `python benchmarks/rank_sums.py`

Two processes of one machine, rows of `--hidden` numbers of `--dtype`: the median time of a sum over
shared memory and over gloo, and half of the time that rows take there and back by a socket and by
gloo.
The floor of a sum is what copying the same bytes takes: each rank writes one part and reads two.
The four are measured in turns, so a neighbour on the machine does the same to each.
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from common import heading, line
from headway.config.parallel import Parallel
from headway.runtime.parallel.distributed import DistributedGroup, meet
from headway.runtime.parallel.group import Group
from headway.runtime.parallel.meeting import Meeting, sums_at
from headway.runtime.parallel.shared import PATIENCE_S, SharedGroup
from headway.runtime.parallel.stage import SocketLink

ROWS = (1, 8, 32, 128, 512)
Work = Callable[[Tensor], object]


def there_and_back(rank: int, send: Work, receive: Work) -> Work:
    """Rank 1 sends rows to rank 0, which sends them back."""

    def work(x_TH: Tensor) -> None:
        if rank == 0:
            receive(x_TH)
            send(x_TH)
        else:
            send(x_TH)
            receive(x_TH)

    return work


def works(rank: int, shared: Path, meeting: Path, end: socket.socket) -> dict[str, Work]:
    """What is timed, by name."""
    groups: dict[str, Group] = {
        "shared memory": SharedGroup(shared, rank, 2),
        "gloo": DistributedGroup(meeting, rank, 2),
    }
    link, gloo = SocketLink(end, end), meet(meeting.with_suffix(".rows"), rank, 2, PATIENCE_S)
    return {
        **{f"sum, {name}": lambda x, group=group: group.sum([x]) for name, group in groups.items()},
        "rows, socket": there_and_back(rank, link.send, link.receive),
        "rows, gloo": there_and_back(
            rank,
            lambda x: gloo.send([x], 1 - rank, 0).wait(),
            lambda x: gloo.recv([x], 1 - rank, 0).wait(),
        ),
    }


def measure(rank: int, work: Work, x_TH: Tensor, repeats: int) -> float:
    """Median seconds; both ranks call it together."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work(x_TH)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_s(x_TH: Tensor) -> float:
    """Seconds that one copy of the rows takes."""
    other = torch.empty_like(x_TH)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        other.copy_(x_TH)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def run(
    rank: int,
    shared: Path,
    meeting: Path,
    end: socket.socket,
    hidden: int,
    turns: int,
    dtype: torch.dtype,
) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    named = works(rank, shared, meeting, end)
    if rank == 0:
        print(heading(["rows", *(f"{name}, µs" for name in named), "three copies, µs"]))
    for rows in ROWS:
        x_TH = torch.randn(rows, hidden).to(dtype)
        found: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(turns):
            for name, work in named.items():
                each = measure(rank, work, x_TH, max(5, 200 // rows))
                found[name].append(each / 2 if name.startswith("rows") else each)
        if rank == 0:
            medians = [f"{statistics.median(each) * 1e6:.0f}" for each in found.values()]
            print(line([rows, *medians, f"{3 * copy_s(x_TH) * 1e6:.0f}"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    chosen = parser.parse_args()
    in_memory = Meeting(Parallel(size=2))
    shared = sums_at(in_memory.folder, 0)
    ends = socket.socketpair()
    with TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        sizes = chosen.hidden, chosen.turns, getattr(torch, chosen.dtype)
        context = multiprocessing.get_context("fork")
        other = context.Process(target=run, args=(1, shared, meeting, ends[1], *sizes))
        other.start()
        try:
            run(0, shared, meeting, ends[0], *sizes)
        finally:
            other.join(60)
            in_memory.end()


if __name__ == "__main__":
    main()
