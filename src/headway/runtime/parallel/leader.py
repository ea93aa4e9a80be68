"""The executor of rank 0: it sends each plan to its followers, runs its own part and samples.

All ranks have the same plans and the same sums, so an error is raised by all ranks at the same
place; the engine then retries with half of the batch, as without ranks. A rank that ended, or
raised alone, is out of step with the others: from then on every step raises RankLostError, the
engine's retries fail too, and the engine restarts with new ranks.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from headway.config.parallel import Parallel
from headway.config.resolve import Settings
from headway.core.errors import CapacityError, HeadwayError
from headway.core.machine import Machine
from headway.core.plan import Description, GrammarMasks, StepPlan, StepResult
from headway.runtime.build import WeightSource, build_executor
from headway.runtime.checkpoint import Progress
from headway.runtime.executor import TorchExecutor
from headway.runtime.parallel.follow import join_groups, stage_of
from headway.runtime.parallel.frames import Hello, LogitsOrder, Pipe, StepDone, StepOrder
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.meeting import Meeting
from headway.runtime.parallel.shared import SUM_TIMEOUT_S
from headway.runtime.parallel.stage import Ends
from headway.spec import ModelSpec

START_TIMEOUT_S = 600.0
"""Seconds that a follower may take to read its weights."""


class Follower:
    """Another rank's process, which inherits the sockets `ends`, and the leader's socket."""

    def __init__(self, rank: int, ends: Ends = (None, None)) -> None:
        own, its = socket.socketpair()
        with its:
            command = [sys.executable, "-m", "headway.runtime.parallel.follow", str(its.fileno())]
            descriptors = [its.fileno(), *(end.fileno() for end in ends if end is not None)]
            self.process = subprocess.Popen(command, pass_fds=descriptors, cwd=os.getcwd())
        self.rank, self.pipe = rank, Pipe(own)
        before, behind = (-1 if end is None else end.fileno() for end in ends)
        self.ends = before, behind

    def receive_done(self, limit_s: float) -> StepDone:
        """Return the report of its step. Raises RankLostError if it ended or hangs."""
        try:
            return self.pipe.receive_done(limit_s)
        except (EOFError, OSError) as error:
            raise RankLostError(f"Rank {self.rank} is gone, or hangs: {error!r}.") from error


def stage_sockets(size: int, stages: int) -> list[Ends]:
    """Return for each rank its sockets to ranks rank + size (before) and rank - size (next)."""
    pairs = [socket.socketpair() for _ in range(size * (stages - 1))]
    behind = [*[None] * size, *(of_sender for of_sender, _ in pairs)]
    before = [*(of_receiver for _, of_receiver in pairs), *[None] * size]
    return list(zip(before, behind, strict=True))


class Followers:
    """The ranks above 0. After one is `lost`, every later sum would be wrong.

    `ends` are rank 0's sockets to its neighbour stages. `layer_peers` compute layers and the head
    together with rank 0; `stage` are the other ranks of its stage (these, and those that hold the
    other parts of contexts); `before` are the ranks of earlier stages.
    """

    def __init__(self, parallel: Parallel) -> None:
        pairs: list[Ends] = [(None, None)] * parallel.num_ranks
        if parallel.transport != "gloo":
            pairs = (
                stage_sockets(1, 2)
                if parallel.halves
                else stage_sockets(parallel.num_together, parallel.stages)
            )
        self.ends = pairs[0]
        self.each = [Follower(rank, pairs[rank]) for rank in range(1, parallel.num_ranks)]
        self.layer_peers = self.each[: parallel.size - 1]
        self.stage = self.each[: parallel.num_together - 1]
        self.before = self.each[parallel.num_together - 1 :]
        for end in (end for pair in pairs[1:] for end in pair if end is not None):
            end.close()  # the follower has inherited it
        self.lost: RankLostError | None = None

    def send(
        self, order: StepOrder | LogitsOrder, followers: Sequence[Follower] | None = None
    ) -> None:
        """Send an order to some followers, or to all. Raises RankLostError."""
        if self.lost is not None:
            raise self.lost
        try:
            for follower in self.each if followers is None else followers:
                follower.pipe.send(order)
        except OSError as error:
            raise self.mark_lost(f"A rank is gone: {error!r}.") from error

    def mark_lost(self, why: str) -> RankLostError:
        """Return the error that every order raises from now on."""
        self.lost = RankLostError(why)
        return self.lost


class RankZeroExecutor(TorchExecutor):
    """Rank 0's part, which orders the other ranks to compute their part of the logits."""

    followers: Followers

    def logits(self, hidden_RH: Tensor) -> Tensor:
        if self.settings.parallel.size == 1:
            return super().logits(hidden_RH)
        self.followers.send(LogitsOrder(len(hidden_RH)), self.followers.layer_peers)
        try:
            return super().logits(hidden_RH)
        except Exception as error:  # the other ranks wait for this one
            raise self.followers.mark_lost(str(error)) from error


class LeaderExecutor:
    """`TorchExecutor` of rank 0 of `settings.parallel`; see `core.plan.Executor`."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        machine: Machine,
        progress: Progress | None = None,
    ) -> None:
        self._meeting = Meeting(settings.parallel)
        parallel = self._meeting.parallel
        settings = replace(settings, parallel=parallel)
        self._others = Followers(parallel)
        self.followers = self._others.each
        self.close = weakref.finalize(self, end_followers, self._others, self._meeting)
        try:
            self._start(folder, spec, settings, machine, progress)
        except BaseException:
            self.close()
            raise
        if parallel.transport != "gloo":
            self._meeting.end()  # all ranks have mapped it: after a kill no file remains
        self._is_running = self._has_raised = False
        self._experts_read = 0

    def _start(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        machine: Machine,
        progress: Progress | None,
    ) -> None:
        """Start the executor of rank 0 while the followers start theirs; wait for them."""
        for follower in self.followers:
            follower.pipe.send(
                Hello(
                    folder=str(folder),
                    spec=spec,
                    settings=settings,
                    machine=machine,
                    rank=follower.rank,
                    meeting=str(self._meeting.folder),
                    parent=os.getpid(),
                    ends=follower.ends,
                )
            )
        meeting = self._meeting.folder
        groups = join_groups(settings.parallel, meeting, 0)
        stage = stage_of(settings.parallel, meeting, 0, self._others.ends)
        source = WeightSource(folder=folder, progress=progress)
        self.own = build_executor(
            RankZeroExecutor, source, spec, settings, machine, groups=groups, stage=stage
        )
        self.own.followers = self._others
        own = self.own.describe()
        replies = [StepDone(weight_bytes=own.weight_bytes, kv_bytes=own.kv_bytes)]
        replies += map(self._wait_for_start, self.followers)
        self.weight_bytes = [reply.weight_bytes for reply in replies]
        self.kv_bytes = [reply.kv_bytes for reply in replies]

    def _wait_for_start(self, follower: Follower) -> StepDone:
        try:
            reply = follower.receive_done(START_TIMEOUT_S)
        except RankLostError as error:
            raise CapacityError(
                f"Rank {follower.rank} ended while it read its weights.",
                "Look at its messages above; lower --kv-memory if memory was short.",
            ) from error
        if reply.error:
            failure = HeadwayError(reply.cause, reply.fix)
            failure.exit_code = reply.exit_code
            raise failure
        return reply

    @property
    def awaited(self) -> list[int]:
        """Process ids of the ranks for which rank 0 waits asleep: those of other stages, and those
        that it meets by sockets. In shared memory it polls instead."""
        is_shared = self.own.settings.parallel.transport == "shared"
        return [one.process.pid for one in (self._others.before if is_shared else self.followers)]

    def submit(self, plan: StepPlan) -> None:
        """Start the forward of `plan` on every rank."""
        self._check_followers()
        self._others.send(StepOrder(plan))
        self._forward(plan)

    def _forward(self, plan: StepPlan) -> None:
        """Run rank 0's part of a step that was sent to the other ranks."""
        self._is_running, self._has_raised = True, False
        try:
            self.own.submit(plan)
        except RankLostError as error:
            self._is_running = False
            raise self._others.mark_lost(str(error)) from error
        except Exception:
            self._has_raised = True
            raise

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Sample the tokens of step `step`; followers receive them with the next plan."""
        self.own.sample(step, masks)

    def collect(self) -> StepResult:
        """Return the result of the step sampled last, once all ranks have ended it."""
        self._check_followers()
        result = self.own.collect()
        result.experts_read += self._experts_read
        return result

    def _check_followers(self) -> None:
        """Wait for the last forward of all ranks; raise RankLostError where only some of them
        raised.

        An error while sampling concerns rank 0 only, because nothing is added up there. An error in
        a later stage is no inconsistency either; see `is_inconsistent`.
        """
        self._experts_read = 0
        if not self._is_running:
            return
        self._is_running = False
        try:
            replies = [follower.receive_done(SUM_TIMEOUT_S) for follower in self.followers]
        except RankLostError as error:
            raise self._others.mark_lost(str(error)) from error
        self._experts_read = sum(reply.experts_read for reply in replies)
        bad = [self._has_raised, *(bool(reply.error) for reply in replies)]
        if is_inconsistent(bad, self.own.settings.parallel):
            errors = [reply.error for reply in replies if reply.error] or ["nothing"]
            raise self._others.mark_lost(f"A step raised on some ranks alone; there: {errors[0]}.")

    def describe(self) -> Description:
        """Return the device, the kernels and the bytes of all ranks."""
        description = self.own.describe()
        held = self.weight_bytes, self.kv_bytes
        weights, kv = (", ".join(f"{each / 2**20:.1f}" for each in one) for one in held)
        parallel = self.own.settings.parallel
        why = f"{format_layout(parallel)}; {weights} MiB of weights, {kv} MiB of KV"
        description.kernels["ranks"] = (str(parallel.num_ranks), why)
        description.weight_bytes, description.kv_bytes = sum(self.weight_bytes), sum(self.kv_bytes)
        return description

    def probe(self, budget_s: float) -> None:
        """Measure the ceilings of rank 0's share of the machine."""
        self.own.probe(budget_s)

    def distributions(self) -> list[np.ndarray]:
        """Return `TorchExecutor.distributions`."""
        return self.own.distributions()


def format_layout(parallel: Parallel) -> str:
    """Return how ranks meet, and which part each of them has."""
    if parallel.halves:
        return f"{parallel.transport}, attention on the first, MLPs on the second"
    how, each = [parallel.transport], f" on {parallel.size} ranks" if parallel.size > 1 else ""
    if each:
        how.append(f"sums in {parallel.num_parts} parts")
    if parallel.context > 1:
        how.append(f"a part of each context{each}")
    if parallel.stages > 1:
        of_many = f"{parallel.stages} stages of {parallel.num_together} ranks"
        how.append(of_many if parallel.num_together > 1 else "stages of a pipeline")
    return ", ".join(how)


def is_inconsistent(bad: list[bool], parallel: Parallel) -> bool:
    """Return whether some ranks are out of step with others after these ranks raised.

    All ranks of a stage must have the same outcome, and no stage may succeed behind one that
    raised. Ranks 0 and 1 are the last stage, 2 and 3 the one before: [True, True, False, False] is
    consistent, [True, False, False, False] and [False, False, True, True] are not.
    """
    together = parallel.num_together
    stages = [bad[at : at + together] for at in range(0, len(bad), together)]
    if any(len(set(stage)) > 1 for stage in stages):
        return True
    return any(later < earlier for (later, *_), (earlier, *_) in pairwise(stages))


def end_followers(followers: Followers, meeting: Meeting) -> None:
    """Close the connections and wait for the followers, which then end; kill those that do not."""
    meeting.end()
    for own in followers.ends:
        if own is not None:
            own.close()
    for follower in followers.each:
        follower.pipe.close()
    for follower in followers.each:
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower.process.wait(5)
            continue
        follower.process.kill()
        follower.process.wait()
