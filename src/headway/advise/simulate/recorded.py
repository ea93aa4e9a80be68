"""The proof that there is one scheduler: a recorded run, and the same plans from it, hash by hash.

`Recorder` runs an engine on a real executor, on a clock that is read at the two moments which a
simulation knows of: when a step begins, and when its result is there. It keeps what came in before
each step, both moments and the result. `replay` gives the same to another engine on a virtual
clock. Plans that differ in one block, one token or one row have another hash: whatever decides by
anything but what was recorded is found.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from headway.core.clock import SystemClock, VirtualClock
from headway.core.plan import Description, Executor, GrammarMasks, StepPlan, StepResult
from headway.core.request import Request
from headway.engine.engine import Engine


class Came(msgspec.Struct, array_like=True):
    """A request, or with `dropped` the number of one whose client left, before step `step`."""

    step: int
    request: Request | None = None
    dropped: int | None = None


class RecordedStep(msgspec.Struct, array_like=True):
    """When a step began and when its result was there, the result, and the hash of its plan."""

    started_s: float
    ended_s: float
    result: StepResult
    plan: str


class Recording(msgspec.Struct):
    """A run as its engine saw it."""

    came: list[Came] = []
    steps: list[RecordedStep] = []


def hash_of(plan: StepPlan) -> str:
    """Of all that the runtime is told."""
    return hashlib.blake2b(msgspec.msgpack.encode(plan), digest_size=16).hexdigest()


class StepClock(SystemClock):
    """The system's time, as of the last `read`."""

    def __init__(self) -> None:
        self._now_s = super().now_s()

    def read(self) -> float:
        """Look at the system's clock."""
        self._now_s = super().now_s()
        return self._now_s

    def now_s(self) -> float:
        return self._now_s


@dataclass(slots=True)
class Recorder:
    """An executor that hands everything on, and writes down plans, results and times."""

    executor: Executor
    clock: StepClock
    recording: Recording = field(default_factory=Recording)
    _plan: str = ""
    _started_s: float = 0.0

    def run(self, engine: Engine, coming: Iterable[tuple[int, Request | int]]) -> Recording:
        """Steps until nothing is left; `coming` has before which step a request comes, or the
        client of one leaves, in that order."""
        waiting = list(coming)
        while waiting or engine.wait_for_work():
            self._started_s = self.clock.read()
            number = len(self.recording.steps)
            while waiting and (waiting[0][0] <= number or not engine.has_work):
                self._take(engine, waiting.pop(0)[1], number)
            engine.step()
            engine.take_refusals()
        return self.recording

    def _take(self, engine: Engine, one: Request | int, number: int) -> None:
        if isinstance(one, int):
            self.recording.came.append(Came(number, dropped=one))
            engine.abort(one)
        else:
            self.recording.came.append(Came(number, one))
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
class Replayed:
    """An executor that says what was recorded, when it was; the truth is `recorded`."""

    clock: VirtualClock
    steps: list[RecordedStep]
    plans: list[str] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(hash_of(plan))

    def sample(self, step: int, masks: GrammarMasks) -> None:
        """What was sampled is known."""

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
    """(plan as recorded, plan as made now) of each step, as far as they are the same, and the first
    that differs: from there on the results are of another run."""
    clock = VirtualClock()
    replayed = Replayed(clock, recording.steps)
    engine = make(replayed, clock)
    pairs: list[tuple[str, str]] = []
    coming = list(recording.came)
    for number, step in enumerate(recording.steps):
        clock.advance_to(step.started_s)
        while coming and coming[0].step <= number:
            one = coming.pop(0)
            if one.request is not None:
                engine.add(one.request)
            elif one.dropped is not None:
                engine.abort(one.dropped)
        engine.step()
        engine.take_refusals()
        pairs.append((step.plan, replayed.plans[-1]))
        if pairs[-1][0] != pairs[-1][1]:
            break
    return pairs
