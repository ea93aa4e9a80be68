"""Proof that simulation and server run one scheduler: a recorded run gives the same plans again.

`RunRecorder` runs an engine on a real executor, on a clock that is read only at the two moments
that a simulation knows: when a step begins, and when its result is there. It records the requests
before each step, both times and the result. `replay` gives the same to another engine on a virtual
clock. Plans that differ in one block, one token or one row have another hash, so any decision that
depends on something unrecorded is found.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from headway.core.clock import SystemClock, VirtualClock
from headway.core.plan import Description, Executor, GrammarMasks, StepPlan, StepResult
from headway.core.request import Request
from headway.engine.engine import Engine


class RecordedInput(msgspec.Struct, array_like=True):
    """A request before step `step`, or with `dropped` the number of a request whose client left."""

    step: int
    request: Request | None = None
    dropped: int | None = None


class RecordedStep(msgspec.Struct, array_like=True):
    """Start and end of a step, its result, and the hash of its plan."""

    started_s: float
    ended_s: float
    result: StepResult
    plan: str


class Recording(msgspec.Struct):
    """A run as its engine saw it."""

    inputs: list[RecordedInput] = []
    steps: list[RecordedStep] = []


def hash_of(plan: StepPlan) -> str:
    """Return the hash of everything that the runtime receives."""
    return hashlib.blake2b(msgspec.msgpack.encode(plan), digest_size=16).hexdigest()


class StepClock(SystemClock):
    """The system's time at the last `read`."""

    def __init__(self) -> None:
        self._now_s = super().now_s()

    def read(self) -> float:
        """Read the system's clock."""
        self._now_s = super().now_s()
        return self._now_s

    def now_s(self) -> float:
        return self._now_s


@dataclass(slots=True)
class RunRecorder:
    """An executor that passes everything on, and records plans, results and times."""

    executor: Executor
    clock: StepClock
    recording: Recording = field(default_factory=Recording)
    _plan: str = ""
    _started_s: float = 0.0

    def run(self, engine: Engine, coming: Iterable[tuple[int, Request | int]]) -> Recording:
        """Run steps until no work is left.

        `coming` has, in order, the step before which a request comes, or before which its client
        leaves.
        """
        waiting = list(coming)
        while waiting or engine.wait_for_work():
            self._started_s = self.clock.read()
            number = len(self.recording.steps)
            while waiting and (waiting[0][0] <= number or not engine.has_work):
                self._take(engine, waiting.pop(0)[1], number)
            engine.step()
            engine.drain_refusals()
        return self.recording

    def _take(self, engine: Engine, one: Request | int, number: int) -> None:
        if isinstance(one, int):
            self.recording.inputs.append(RecordedInput(number, dropped=one))
            engine.abort(one)
        else:
            self.recording.inputs.append(RecordedInput(number, one))
            engine.add(one)

    def submit(self, plan: StepPlan) -> None:
        self._plan = hash_of(plan)
        self.executor.submit(plan)

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self.executor.sample(step, masks)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        ended_s = self.clock.read()
        self.recording.steps.append(RecordedStep(self._started_s, ended_s, result, self._plan))
        return result

    def describe(self) -> Description:
        return self.executor.describe()

    def probe(self, budget_s: float) -> None:
        self.executor.probe(budget_s)


@dataclass(slots=True)
class ReplayExecutor:
    """An executor that returns the recorded results at the recorded times."""

    clock: VirtualClock
    steps: list[RecordedStep]
    plans: list[str] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(hash_of(plan))

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Do nothing: the samples are recorded."""

    def collect(self) -> StepResult:
        step = self.steps[len(self.plans) - 1]
        self.clock.advance_to(step.ended_s)
        return step.result

    def describe(self) -> Description:
        return Description(device="recorded")

    def probe(self, budget_s: float) -> None:
        """There is nothing to measure."""


def replay(
    recording: Recording, make: Callable[[Executor, VirtualClock], Engine]
) -> list[tuple[str, str]]:
    """Return (recorded plan, new plan) of each step until the first difference, that one included.

    After a difference the recorded results belong to another run.
    """
    clock = VirtualClock()
    executor = ReplayExecutor(clock, recording.steps)
    engine = make(executor, clock)
    pairs: list[tuple[str, str]] = []
    waiting = list(recording.inputs)
    for number, step in enumerate(recording.steps):
        clock.advance_to(step.started_s)
        while waiting and waiting[0].step <= number:
            message = waiting.pop(0)
            if message.request is not None:
                engine.add(message.request)
            elif message.dropped is not None:
                engine.abort(message.dropped)
        engine.step()
        engine.drain_refusals()
        pairs.append((step.plan, executor.plans[-1]))
        if pairs[-1][0] != pairs[-1][1]:
            break
    return pairs
