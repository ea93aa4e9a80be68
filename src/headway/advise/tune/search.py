"""Which settings to try for real: successive halving over simulated ones.

Every candidate gets the same arrivals and the same moments of the machine (common random numbers),
first a short stretch of the traffic, then the better third a longer one, and in the end the best
dozen all of it, in three drawn cases of which the worst counts. The default is in every rung. After
the first, what won alone is put together: the best two options, the best three, and so on.
The best is then made simpler: a change without which nothing is lost is left out.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf, log
from pathlib import Path

import msgspec

from headway.advise.simulate.machine import Machinery, as_measured, calibrated
from headway.advise.simulate.outcome import FIGURES
from headway.advise.simulate.run import Plan, once
from headway.advise.tune.space import Changes, Knob, candidates, options_of, ordered, said
from headway.assemble import plan_settings
from headway.bench.report import Report
from headway.bench.run import Bench
from headway.config.cache_config import CacheConfig
from headway.config.options import EngineOptions
from headway.core.errors import HeadwayError
from headway.telemetry.calibration import MachineCalibration

RUNGS = ((150, 1.0), (400, 1 / 3), (1500, 1 / 8))
"""(conversations, share of the candidates) of each rung."""
RUNG_ENDS = (0.3, 0.6, 1.0)
"""When each rung ends, of the search's time: what it has not come to by then is left out, the last
of the ranking first, in the first rung combinations."""
LEAST_IN_RUNG = 4
"""So many settings are in each rung whatever it takes."""
FINAL_CASES = 3
NEAR = 0.05
"""Goodputs within this of the best are alike for who prefers something else."""
SAME = 0.005
"""Scores nearer than this are the same: fewer changes win."""


class Point(msgspec.Struct, kw_only=True):
    """A simulated setting: goodput of the worst case, the rest of the first."""

    changes: Changes
    goodput: float
    in_slo: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    label: str = ""

    @property
    def name(self) -> str:
        return said(self.changes)


@dataclass(slots=True, kw_only=True)
class Search:
    """The settings of one model on one machine under one traffic."""

    folder: Path
    engine: EngineOptions
    calibration: MachineCalibration
    plan: Plan
    prefer: str = "goodput"
    refused: dict[str, str] = field(default_factory=dict)
    """Setting → why it cannot be."""
    num_simulated: int = 0
    seconds: float = inf
    """What the rungs may take."""
    num_left_out: int = 0
    """Settings for which a rung had no time."""
    clock: Callable[[], float] = time.monotonic
    extrapolated: float = 0.0
    """Of the default's steps, the share that is larger than any that was measured."""
    watch: Callable[[str], None] = lambda text: None
    _machines: dict[Changes, Machinery | None] = field(default_factory=dict)

    def run(self, knobs: list[Knob], count: int, seed: int) -> list[Point]:
        """All of the last rung, the best first; the default is among them."""
        settings = self.plan.machinery.settings
        left = [c for c in candidates(knobs, settings, count, seed) if self.machine(c) is not None]
        points: list[Point] = []
        began_s = self.clock()
        for rung, (conversations, share) in enumerate(RUNGS):
            most = max(round(count * share), LEAST_IN_RUNG)
            if points:
                together = self.together(points) if rung == 1 else []
                top = [point.changes for point in self.ranked(points)[:most]]
                left = list(dict.fromkeys([(), *top, *together]))
            cases = FINAL_CASES if rung == len(RUNGS) - 1 else 1
            points = []
            for number, changes in enumerate(left):
                is_late = self.clock() - began_s > RUNG_ENDS[rung] * self.seconds
                if is_late and number >= LEAST_IN_RUNG:
                    self.num_left_out += len(left) - number
                    break
                self.watch(f"{number + 1} of {len(left)} settings, {conversations} conversations")
                points.append(self.point(changes, conversations, cases))
        best = self.ranked(points)[0]
        simpler = self.simpler(best)
        if simpler.changes != best.changes:
            points = [p for p in points if p.changes != simpler.changes] + [simpler]
        return self.ranked(points)

    def together(self, points: list[Point]) -> list[Changes]:
        """The values that beat the default alone, each option's best, joined one by one.

        rows=128 gives 12/s, policy=fcfs 11/s, rows=256 11.5/s and the default 10/s: the two of
        rows=128 and policy=fcfs, which no draw need have brought together.
        """
        default = next(self.score(point) for point in points if not point.changes)
        best: dict[str, Point] = {}
        for point in sorted(points, key=self.score, reverse=True):
            if len(point.changes) == 1 and self.score(point) > default * (1 + SAME):
                best.setdefault(point.changes[0][0], point)
        singles = [point.changes[0] for point in best.values()]
        settings = self.plan.machinery.settings
        joined = [ordered(singles[:count], settings) for count in range(2, len(singles) + 1)]
        return [changes for changes in joined if self.machine(changes) is not None]

    def simpler(self, best: Point) -> Point:
        """`best` without the changes that bring nothing."""
        for change in best.changes:
            rest = tuple(each for each in best.changes if each != change)
            if self.machine(rest) is None:
                continue
            point = self.final(rest)
            if self.score(point) >= self.score(best) * (1 - SAME * (self.score(best) > 0)):
                best = point
        return best

    def ranked(self, points: list[Point]) -> list[Point]:
        """The best first: by what is preferred among those near the best goodput, then the rest;
        of equals the one with fewer changes, so the default before all."""
        top = max(point.goodput for point in points)
        near = [point for point in points if point.goodput >= top * (1 - NEAR)]
        far = [point for point in points if point.goodput < top * (1 - NEAR)]
        near.sort(key=lambda point: (-coarse(self.score(point)), len(point.changes)))
        far.sort(key=lambda point: (-coarse(point.goodput), len(point.changes)))
        return [*near, *far]

    def score(self, point: Point) -> float:
        """What is preferred, more is better."""
        return {
            "goodput": point.goodput,
            "ttft": 1 / max(point.ttft_s, 1e-9),
            "tpot": 1 / max(point.tpot_s, 1e-9),
            "throughput": point.tokens_per_s,
        }[self.prefer]

    def final(self, changes: Changes) -> Point:
        """One setting as in the last rung."""
        return self.point(changes, RUNGS[-1][0], FINAL_CASES)

    def point(self, changes: Changes, conversations: int, cases: int) -> Point:
        """One setting on the first so many conversations."""
        plan = self.planned(changes, shortened(self.plan.bench, conversations))
        machinery = plan.machinery
        runs = [
            once(plan, seed, scale, "tune")
            for seed, scale in machinery.cases(cases, self.plan.seed)[:cases]
        ]
        self.num_simulated += 1
        if not changes:
            self.extrapolated = runs[0][1].replicas[0].truth.reach.share
        return point_of(changes, [report for report, _ in runs], machinery.label)

    def planned(self, changes: Changes, bench: Bench) -> Plan:
        """One setting under this traffic."""
        machinery = self.machine(changes)
        assert machinery is not None, "a setting that cannot be is not simulated"
        served = replace(
            self.plan.served,
            settings=machinery.settings,
            description=machinery.description,
            belief=machinery.belief,
        )
        return replace(self.plan, bench=bench, machinery=machinery, served=served)

    def machine(self, changes: Changes) -> Machinery | None:
        """The machine with these settings; None where they cannot be, as `refused` then says."""
        if changes not in self._machines:
            try:
                self._machines[changes] = self._machine(changes)
            except HeadwayError as error:
                self.refused[said(changes)] = error.cause
                self._machines[changes] = None
        return self._machines[changes]

    def _machine(self, changes: Changes) -> Machinery:
        if not changes:
            return self.plan.machinery
        engine = options_of(self.engine, changes)
        spec, settings, _, _ = plan_settings(self.folder, engine)
        base = self.plan.machinery
        if "block_size" in dict(changes):
            settings = replace(settings, cache=reblocked(base, settings.cache.block_size))
        else:
            settings = as_measured(settings, self.calibration, engine, True)
        costs = ("quantization", "kv_cache_dtype")
        if not any(name in costs for name, _ in changes):
            return replace(base, settings=settings)
        return calibrated(base.model, spec, settings, self.calibration)


def reblocked(base: Machinery, size: int) -> CacheConfig:
    """The base's KV memory in blocks of another length."""
    cache = base.settings.cache
    blocks = tuple((n - 1) * cache.block_size // size + 1 for n in cache.num_blocks)
    return replace(cache, block_size=size, num_blocks=blocks)


def coarse(score: float) -> float:
    """Scores that are the same have the same number: steps of half a percent."""
    return float(round(log(score) / SAME)) if score > 0 else -1e9


def shortened(bench: Bench, conversations: int) -> Bench:
    """The first so many of its conversations, counted whole."""
    traffic = bench.traffic
    if len(traffic.conversations) <= conversations:
        return bench
    talks = traffic.conversations[:conversations]
    cut = replace(traffic, conversations=talks, span_s=max(talks[-1].at_s, 1e-6))
    return replace(bench, traffic=cut)


def point_of(changes: Changes, reports: list[Report], label: str) -> Point:
    """The worst goodput of all cases, and the first's other figures."""
    first = reports[0]

    def figure(name: str) -> float:
        value = FIGURES[name](first)
        return float("inf") if value is None else value

    return Point(
        changes=changes,
        goodput=min(report.rates.goodput_per_s or 0.0 for report in reports),
        in_slo=first.rates.attainment or 0.0,
        ttft_s=figure("ttft_p50_s"),
        tpot_s=figure("tpot_p50_s"),
        tokens_per_s=first.rates.output_tokens_per_s,
        label=label,
    )


def front(points: list[Point]) -> Iterator[Point]:
    """Those that no other beats in both times, by TTFT."""
    best = float("inf")
    for point in sorted(points, key=lambda p: (p.ttft_s, p.tpot_s)):
        if point.tpot_s < best:
            best = point.tpot_s
            yield point
