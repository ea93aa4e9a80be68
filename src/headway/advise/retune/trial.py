"""The traffic of late, simulated with the present settings and with others.

All settings get the same arrivals, the same requests that are under way when it begins and the same
moments of the machine (common random numbers), so a difference is the settings'. Whether the
simulation of the present settings is right is seen on the requests themselves: the server has
served them.

    of 1,560 requests    seen 66% in SLO, simulated 61%: what it says of others is heard
                         seen 66% in SLO, simulated 95%: it is not
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import fmean

import numpy as np

from headway.advise.retune.candidates import candidates, finer
from headway.advise.retune.gain import gained, loser
from headway.advise.retune.pace import Steps
from headway.advise.retune.question import Answer, Question
from headway.advise.retune.replay import Replay, Scene, Seen, begun_at, completed
from headway.advise.simulate.machine import Machinery
from headway.advise.what_if.case import LEAST_REQUESTS, LEAST_STEPS, Case, case_of
from headway.bench.load import quiet_gc
from headway.core.errors import UsageError
from headway.core.live_settings import Changes, with_changes
from headway.core.slo import DEFAULT_CLASS
from headway.telemetry.traffic import Followed

PROPOSE_CPU_S, JUDGE_CPU_S = 8.0, 1.0
"""About what a question may compute: so much of the traffic is simulated, of all that is told."""
STEP_CPU_S, TOKEN_CPU_S, REQUEST_CPU_S, QUEUED_CPU_S = 1e-4, 1e-5, 3e-4, 1.5e-6
"""About what a simulated step, a token of it and a request take; the last is for each that waits,
at each step and each newcomer."""
LEAST_S = 2.0
"""Of the traffic; where less can be simulated nothing is."""
ROUNDS = (0.25, 0.5, 1.0)
"""Of the traffic: on the first part all are tried, on the second the best third, on all of it the
best two."""
KEPT, FINALISTS, FINER, RUNS = 1 / 3, 2, 2, 1
MOST_TAIL = 0.2
"""Those that came in the last seconds are not counted, for their fate is open: as many as the
longest objective for a first token, at most this share of the traffic."""
TRUSTED = 0.15
"""The simulation of the present settings may be off what was seen by so many of the requests."""
LEAST_GAIN = 0.03
"""What a change must promise."""


@dataclass(slots=True)
class Trial:
    """One question's simulations, of traffic that ends when it was asked."""

    asked: Question
    case: Case
    requests: list[Followed]
    """All of the traffic, what is not known of it guessed."""
    machinery: Machinery
    first_s: float
    until_s: float
    num_simulated: int = 0
    pairs: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Question) -> "Trial":
        """The server as it told of itself; UsageError where that is too little."""
        stretch = asked.stretch
        asked.calibration.traffic = list(stretch.requests)
        case = case_of(asked.calibration, most_tokens=inf)
        came_s = [each.at_s for each in stretch.requests]
        until_s = came_s[-1] if stretch.until_s is None else stretch.until_s
        machinery = case.machinery()
        machinery.front = replace(machinery.front, door_s=0.0)  # times as a server sees them
        requests = completed(stretch.requests, until_s)
        first_s = came_s[0] if stretch.from_s is None else stretch.from_s
        if stretch.clock_s is not None:  # of what was before nobody knows the steps
            first_s = max(first_s, asked.calibration.steps.started_s[0] - stretch.clock_s)
        return cls(
            asked,
            replace(case, traffic=tuple(requests)),
            requests,
            machinery,
            first_s,
            until_s,
            pairs=machinery.cases(RUNS, 0),
        )

    def prefill_s(self, tokens: int) -> float:
        """What a prompt takes alone, as the engine believes."""
        assert self.machinery.belief is not None, "a calibrated engine has learned"
        return self.machinery.belief.prefill_s(tokens, 0, self.case.settings.max_num_batched_tokens)

    def second_cpu_s(self) -> float:
        """What it takes to simulate a second of the traffic.

        127 steps, 150 requests and 960 tokens of answers, 20 that wait: 0.076 s.
        """
        steps, span_s = self.case.calibration.steps, max(self.until_s - self.first_s, 1e-9)
        busy_s = steps.started_s[-1] + steps.seconds[-1] - steps.started_s[0]
        requests = [each for each in self.asked.stretch.requests if each.at_s >= self.first_s]
        tokens = sum((each.answer or 0) * max(each.n, 1) for each in requests)
        steps_per_s, per_s = len(steps) / max(busy_s, 1e-9), len(requests) / span_s
        queued_s = QUEUED_CPU_S * self.num_waiting * (steps_per_s + per_s)
        work_s = TOKEN_CPU_S * tokens / span_s + REQUEST_CPU_S * per_s
        return STEP_CPU_S * steps_per_s + work_s + queued_s

    def steps_since(self, from_s: float) -> Steps | None:
        """Those of the same time; None where they are too few, or several engines', of which each
        has a pace of its own."""
        zero_s, steps = self.asked.stretch.clock_s, self.case.calibration.steps
        if zero_s is None or steps.engine:
            return None
        began_s = np.array(steps.started_s) - zero_s - from_s
        inside = np.flatnonzero(began_s >= 0)
        return (began_s[inside], inside) if len(inside) >= LEAST_STEPS else None

    @property
    def num_waiting(self) -> int:
        """How many wait now."""
        requests = self.asked.stretch.requests
        return sum(each.ttft_s is None and each.took_s is None for each in requests)

    def shortened(self, cpu_s: float) -> "Part":
        """The last of the traffic, as much as one simulation of so many seconds of CPU has."""
        came_s, seconds = [each.at_s for each in self.case.traffic], cpu_s / self.second_cpu_s()
        if seconds < min(LEAST_S, self.until_s - self.first_s):
            raise UsageError(
                f"{LEAST_S:g} s of it are too much to simulate: {self.num_waiting:,} wait.",
                "A shorter --max-queue-wait refuses those that nobody can serve in time.",
            )
        from_s = min(self.until_s - seconds, came_s[-min(LEAST_REQUESTS, len(came_s))])
        return Part(self, max(from_s, self.first_s))


@dataclass(slots=True)
class Part:
    """The traffic from `from_s` on, and its simulations."""

    trial: Trial
    from_s: float
    scene: Scene = field(init=False)

    def __post_init__(self) -> None:
        trial = self.trial
        begun = trial.asked.begun or begun_at(trial.requests, self.from_s)
        self.scene = Scene(
            case=trial.case,
            machinery=trial.machinery,
            steps=trial.steps_since(self.from_s),
            started=trial.asked.started,
            from_s=self.from_s,
            begun=begun,
        )

    @property
    def seconds(self) -> float:
        return self.trial.until_s - self.from_s

    def counted_s(self, share: float) -> float:
        """Of the first share of it, how long those come that are counted.

        With an objective of 0.3 s the first 9.7 s of 10 s.
        """
        own = self.trial.case.classes
        names = {each.service_class for each in self.trial.case.traffic}
        classes = [own.get(name) or own[DEFAULT_CLASS] for name in names]
        ttft_s = max(each.objectives(0).ttft_s or 0.0 for each in classes)
        return share * self.seconds - min(ttft_s, MOST_TAIL * share * self.seconds)

    def begin(self, changes: Changes, pair: int = 0) -> Replay:
        """One simulation, in one of the machine's moments."""
        self.trial.num_simulated += 1
        return self.scene.replay(changes, self.trial.pairs[pair])

    def see(self, replay: Replay, share: float) -> Seen:
        """What stands behind the first share of it."""
        return replay.seen(share * self.seconds, self.counted_s(share))

    def seen(self) -> float | None:
        """The share of the counted requests that met their objectives at the server."""
        end_s = self.from_s + self.counted_s(1.0)
        found = [each.met for each in self.trial.requests if self.from_s <= each.at_s < end_s]
        met = [each for each in found if each is not None]
        return fmean(met) if met else None


def answer(asked: Question, cpu_s: Callable[[], float] = time.process_time) -> Answer:
    """What the simulations say; never raises for what a server may tell."""
    began_s = cpu_s()
    try:
        trial = Trial.of(asked)
        with quiet_gc(cleans=False):
            found = propose(trial) if asked.kind == "propose" else judge(trial)
    except UsageError as error:
        return Answer(why=str(error), cpu_s=cpu_s() - began_s)
    found.num_simulated, found.cpu_s = trial.num_simulated, cpu_s() - began_s
    return found


@dataclass(slots=True)
class Tried:
    """A candidate on its way through the rounds."""

    changes: Changes
    replay: Replay
    seen: Seen
    halfway: Seen
    """What was seen of its last round but one."""

    @property
    def score(self) -> tuple[float, float]:
        """More in SLO first; where none is, the shorter wait."""
        return self.seen.share, -(self.seen.ttft_s or 0.0)


def propose(trial: Trial) -> Answer:
    """The candidate that is clearly better, or why there is none."""
    case, asked = trial.case, trial.asked
    longest = max(each.prompt - each.cached for each in case.traffic)
    of = case.settings, asked.started, asked.left_alone
    neighbours = candidates(*of, longest, trial.prefill_s(longest))
    part = trial.shortened(PROPOSE_CPU_S / num_wholes(len(neighbours)))
    present = part.begin({})
    base = [part.see(present, share) for share in ROUNDS]
    found = told(part, base[-1])
    if not found.is_trusted:
        return found
    found.why = f"none of {len(neighbours)} neighbours is better: {found.now:.0%} in SLO, simulated"
    first = [tried(part, changes, ROUNDS[0]) for changes in neighbours]
    beside: list[Changes] = []
    best = max(first, key=lambda each: each.score, default=None)
    if best is not None and best.seen.share > base[0].share:
        beside = finer(best.changes, *of)[:FINER]
    for each in finalists(part, first, beside, base):
        if is_better(part, each, base, found):
            break
    return found


def num_wholes(neighbours: int) -> float:
    """How many simulations of all of the traffic a question is.

    Of 7 neighbours: the present settings, 7 on a quarter, 3 on another, two beside the best and the
    two finalists on half, and these and the present in two more moments of the machine: 7.5.
    """
    first, second, _ = ROUNDS
    going_on = KEPT * neighbours * (second - first) + FINALISTS * (1 - second)
    return 1 + first * neighbours + going_on + FINER * second + 2 * FINALISTS * second


def tried(part: Part, changes: Changes, share: float) -> Tried:
    """A candidate after the first share of the traffic."""
    replay = part.begin(changes)
    seen = part.see(replay, share)
    return Tried(changes, replay, seen, seen)


def finalists(
    part: Part, first: list[Tried], beside: list[Changes], base: list[Seen]
) -> list[Tried]:
    """The best on all of the traffic, the best first, where they are better than `base`."""
    _, second, third = ROUNDS
    left = [each for each in first if each.seen.differs(base[0])]
    left = sorted(left, key=lambda each: each.score)[::-1][: max(ceil(KEPT * len(first)), 2)]
    for each in left:
        each.seen = part.see(each.replay, second)
    left += [tried(part, changes, second) for changes in beside]
    left = [each for each in left if each.seen.share > base[1].share]
    left = sorted(left, key=lambda each: each.score)[::-1][:FINALISTS]
    for each in left:
        each.halfway, each.seen = each.seen, part.see(each.replay, third)
    return sorted(left, key=lambda each: each.score)[::-1]


def is_better(part: Part, each: Tried, now: list[Seen], found: Answer) -> bool:
    """Whether a finalist surely gains, which `found` says then."""
    changes, second, pairs = each.changes, ROUNDS[1], part.trial.pairs
    moments = [
        (part.see(part.begin({}, pair), second), part.see(part.begin(changes, pair), second))
        for pair in range(RUNS, len(pairs))
    ]
    gain, low, high = gained(now[-1], each.seen, [(now[1], each.halfway), *moments]).ratio
    if low <= 0 or gain < LEAST_GAIN or loser(now[-1], each.seen):
        return False
    found.changes, found.gain = changes, round(gain, 4)
    found.gain_interval = (round(low, 4), round(high, 4))
    found.then, found.then_ttft_s, found.then_tpot_s = (
        each.seen.share,
        each.seen.ttft_s,
        each.seen.tpot_s,
    )
    found.why = f"{found.now:.0%} → {found.then:.0%} in SLO, simulated"
    return True


def told(part: Part, now: Seen) -> Answer:
    """What the simulation of the present settings says, and whether that is about what was seen."""
    seen = part.seen()
    found = Answer(
        now=now.share,
        seen=seen,
        now_ttft_s=now.ttft_s,
        now_tpot_s=now.tpot_s,
        begun=part.scene.begun,
        seconds=part.seconds,
        num_requests=len(now.met),
    )
    bound = max(TRUSTED, max(len(now.met), 1) ** -0.5)
    if seen is not None and abs(seen - now.share) > bound:
        found.is_trusted = False
        found.why = (
            f"its simulation says {now.share:.0%} in SLO where {seen:.0%} were seen: not trusted"
        )
    return found


def judge(trial: Trial) -> Answer:
    """The traffic since a change, with the change undone, from the state before it."""
    asked = trial.asked
    undone = with_changes(trial.case.settings, asked.changes, asked.started)
    trial.case = replace(trial.case, settings=undone)
    part = trial.shortened(JUDGE_CPU_S)
    then = part.see(part.begin({}), 1.0)
    return Answer(
        changes=asked.changes,
        then=then.share,
        then_ttft_s=then.ttft_s,
        then_tpot_s=then.tpot_s,
        seconds=part.seconds,
        num_requests=len(then.met),
    )
