"""The traffic of late, simulated with the present settings and with others.

All settings get the same arrivals and the same moments of the machine (common random numbers), so
a difference is the settings'. How sure it is has two sides: the arrivals are one draw, so it is
told in blocks of them, and the machine has other moments, so it is told over several runs.

    block of 5 s     1   2   3   4           met now 3, 5, 4, 2   then 5, 5, 6, 5 of 6 each
    gained           2   0   2   3           7 of 24, ± 2.5 by how much the blocks differ
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

import msgspec
import numpy as np

from headway.advise.retune.candidates import candidates, finer
from headway.advise.retune.question import Answer, Question
from headway.advise.simulate.machine import Machinery
from headway.advise.what_if.case import LEAST_REQUESTS, Case, case_of, run
from headway.advise.what_if.compare import missed
from headway.bench.latency import latency
from headway.core.errors import UsageError
from headway.core.live_settings import Changes, with_changes
from headway.telemetry.lately import BLOCK_S, middle

SCREEN_CPU_S, FINAL_CPU_S = 0.06, 0.15
"""What one simulation of a candidate may compute, and one of the best two in each moment."""
STEP_CPU_S, TOKEN_CPU_S = 1e-4, 1e-5
"""About what a simulated step and a token of it take: so many seconds of traffic fit."""
FINALISTS, RUNS = 2, 1
LEAST_GAIN = 0.03
"""What a change must promise."""
SURE = 1.64
"""Standard errors to the end of a 90% interval."""
CLASS_LOSS, LEAST_OF_CLASS = 0.05, 10
"""No class of at least so many requests may lose more of its requests than this share."""


@dataclass(slots=True)
class Seen:
    """What the clients of one simulated run saw, in the order in which they asked."""

    at_s: list[float]
    met: np.ndarray
    classes: list[str]
    ttft_s: float | None
    tpot_s: float | None

    @property
    def share(self) -> float:
        return float(self.met.mean())


@dataclass(slots=True)
class Trial:
    """One question's simulations."""

    case: Case
    machinery: Machinery
    num_simulated: int = 0
    pairs: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Question) -> "Trial":
        """The server as it told of itself; UsageError where that is too little."""
        case = case_of(asked.calibration)
        machinery = case.machinery()
        trial = cls(case, machinery, pairs=machinery.cases(RUNS, 0))
        trial.case = trial.shortened(FINAL_CPU_S)
        return trial

    def shortened(self, cpu_s: float) -> Case:
        """The last of the traffic, as much as is simulated in so many seconds of CPU.

        20 steps and 160 tokens a second of it take 3.6 ms, so 0.1 s are 28 s of traffic.
        """
        case, steps = self.case, self.case.calibration.steps
        busy_s = steps.started_s[-1] + steps.seconds[-1] - steps.started_s[0]
        tokens = sum((a.answer or 0) * max(a.n, 1) for a in case.traffic)
        step_s = STEP_CPU_S * len(steps) / max(busy_s, 1e-9)
        second_s = step_s + TOKEN_CPU_S * tokens / max(spell_s(case), 1e-9)
        begin_s = case.traffic[-1].at_s - cpu_s / second_s
        count = max(sum(asked.at_s >= begin_s for asked in case.traffic), LEAST_REQUESTS)
        return replace(case, traffic=case.traffic[-count:])

    def prefill_s(self, tokens: int) -> float:
        """What a prompt takes alone, as the engine believes."""
        assert self.machinery.belief is not None, "a calibrated engine has learned"
        return self.machinery.belief.prefill_s(tokens, 0, self.case.settings.max_num_batched_tokens)

    def see(self, case: Case, pair: tuple[int, float]) -> Seen:
        """One run."""
        self.num_simulated += 1
        begin_s = case.traffic[0].at_s + spell_s(case)
        found = run(warmed(case), self.machinery, *pair)
        found = [x for x in found if x.scheduled_s >= begin_s]
        times = [latency(x) for x in found]
        return Seen(
            at_s=[x.scheduled_s for x in found],
            met=np.array([not missed(x, case.classes) for x in found], dtype=float),
            classes=[x.service_class for x in found],
            ttft_s=middle([each.ttft_s if each else None for each in times]),
            tpot_s=middle([each.tpot_s if each else None for each in times]),
        )

    def see_all(self, case: Case) -> list[Seen]:
        """A run for each moment of the machine."""
        return [self.see(case, pair) for pair in self.pairs]


@dataclass(slots=True)
class Gained:
    """Of the requests, the share that only one setting meets: its mean and standard error."""

    now: float
    then: float
    error: float

    @property
    def ratio(self) -> tuple[float, float, float]:
        """(then / now − 1, from, to): a gain of 90% surety."""
        base = max(self.now, 0.02)
        gain = self.then - self.now
        low, high = gain - SURE * self.error, gain + SURE * self.error
        return gain / base, low / base, high / base


def gained(now: list[Seen], then: list[Seen]) -> Gained:
    """`then` beside `now`, run by run."""
    means = [float((b.met - a.met).mean()) for a, b in zip(now, then, strict=True)]
    first = now[0]
    blocks: dict[int, list[float]] = {}
    for at_s, a, b in zip(first.at_s, first.met, then[0].met, strict=True):
        blocks.setdefault(int(at_s // BLOCK_S), []).append(float(b - a))
    sums = [sum(each) - means[0] * len(each) for each in blocks.values()]
    count = len(sums)
    by_arrivals = (sum(s * s for s in sums) * count / max(count - 1, 1)) ** 0.5 / len(first.met)
    by_machine = float(np.std(means)) / len(means) ** 0.5
    return Gained(
        now=fmean(each.share for each in now),
        then=fmean(each.share for each in then),
        error=float((by_arrivals**2 + by_machine**2) ** 0.5),
    )


def loser(now: list[Seen], then: list[Seen]) -> str:
    """The class that loses most, where that is too much; "" where none does."""
    worst, found = CLASS_LOSS, ""
    for name in sorted(set(now[0].classes)):
        of_class = np.array([each == name for each in now[0].classes])
        if of_class.sum() < LEAST_OF_CLASS:
            continue
        lost = fmean(
            float((a.met - b.met)[of_class].mean()) for a, b in zip(now, then, strict=True)
        )
        if lost > worst:
            worst, found = lost, name
    return found


def answer(asked: Question, cpu_s: Callable[[], float] = time.process_time) -> Answer:
    """What the simulations say; never raises for what a server may tell."""
    began_s = cpu_s()
    try:
        trial = Trial.of(asked)
        found = propose(trial, asked) if asked.kind == "propose" else judge(trial, asked)
    except UsageError as error:
        return Answer(why=str(error), cpu_s=cpu_s() - began_s)
    found.num_simulated, found.cpu_s = trial.num_simulated, cpu_s() - began_s
    return found


def with_settings(case: Case, changes: Changes, asked: Question) -> Case:
    """The case with some settings changed."""
    return replace(case, settings=with_changes(case.settings, changes, asked.started))


def propose(trial: Trial, asked: Question) -> Answer:
    """The candidate that is clearly better, or why there is none."""
    case, pair = trial.case, trial.pairs[0]
    short = trial.shortened(SCREEN_CPU_S)
    base = trial.see(short, pair).share
    longest = max(asked.prompt - asked.cached for asked in case.traffic)
    longest_s = trial.prefill_s(longest)
    of = case.settings, asked.started, asked.left_alone
    tried = candidates(*of, longest, longest_s)
    screened = [(trial.see(with_settings(short, c, asked), pair).share, c) for c in tried]
    screened.sort(key=lambda each: -each[0])
    if screened and screened[0][0] > base:
        beside = finer(screened[0][1], *of)
        screened += [(trial.see(with_settings(short, c, asked), pair).share, c) for c in beside]
        screened.sort(key=lambda each: -each[0])
    best = [changes for share, changes in screened[:FINALISTS] if share > base]
    now = trial.see_all(case)
    present = fmean(each.share for each in now)
    found = Answer(
        why=f"none of {len(tried)} neighbours is better: {present:.0%} in SLO, simulated",
        now=present,
        now_ttft_s=now[0].ttft_s,
        now_tpot_s=now[0].tpot_s,
    )
    for changes in best:
        then = trial.see_all(with_settings(case, changes, asked))
        gain, low, high = gained(now, then).ratio
        if low <= 0 or gain < LEAST_GAIN or gain <= found.gain or loser(now, then):
            continue
        found.changes, found.gain = changes, round(gain, 4)
        found.gain_interval = (round(low, 4), round(high, 4))
        found.then = fmean(each.share for each in then)
        found.then_ttft_s, found.then_tpot_s = then[0].ttft_s, then[0].tpot_s
        found.why = f"{present:.0%} → {found.then:.0%} in SLO, simulated"
    return found


def spell_s(case: Case) -> float:
    """From the first of its traffic until it may come again: its span, and a mean gap."""
    span_s = case.traffic[-1].at_s - case.traffic[0].at_s
    return span_s * len(case.traffic) / max(len(case.traffic) - 1, 1)


def warmed(case: Case) -> Case:
    """The traffic twice: the first time fills the rows and the queue, as they are in a server that
    runs, and does not count."""
    later_s = spell_s(case)
    again = [msgspec.structs.replace(a, at_s=a.at_s + later_s) for a in case.traffic]
    return replace(case, traffic=(*case.traffic, *again))


def judge(trial: Trial, asked: Question) -> Answer:
    """The traffic since a change, as it is and with the change undone."""
    now = trial.see(trial.case, trial.pairs[0])
    then = trial.see(with_settings(trial.case, asked.changes, asked), trial.pairs[0])
    return Answer(
        changes=asked.changes,
        now=now.share,
        then=then.share,
        now_ttft_s=now.ttft_s,
        now_tpot_s=now.tpot_s,
        then_ttft_s=then.ttft_s,
        then_tpot_s=then.tpot_s,
    )
