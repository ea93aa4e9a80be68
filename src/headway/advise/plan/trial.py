"""One machine's servers under some traffic, and the most of it that they keep: by simulation."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from headway.advise.plan.machines import Candidate
from headway.advise.simulate.front import Front
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.outcome import report_of
from headway.advise.simulate.replica import Served, fleet
from headway.advise.simulate.truth import ROOFLINE
from headway.bench.prompts import IdWriter
from headway.bench.report import Report
from headway.bench.run import Bench
from headway.bench.workload import Conversation
from headway.config.options import Seconds
from headway.core.service import ServiceClass
from headway.core.slo import Slo

SEARCH_STEPS = 8
ENOUGH = 2.0
"""One server that keeps so many times the traffic is enough."""
WARMUP = 0.1
"""Of a run of so many at once, what is not counted: they all begin together."""
OFFICIAL_RETRIES = 2
"""Tries that OpenAI's and Anthropic's own clients add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What must hold, and how clients behave."""

    bench: Bench
    classes: dict[str, ServiceClass]
    attainment: float
    answer_limit: int
    survive: int = 0

    @property
    def strictest(self) -> Slo | None:
        """The tightest objectives of all classes."""
        slos = [each.slo for each in self.bench.classes if each.slo is not None]
        if not slos:
            return None
        ttft = min((s.ttft_s for s in slos if s.ttft_s is not None), default=None)
        tpot = min((s.tpot_s for s in slos if s.tpot_s is not None), default=None)
        return Slo(ttft_s=ttft, tpot_s=tpot)


@dataclass(slots=True)
class Trial:
    """Servers of one machine under some traffic."""

    candidate: Candidate
    wanted: Wanted
    seen: list[tuple[float, float]] = field(default_factory=list)
    """(times the traffic, or at once; share in SLO) of a search."""

    def keeps(self, *given: Any, load: float) -> bool:
        """Whether one server keeps the attainment in this run."""
        share = self.run(*given)[0].rates.attainment or 0.0
        self.seen.append((load, share))
        return share >= self.wanted.attainment

    def curve(self, unit: float = 1.0) -> list[tuple[float, float]]:
        """What the last search has seen, by load."""
        found = sorted((load * unit, share) for load, share in self.seen)
        self.seen.clear()
        return found

    def run(
        self,
        talks: list[Conversation],
        servers: int,
        seed: int,
        scale: float,
        at_once: int | None = None,
    ) -> tuple[Report, World]:
        """One simulation: each of `talks` at its time, or always so many `at_once`."""
        found, wanted = self.candidate.machinery, self.wanted
        served = Served(
            spec=found.spec,
            settings=found.settings,
            description=found.description,
            classes=wanted.classes,
            acceptance=found.acceptance,
            belief=found.belief,
        )
        replicas = fleet(served, lambda s: found.truth(s, scale), servers, seed)
        options = wanted.bench.options
        clients = Clients(
            answer_limit=wanted.answer_limit,
            retries=OFFICIAL_RETRIES,
            timeout_s=options.timeout,
            concurrency=at_once,
        )
        front = Front() if found.label == ROOFLINE else found.front.scaled(scale).without_client()
        writer = IdWriter(options.seed, options.vocab_size)
        world = World(replicas, front, writer, clients, seed, apart=True)
        exchanges = world.run(talks)
        span_s = max((x.scheduled_s for x in exchanges), default=0.0) + 1e-6
        bench = replace(
            wanted.bench,
            options=replace(
                options,
                warmup=Seconds(0 if at_once is None else WARMUP * span_s),
                cooldown=Seconds(0),
                duration=None,
                concurrency=at_once,
            ),
            traffic=replace(wanted.bench.traffic, conversations=talks, span_s=span_s),
        )
        return report_of(bench, exchanges, found.model, found.label, "plan"), world


def faster(talks: list[Conversation], times: float) -> list[Conversation]:
    """The same conversations in so many times less time."""
    return [replace(talk, at_s=talk.at_s / times) for talk in talks]


def most_rate(trial: Trial, talks: list[Conversation], seed: int, scale: float) -> float:
    """By how much faster these may come to one server that keeps the attainment; 0: not at all.

    Beyond `ENOUGH` nobody asks: the same requests in ever less time are one burst in the end.
    """
    low, high, now = 0.0, inf, 1.0
    for _ in range(SEARCH_STEPS):
        if trial.keeps(faster(talks, now), 1, seed, scale, load=now):
            low = now
        else:
            high = now
        if low >= ENOUGH:
            return low
        now = 2 * low if high == inf else (low * high) ** 0.5 if low else high / 4
    return low


def most_at_once(
    trial: Trial, talks: list[Conversation], seed: int, scale: float, asked: int
) -> int:
    """How many requests at once one server keeps in their objectives, up to `ENOUGH` times those
    that are asked; 0: not even one."""
    low, high, now = 0, int(ENOUGH * asked) + 1, asked
    while high - low > max(1, asked // 50):
        if trial.keeps(talks, 1, seed, scale, now, load=now):
            low = now
        else:
            high = now
        now = (low + high) // 2
    return low
