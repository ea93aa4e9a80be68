"""Search of settings in simulation: successive halving.

Every candidate gets the same arrivals and the same pace of the machine (common random numbers):
first a short stretch of the traffic, then the better third a longer one, and in the end the best
dozen all of it, in three drawn cases of which the worst counts. The default is in every rung. After
the first rung, changes that beat the default alone are combined: the best two options, the best
three, and so on. The best setting is then simplified: a change that brings nothing is left out.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf, log
from pathlib import Path

import msgspec

from headway.advise.simulate.machine import SimulatedMachine, as_measured, calibrated_machine
from headway.advise.simulate.outcome import FIGURES
from headway.advise.simulate.run import SimulationPlan, run_once
from headway.advise.tune.space import Changes, Knob, candidates, options_of, ordered, setting_name
from headway.bench.report import BenchReport
from headway.bench.run import Bench
from headway.config.cache_config import CacheConfig
from headway.config.options import EngineOptions
from headway.core.errors import HeadwayError
from headway.planning import plan_settings
from headway.telemetry.calibration import MachineCalibration

RUNGS = ((150, 1.0), (400, 1 / 3), (1500, 1 / 8))
"""(conversations, share of the candidates) of each rung."""
RUNG_ENDS = (0.3, 0.6, 1.0)
"""Share of the search's time at which each rung ends; settings that it did not reach are left
out."""
MIN_IN_RUNG = 4
"""Number of settings that are in each rung, however long it takes."""
FINAL_CASES = 3
GOODPUT_TIE_SHARE = 0.05
"""Goodputs within this share of the best are ties for a preference other than goodput."""
SCORE_TIE_SHARE = 0.005
"""Scores within this share are ties: fewer changes win."""


class Point(msgspec.Struct, kw_only=True):
    """A simulated setting: goodput of the worst case, other figures of the first case."""

    changes: Changes
    goodput: float
    in_slo: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    label: str = ""

    @property
    def name(self) -> str:
        return setting_name(self.changes)


@dataclass(slots=True, kw_only=True)
class SettingSearch:
    """The settings of one model on one machine under one traffic."""

    folder: Path
    engine: EngineOptions
    calibration: MachineCalibration
    plan: SimulationPlan
    prefer: str = "goodput"
    refused: dict[str, str] = field(default_factory=dict)
    """Setting → why it is impossible."""
    num_simulated: int = 0
    seconds: float = inf
    """Time limit of the rungs."""
    num_left_out: int = 0
    """Settings for which a rung had no time."""
    clock: Callable[[], float] = time.monotonic
    extrapolated: float = 0.0
    """Share of the default's steps that are larger than any measured one."""
    watch: Callable[[str], None] = lambda text: None
    _machines: dict[Changes, SimulatedMachine | None] = field(default_factory=dict)

    def run(self, knobs: list[Knob], count: int, seed: int) -> list[Point]:
        """Return the settings of the last rung, the best first; the default is among them."""
        settings = self.plan.machinery.settings
        remaining = [
            c for c in candidates(knobs, settings, count, seed) if self.machine(c) is not None
        ]
        points: list[Point] = []
        began_s = self.clock()
        for rung, (conversations, share) in enumerate(RUNGS):
            most = max(round(count * share), MIN_IN_RUNG)
            if points:
                combinations = self.combinations(points) if rung == 1 else []
                top = [point.changes for point in self.ranked(points)[:most]]
                remaining = list(dict.fromkeys([(), *top, *combinations]))
            cases = FINAL_CASES if rung == len(RUNGS) - 1 else 1
            points = []
            for number, changes in enumerate(remaining):
                is_late = self.clock() - began_s > RUNG_ENDS[rung] * self.seconds
                if is_late and number >= MIN_IN_RUNG:
                    self.num_left_out += len(remaining) - number
                    break
                self.watch(
                    f"{number + 1} of {len(remaining)} settings, {conversations} conversations"
                )
                points.append(self.point(changes, conversations, cases))
        best = self.ranked(points)[0]
        simpler = self.simplify(best)
        if simpler.changes != best.changes:
            points = [p for p in points if p.changes != simpler.changes] + [simpler]
        return self.ranked(points)

    def combinations(self, points: list[Point]) -> list[Changes]:
        """Return combinations of the values that beat the default alone, each option's best, added
        one by one.

        rows=128 gives 12/s, policy=fcfs 11/s, rows=256 11.5/s and the default 10/s: the combination
        is rows=128 with policy=fcfs, which no random draw may have contained.
        """
        default = next(self.score(point) for point in points if not point.changes)
        best: dict[str, Point] = {}
        for point in sorted(points, key=self.score, reverse=True):
            if len(point.changes) == 1 and self.score(point) > default * (1 + SCORE_TIE_SHARE):
                best.setdefault(point.changes[0][0], point)
        singles = [point.changes[0] for point in best.values()]
        settings = self.plan.machinery.settings
        joined = [ordered(singles[:count], settings) for count in range(2, len(singles) + 1)]
        return [changes for changes in joined if self.machine(changes) is not None]

    def simplify(self, best: Point) -> Point:
        """Return `best` without the changes that bring nothing."""
        for change in best.changes:
            rest = tuple(each for each in best.changes if each != change)
            if self.machine(rest) is None:
                continue
            point = self.final(rest)
            if self.score(point) >= self.score(best) * (
                1 - SCORE_TIE_SHARE * (self.score(best) > 0)
            ):
                best = point
        return best

    def ranked(self, points: list[Point]) -> list[Point]:
        """Return the points, the best first: near the best goodput by preference, then the rest by
        goodput.

        Of ties the setting with fewer changes comes first, so the default before all.
        """
        top = max(point.goodput for point in points)
        near = [point for point in points if point.goodput >= top * (1 - GOODPUT_TIE_SHARE)]
        far = [point for point in points if point.goodput < top * (1 - GOODPUT_TIE_SHARE)]
        near.sort(key=lambda point: (-score_bucket(self.score(point)), len(point.changes)))
        far.sort(key=lambda point: (-score_bucket(point.goodput), len(point.changes)))
        return [*near, *far]

    def score(self, point: Point) -> float:
        """Return the preferred figure; more is better."""
        return {
            "goodput": point.goodput,
            "ttft": 1 / max(point.ttft_s, 1e-9),
            "tpot": 1 / max(point.tpot_s, 1e-9),
            "throughput": point.tokens_per_s,
        }[self.prefer]

    def final(self, changes: Changes) -> Point:
        """Simulate a setting as in the last rung."""
        return self.point(changes, RUNGS[-1][0], FINAL_CASES)

    def point(self, changes: Changes, conversations: int, cases: int) -> Point:
        """Simulate a setting on the first conversations of the traffic."""
        plan = self.planned(changes, shortened(self.plan.bench, conversations))
        machinery = plan.machinery
        runs = [
            run_once(plan, seed, scale, "tune")
            for seed, scale in machinery.cases(cases, self.plan.seed)[:cases]
        ]
        self.num_simulated += 1
        if not changes:
            self.extrapolated = runs[0][1].replicas[0].truth.reach.share
        return point_of(changes, [report for report, _ in runs], machinery.label)

    def planned(self, changes: Changes, bench: Bench) -> SimulationPlan:
        """Return the simulation of a setting under this traffic."""
        machinery = self.machine(changes)
        assert machinery is not None, "a setting that cannot be is not simulated"
        served = replace(
            self.plan.served,
            settings=machinery.settings,
            description=machinery.description,
            belief=machinery.belief,
        )
        return replace(self.plan, bench=bench, machinery=machinery, served=served)

    def machine(self, changes: Changes) -> SimulatedMachine | None:
        """Return the machine with these settings; None where they are impossible, with a reason in
        `refused`."""
        if changes not in self._machines:
            try:
                self._machines[changes] = self._machine(changes)
            except HeadwayError as error:
                self.refused[setting_name(changes)] = error.cause
                self._machines[changes] = None
        return self._machines[changes]

    def _machine(self, changes: Changes) -> SimulatedMachine:
        if not changes:
            return self.plan.machinery
        engine = options_of(self.engine, changes)
        spec, settings, _, _ = plan_settings(self.folder, engine)
        base = self.plan.machinery
        if "block_size" in dict(changes):
            settings = replace(settings, cache=with_block_size(base, settings.cache.block_size))
        else:
            settings = as_measured(settings, self.calibration, engine, True)
        costs = ("quantization", "kv_cache_dtype")
        if not any(name in costs for name, _ in changes):
            return replace(base, settings=settings)
        return calibrated_machine(base.model, spec, settings, self.calibration)


def with_block_size(base: SimulatedMachine, size: int) -> CacheConfig:
    """Return the base's KV memory in blocks of another length."""
    cache = base.settings.cache
    blocks = tuple((n - 1) * cache.block_size // size + 1 for n in cache.num_blocks)
    return replace(cache, block_size=size, num_blocks=blocks)


def score_bucket(score: float) -> float:
    """Return a number that ties share: the logarithm in steps of half a percent."""
    return float(round(log(score) / SCORE_TIE_SHARE)) if score > 0 else -1e9


def shortened(bench: Bench, conversations: int) -> Bench:
    """Return the bench with its first conversations only."""
    traffic = bench.traffic
    if len(traffic.conversations) <= conversations:
        return bench
    talks = traffic.conversations[:conversations]
    cut = replace(traffic, conversations=talks, span_s=max(talks[-1].at_s, 1e-6))
    return replace(bench, traffic=cut)


def point_of(changes: Changes, reports: list[BenchReport], label: str) -> Point:
    """Return the worst goodput of all cases, and the first case's other figures."""
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


def pareto_front(points: list[Point]) -> Iterator[Point]:
    """Yield the points that no other beats in both times, by TTFT."""
    best = float("inf")
    for point in sorted(points, key=lambda p: (p.ttft_s, p.tpot_s)):
        if point.tpot_s < best:
            best = point.tpot_s
            yield point
