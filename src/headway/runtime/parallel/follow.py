"""The process of a rank above 0: it receives plans, runs its part of the forward and reports the
end.

The leader starts `python -m headway.runtime.parallel.follow FD`. The tokens that rank 0 samples
come with the next plan. The process ends when its end of the socket pair is closed.
"""

import signal
import socket
import sys
from pathlib import Path

from headway.config.parallel import Parallel
from headway.core.errors import HeadwayError
from headway.core.orphans import wake_when_orphaned
from headway.runtime.build import WeightSource, build_executor
from headway.runtime.executor import TorchExecutor
from headway.runtime.parallel.frames import Hello, LogitsOrder, Pipe, StepDone, StepOrder
from headway.runtime.parallel.group import RankGroup, RankGroups, RankLostError
from headway.runtime.parallel.meeting import rows_path, splits_path, sums_path
from headway.runtime.parallel.stage import Ends, Half, Link, SocketLink, Stage


def join_groups(parallel: Parallel, meeting: Path, rank: int, parent: int = 0) -> RankGroups:
    """Return (ranks that compute layers together with `rank`, ranks that hold the other parts of
    contexts), None for a rank alone. The transport is that of `parallel`."""
    number, place = divmod(rank, parallel.size)
    stage, part = divmod(number, parallel.context)
    together = sums_path(meeting, number), place, parallel.size
    holders = splits_path(meeting, stage * parallel.size + place), part, parallel.context
    return join_group(*together, parallel, parent), join_group(*holders, parallel, parent)


def join_group(
    path: Path, rank: int, size: int, parallel: Parallel, parent: int
) -> RankGroup | None:
    """Return the group of the ranks that meet at `path`; None for a single rank."""
    if size == 1:
        return None
    if parallel.transport == "gloo":
        from headway.runtime.parallel.distributed import DistributedGroup

        return DistributedGroup(path, rank, size)
    from headway.runtime.parallel.shared import SharedGroup

    return SharedGroup(path, rank, size, parent, num_computing=parallel.num_together)


def stage_of(parallel: Parallel, meeting: Path, rank: int, ends: Ends) -> Stage | None:
    """Return the rank's pipeline stage, or its half of every layer, with its links."""
    if parallel.halves:
        (end,) = (end for end in ends if end is not None)
        return Stage(half=Half(rank, SocketLink(end, end)))
    if parallel.stages == 1:
        return None
    link: Link
    if parallel.transport == "gloo":
        from headway.runtime.parallel.distributed import DistributedLink

        path = rows_path(meeting, parallel.place_of(rank))
        link = DistributedLink(path, rank // parallel.num_together, parallel.stages)
    else:
        link = SocketLink(*ends)
    return Stage(parallel.stage_of(rank), parallel.stages, link)


def follow(pipe: Pipe) -> None:
    """Serve one leader until it closes the connection."""
    hello = pipe.receive_order()
    assert isinstance(hello, Hello)
    parallel, meeting = hello.settings.parallel, Path(hello.meeting)
    groups = join_groups(parallel, meeting, hello.rank, hello.parent)
    before, behind = (socket.socket(fileno=end) if end >= 0 else None for end in hello.ends)
    stage = stage_of(parallel, meeting, hello.rank, (before, behind))
    try:
        executor = build_executor(
            TorchExecutor,
            WeightSource(folder=Path(hello.folder)),
            *(hello.spec, hello.settings, hello.machine),
            groups=groups,
            stage=stage,
        )
    except HeadwayError as error:
        pipe.send(StepDone(str(error), error.cause, error.fix, error.exit_code))
        return
    description = executor.describe()
    pipe.send(StepDone(weight_bytes=description.weight_bytes, kv_bytes=description.kv_bytes))
    while True:
        order = pipe.receive_order()
        if isinstance(order, LogitsOrder):
            executor.answer(order.count)
            continue
        assert isinstance(order, StepOrder)
        try:
            executor.follow(order.plan)
        except RankLostError:
            raise  # every later sum would be wrong
        except Exception as error:  # the leader raised it too and decides what follows
            pipe.send(StepDone(f"{type(error).__name__}: {error}"))
        else:
            is_empty = not order.plan.scheduled
            pipe.send(StepDone(experts_read=0 if is_empty else int(executor.target.experts_read)))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and ends the leader
    wake_when_orphaned()
    try:
        follow(Pipe(socket.socket(fileno=int(sys.argv[1]))))
    except (EOFError, OSError):
        return 0
    except RankLostError as error:
        print(f"headway: a rank ends: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
