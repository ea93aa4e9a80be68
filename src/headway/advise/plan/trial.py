"""Simulated trials of one machine's servers: do they keep the objectives under some traffic?"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from headway.advise.plan.machines import MachineCandidate
from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.outcome import report_of
from headway.advise.simulate.replica import ServerSetup, build_replicas
from headway.advise.simulate.truth import ROOFLINE
from headway.bench.prompts import IdWriter
from headway.bench.report import BenchReport
from headway.bench.run import Bench
from headway.bench.workload import Conversation
from headway.config.options import Seconds
from headway.core.service import ServiceClass
from headway.core.slo import Slo

SEARCH_STEPS = 8
MAX_LOAD_FACTOR = 2.0
"""The search ends where one server keeps this factor of the traffic."""
WARMUP_SHARE = 0.1
"""Share of a closed-loop run that is not counted, since all clients begin together."""
OFFICIAL_RETRIES = 2
"""Retries of OpenAI's and Anthropic's own clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """What the fleet must keep, and how clients behave."""

    bench: Bench
    classes: dict[str, ServiceClass]
    attainment: float
    answer_limit: int
    survive: int = 0

    @property
    def strictest(self) -> Slo | None:
        """Return the tightest objectives of all classes."""
        slos = [each.slo for each in self.bench.classes if each.slo is not None]
        if not slos:
            return None
        ttft = min((s.ttft_s for s in slos if s.ttft_s is not None), default=None)
        tpot = min((s.tpot_s for s in slos if s.tpot_s is not None), default=None)
        return Slo(ttft_s=ttft, tpot_s=tpot)


@dataclass(slots=True)
class CapacityTrial:
    """Servers of one machine under some traffic."""

    candidate: MachineCandidate
    target: PlanTarget
    curve_points: list[tuple[float, float]] = field(default_factory=list)
    """(load factor or concurrency; share in SLO) of a search."""

    def keeps(self, *given: Any, load: float) -> bool:
        """Return whether one server keeps the attainment in this run, and note the point."""
        share = self.run(*given)[0].rates.attainment or 0.0
        self.curve_points.append((load, share))
        return share >= self.target.attainment

    def curve(self, unit: float = 1.0) -> list[tuple[float, float]]:
        """Return the points of the last search by load, and forget them."""
        points = sorted((load * unit, share) for load, share in self.curve_points)
        self.curve_points.clear()
        return points

    def run(
        self,
        talks: list[Conversation],
        servers: int,
        seed: int,
        scale: float,
        at_once: int | None = None,
    ) -> tuple[BenchReport, World]:
        """Simulate `talks`, each at its time, or in a closed loop of `at_once` clients."""
        machine, target = self.candidate.machinery, self.target
        served = ServerSetup(
            spec=machine.spec,
            settings=machine.settings,
            description=machine.description,
            classes=target.classes,
            acceptance=machine.acceptance,
            belief=machine.belief,
        )
        replicas = build_replicas(served, lambda s: machine.truth(s, scale), servers, seed)
        options = target.bench.options
        clients = Clients(
            answer_limit=target.answer_limit,
            retries=OFFICIAL_RETRIES,
            timeout_s=options.timeout,
            concurrency=at_once,
        )
        front = (
            FrontendTimes()
            if machine.label == ROOFLINE
            else machine.front.scaled(scale).without_client()
        )
        writer = IdWriter(options.seed, options.vocab_size)
        world = World(replicas, front, writer, clients, seed, apart=True)
        exchanges = world.run(talks)
        span_s = max((x.scheduled_s for x in exchanges), default=0.0) + 1e-6
        bench = replace(
            target.bench,
            options=replace(
                options,
                warmup=Seconds(0 if at_once is None else WARMUP_SHARE * span_s),
                cooldown=Seconds(0),
                duration=None,
                concurrency=at_once,
            ),
            traffic=replace(target.bench.traffic, conversations=talks, span_s=span_s),
        )
        return report_of(bench, exchanges, machine.model, machine.label, "plan"), world


def speed_up(talks: list[Conversation], times: float) -> list[Conversation]:
    """Return the same conversations at `times` the rate."""
    return [replace(talk, at_s=talk.at_s / times) for talk in talks]


def max_rate_factor(
    trial: CapacityTrial, talks: list[Conversation], seed: int, scale: float
) -> float:
    """Return the highest rate factor of these conversations that one server keeps; 0 where it keeps
    none.

    The search ends at `MAX_LOAD_FACTOR`: beyond it the same requests are only one burst.
    """
    low, high, now = 0.0, inf, 1.0
    for _ in range(SEARCH_STEPS):
        if trial.keeps(speed_up(talks, now), 1, seed, scale, load=now):
            low = now
        else:
            high = now
        if low >= MAX_LOAD_FACTOR:
            return low
        now = 2 * low if high == inf else (low * high) ** 0.5 if low else high / 4
    return low


def max_concurrency(
    trial: CapacityTrial, talks: list[Conversation], seed: int, scale: float, concurrency: int
) -> int:
    """Return the highest concurrency that one server keeps, up to `MAX_LOAD_FACTOR` times
    `concurrency`; 0 where it cannot keep one request."""
    low, high, now = 0, int(MAX_LOAD_FACTOR * concurrency) + 1, concurrency
    while high - low > max(1, concurrency // 50):
        if trial.keeps(talks, 1, seed, scale, now, load=now):
            low = now
        else:
            high = now
        now = (low + high) // 2
    return low
