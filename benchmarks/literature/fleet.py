"""Claims about fleets, simulated: prefill and decode apart, how many of each, ranks or replicas.

These machines were not measured. A step takes its bytes over 60% of an H100's bandwidth or its
FLOPs over half of its FLOP/s, whichever is longer, and 1.5 ms
(`advise.simulate.truth.RooflineTruth`); scheduler, caches, admission's choice, parcels and restores
are the server's own.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np

from headway.advise.plan.machines import datasheet_machine, find_sheet, settings_for_devices
from headway.advise.simulate.front import NO_FRONT
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.pools import SimulatedPools
from headway.advise.simulate.replica import ServerSetup, SimulatedReplica
from headway.advise.simulate.truth import MeasuredRange, RooflineTruth, Truth
from headway.bench.latency import latency
from headway.bench.prompts import GeneratedPiece, IdWriter
from headway.bench.report import misses
from headway.bench.workload import Conversation, Turn
from headway.config.cache_config import CacheConfig
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.plan import Ceilings, Description
from headway.core.service import service_classes
from headway.core.slo import Slo
from headway.perf.model import StepModel, Work, prior_of
from headway.spec import ModelSpec
from literature.claim import Claim, Figure, Finding, Promise
from literature.pictures import bars, groups
from literature.shapes import LLAMA_3_8B, spec_of
from literature.split import prefill_engines
from literature.subject import Subject

BANDWIDTH, FLOPS = 3350e9, 989e12
REACHED_BANDWIDTH, REACHED_FLOPS, FIXED_S = 0.6, 0.5, 1.5e-3
KV_BYTES, BLOCK = 56e9, 16
ATTAINMENT, SKIPPED = 0.9, 0.3
"""The share of requests that meet both objectives, of those behind the first: engines fill."""
LINK_BYTES_S = 50e9
ROWS = 256
Talks = Callable[[float, int], list[Conversation]]
"""(requests a second, how many) → the traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kind of traffic: prompt and answer tokens, each evenly between two, and objectives."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    slo: Slo
    seconds: float
    """Of traffic in each trial."""

    @property
    def middle(self) -> tuple[int, int]:
        """The mean prompt and answer."""
        return sum(self.prompt) // 2, sum(self.answer) // 2

    def talks(self, rate: float, count: int) -> list[Conversation]:
        """So many requests at random times; the same for each way of dividing the engines."""
        draw = np.random.default_rng(3)
        times = np.cumsum(draw.exponential(1 / rate, count))
        prompts = draw.integers(*self.prompt, count, endpoint=True)
        answers = draw.integers(*self.answer, count, endpoint=True)
        return [
            Conversation(
                at_s=float(at_s),
                service_class=self.name,
                turns=(
                    Turn(
                        prompt=(GeneratedPiece(f"{self.name} {i}", int(p)),), output_tokens=int(a)
                    ),
                ),
            )
            for i, (at_s, p, a) in enumerate(zip(times, prompts, answers, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Way:
    """How the engines are used: `prefill` of them for prompts, 0: each does both."""

    name: str
    prefill: int = 0
    policy: str = "slo"
    budget: int = 8192


def machine(spec: ModelSpec) -> Description:
    """An H100 by its datasheet."""
    ceilings = Ceilings(bandwidth_bytes_per_s=BANDWIDTH, flops_per_s=FLOPS)
    return Description(device="cuda", ceilings=ceilings)


def truth(spec: ModelSpec, kind: type[RooflineTruth] = RooflineTruth) -> RooflineTruth:
    """What a step takes there."""
    prior = prior_of(spec, machine(spec), "bfloat16")
    return kind(
        weights_s=prior.weights_s / REACHED_BANDWIDTH,
        head_s=prior.any_sampled_s / REACHED_BANDWIDTH,
        read_s=prior.read_s / REACHED_BANDWIDTH,
        token_s=prior.token_s / REACHED_FLOPS,
        attended_s=prior.attended_s / REACHED_FLOPS,
        sampled_s=prior.sampled_s / REACHED_FLOPS,
        fixed_s=FIXED_S,
        reach=MeasuredRange((sys.maxsize,) * 4),
    )


def served(spec: ModelSpec, name: str, slo: Slo, policy: str, budget: int) -> ServerSetup:
    """A server of one class with these objectives, that refuses nobody."""
    size = BLOCK * sum(group.bytes_per_token("bfloat16") for group in spec.kv_groups)
    settings = Settings(
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        attention_backend="none",
        max_model_len=8192,
        max_num_seqs=ROWS,
        max_num_batched_tokens=budget,
        cache=CacheConfig(num_blocks=(int(KV_BYTES / size),), block_bytes=(size,)),
        threads=1,
        seed=0,
        scheduler=SchedulerConfig(policy=policy),
    )
    return ServerSetup(
        spec=spec,
        settings=settings,
        description=machine(spec),
        classes=service_classes([f"{name}:{slo}"]),
        max_queue=10**9,
        max_queue_wait_s=inf,
    )


def shares(
    took: RooflineTruth, load: tuple[int, int], tpot_s: float, rate: float
) -> tuple[float, float]:
    """(prefill, decode) engines that this rate asks for, by the roofline alone.

    `load` is the mean prompt and answer. A decode engine runs so many rows that a step takes the
    promised time.
    """
    prompt, answer = load
    prefill_s = prompt * took.token_s + took.attended_s * prompt * (prompt + 1) / 2
    context, rows = prompt + answer // 2, 1

    def step_s(rows: int) -> float:
        return took.seconds(Work(rows, rows, rows * context, rows * context))

    while rows < ROWS and step_s(rows + 1) <= tpot_s:
        rows += 1
    return rate * prefill_s, rate * answer * step_s(rows) / rows


@dataclass(kw_only=True)
class House:
    """Worlds of one kind of load; an engine's cost model is learned once."""

    name: str
    slo: Slo
    talks: Talks
    engines: int
    seconds: float
    precision: float
    link_bytes_s: float = LINK_BYTES_S
    truth_of: Callable[[ModelSpec], Truth] = truth
    spec: ModelSpec = field(default_factory=lambda: replace(spec_of(LLAMA_3_8B), eos_token_ids=()))
    beliefs: dict[str, StepModel] = field(default_factory=dict)

    def replica(self, way: Way, number: int) -> SimulatedReplica:
        """One engine."""
        shape = served(self.spec, self.name, self.slo, way.policy, way.budget)
        belief = self.beliefs.get(way.policy)
        made = SimulatedReplica(
            replace(shape, belief=belief), self.truth_of(self.spec), seed=number
        )
        if belief is None:
            self.beliefs[way.policy] = made.engine.cost
        return made

    def attained(self, way: Way, rate: float) -> float:
        """The share of requests that met both objectives, behind the first of them."""
        replicas = [self.replica(way, number) for number in range(self.engines)]
        writer, clients = IdWriter(0), Clients(timeout_s=120.0)
        if way.prefill:
            link = self.link_bytes_s
            world: World = SimulatedPools(
                *(replicas, way.prefill, NO_FRONT, writer, clients, 1), link_bytes_s=link
            )
        else:
            world = World(replicas, NO_FRONT, writer, clients, 1)
        count = max(int(rate * self.seconds), 40)
        found = world.run(self.talks(rate, count))
        judged = found[int(SKIPPED * count) :]
        good = [x for x in judged if not misses(self.slo, x, latency(x))]
        return len(good) / len(judged)

    def best_rate(self, way: Way, guess: float) -> tuple[float, float]:
        """(the highest rate that kept the attainment, the lowest that did not), requests/s."""
        low, high = 0.0, inf
        while high > (1 + self.precision) * low:
            if self.attained(way, guess) >= ATTAINMENT:
                low = guess
            else:
                high = guess
            if high < 0.05:
                return 0.0, high
            guess = (low * high) ** 0.5 if low and high < inf else (2 * low or high / 2)
        return low, high


# ── the claims ──────────────────────────────────────────────────────────────────────────────

ENGINES, PRECISION = 4, 0.2
LONG = Load(
    name="long", prompt=(3584, 4608), answer=(96, 160), slo=Slo(ttft_s=1.0, tpot_s=0.05), seconds=6
)
SHORT = Load(
    name="short", prompt=(96, 160), answer=(96, 160), slo=Slo(ttft_s=0.5, tpot_s=0.0105), seconds=3
)
LOADS = (LONG, SHORT)
CHUNKED = Way("chunks of 512, first come first served", policy="fcfs", budget=512)
BY_OBJECTIVES = Way("chunks by the objectives")
WAYS = (
    CHUNKED,
    BY_OBJECTIVES,
    *(Way(f"{p} prefill, {ENGINES - p} decode", p) for p in range(1, ENGINES)),
)
REPLICAS, RANKS = f"{ENGINES} replicas", f"{ENGINES} ranks"
Rates = dict[str, dict[str, tuple[float, float]]]


def divided(subject: Subject) -> Rates:
    """By load and way the rate that keeps the objectives, with its bracket."""
    return {load.name: ways_of(subject, load) for load in LOADS}


def ways_of(subject: Subject, load: Load) -> dict[str, tuple[float, float]]:
    """Every way of dividing the engines under one load."""
    house = house_of(load, ENGINES)
    asked = engines_needed(load)
    found = {}
    for way in WAYS:
        subject.watch(f"simulated, {load.name}: {way.name}")
        bound = 0.7 * ENGINES / sum(asked)
        if way.prefill:
            bound = 0.8 / max(asked[0] / way.prefill, asked[1] / (ENGINES - way.prefill))
        found[way.name] = house.best_rate(way, bound)
    return found


def house_of(load: Load, engines: int, truth_of: Callable[[ModelSpec], Truth] = truth) -> House:
    """So many engines under one load."""
    return House(
        name=load.name,
        slo=load.slo,
        talks=load.talks,
        engines=engines,
        seconds=load.seconds,
        precision=PRECISION,
        truth_of=truth_of,
    )


def engines_needed(load: Load) -> tuple[float, float]:
    """(prefill, decode) engines that a request a second asks for."""
    return shares(truth(spec_of(LLAMA_3_8B)), load.middle, load.slo.tpot_s or inf, 1.0)


def best_split(rates: dict[str, tuple[float, float]]) -> str:
    """The name of the split that keeps the most."""
    return max((n for n in rates if " prefill, " in n), key=lambda name: rates[name][0])


def over(rates: dict[str, tuple[float, float]], top: str, bottom: str, name: str) -> Figure:
    """One rate over another; from the brackets of both bisections."""
    (a_low, a_high), (b_low, b_high) = rates[top], rates[bottom]
    return Figure(
        name=name,
        value=(a_low * a_high / max(b_low * b_high, 1e-9)) ** 0.5,
        low=a_low / b_high,
        high=a_high / max(b_low, 1e-9),
        unit="x",
    )


def apart(subject: Subject) -> Finding:
    """The best split over chunks in each engine, by load."""
    found = subject.once(divided)
    first, others = list[Figure](), list[Figure]()
    for load, rates in found.items():
        split = best_split(rates)
        first.append(over(rates, split, CHUNKED.name, f"{load}: {split} over chunks of 512"))
        others.append(over(rates, split, BY_OBJECTIVES.name, f"{load}: over our scheduler"))
    first.sort(key=lambda figure: -figure.value)
    names = [way.name for way in WAYS]
    return Finding(
        figures=[*first, *others],
        promise=Promise(low=2.0),
        why="Simulated on four H100. Where a step computes a prompt while it reads what answers "
        "need, chunks use both halves of a machine, and engines apart leave one half idle each. "
        "The source compares with engines that computed prompts whole, between the decodes.",
        picture=groups(
            names,
            {load: [rates[name][0] for name in names] for load, rates in found.items()},
            "requests/s within both objectives",
        ),
    )


def ratio(subject: Subject) -> Finding:
    """The best number of prefill engines by load, beside what the rates alone ask for."""
    found, figures = subject.once(divided), list[Figure]()
    best = {load.name: int(best_split(found[load.name]).split()[0]) for load in LOADS}
    for load in LOADS:
        chosen = prefill_engines(ENGINES, *engines_needed(load))
        figures.append(Figure(name=f"{load.name}: best prefill engines", value=best[load.name]))
        figures.append(Figure(name="… by the rates alone", value=chosen))
    long = [rates[0] for name, rates in found[LONG.name].items() if " prefill, " in name]
    worst = max(long) / max(min(long), 1e-9)
    return Finding(
        figures=[Figure(name="long prompts: best ratio over the worst", value=worst, unit="x"),
                 *figures],
        promise=Promise(low=1.5),
        why=f"Of four engines {best['long']} for prompts of 4,096 tokens with short answers, "
        f"{best['short']} for prompts as short as their answers: the ratio is that of the time "
        "both take, and a fixed one loses on another workload.",
    )  # fmt: skip


def ranked(degree: int) -> Truth:
    """A server of so many H100 as ranks: half-way between the best and the worst believed."""
    spec = replace(spec_of(LLAMA_3_8B), eos_token_ids=())
    sheet, _ = find_sheet("H100-SXM5-80GB")
    settings = settings_for_devices(spec, EngineOptions(), sheet, degree)
    assert settings is not None, "8B fit"
    return datasheet_machine(Path("claims"), spec, settings, sheet, degree, 1).truth(0, 0.5)


def ranks(subject: Subject) -> Finding:
    """Four replicas of one device, and one server of four ranks, of the same model and load."""
    alone_ms, rates = list[float](), dict[str, tuple[float, float]]()
    context = sum(LONG.middle)
    for name, degree in ((REPLICAS, 1), (RANKS, ENGINES)):
        subject.watch(f"simulated: {name}")
        alone_ms.append(1e3 * ranked(degree).seconds(Work(1, 1, context, context)))
        house = house_of(LONG, ENGINES // degree, lambda _, degree=degree: ranked(degree))  # type: ignore[misc]
        rates[name] = house.best_rate(BY_OBJECTIVES, 16.0)
    faster = alone_ms[0] / alone_ms[1]
    return Finding(
        figures=[
            over(rates, REPLICAS, RANKS, "replicas' requests/s over ranks'"),
            Figure(
                name="a token alone: ranks faster",
                value=faster,
                unit="x",
                promise=Promise(low=1.1),
            ),
            Figure(name="a token alone, one device", value=alone_ms[0], unit=" ms"),
            Figure(name=f"… {RANKS}", value=alone_ms[1], unit=" ms"),
        ],
        promise=Promise(low=1.1),
        why="Simulated. Ranks read a quarter of the weights each and sum twice a layer: a token "
        f"alone comes {faster:.1f} times as fast, and those sums are what throughput pays.",
        picture=bars([(n, r[0]) for n, r in rates.items()], "requests/s within both objectives"),
    )


CLAIMS = (
    Claim(
        key="fleet-apart",
        family="Fleet",
        says="Prefill and decode in different engines serve more at the same objectives.",
        source="Zhong et al., DistServe (OSDI 2024): up to 7.4 times the requests",
        measure=apart,
        how="Simulated: Llama 3 8B on four H100, the rate at which 90% meet both objectives, by "
        "bisection on the real scheduler.",
    ),
    Claim(
        key="fleet-ratio",
        family="Fleet",
        says="The ratio of prefill to decode engines follows the workload: 2:1 to 4:1 for long "
        "prompts, 1:2 to 1:1 for short ones.",
        source="C. Huyen, AI Engineering (2025), chapter 9; Splitwise (2024)",
        measure=ratio,
        how="The same, all ways to divide four engines, two workloads.",
    ),
    Claim(
        key="fleet-ranks",
        family="Fleet",
        says="Tensor parallelism is for latency, replicas are for throughput.",
        source="common in serving literature",
        measure=ranks,
        how="Simulated: four devices as four replicas or as four ranks, prompts of 4,096 tokens.",
    ),
)
