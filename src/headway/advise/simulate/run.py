"""A simulation from end to end: a folder, options and traffic in, a report with intervals out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.advise.simulate.front import Front
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import Machinery, machinery
from headway.advise.simulate.outcome import (
    SimulatedReport,
    Simulation,
    intervals,
    report_of,
)
from headway.advise.simulate.replica import Served, fleet
from headway.bench.load import quiet_gc
from headway.bench.prompts import IdWriter
from headway.bench.report import Report
from headway.bench.run import Bench, prepare
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import UsageError
from headway.core.service import service_classes

NOWHERE = "http://simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before a simulation runs."""

    bench: Bench
    served: Served
    machinery: Machinery
    front: Front
    clients: Clients
    replicas: int
    runs: int
    seed: int


def plan(folder: Path, options: SimulateOptions, load: BenchOptions, engine: EngineOptions) -> Plan:
    """Check all that is asked and read what it names; raises HeadwayError before anything runs."""
    bench = prepare(NOWHERE, load)
    found = machinery(folder, options, engine)
    classes = service_classes(
        options.served_slo, Path(options.served_classes) if options.served_classes else None
    )
    check_lengths(bench, found.settings.max_model_len)
    return Plan(
        bench=bench,
        served=Served(
            spec=found.spec,
            settings=found.settings,
            description=found.description,
            classes=classes,
            max_queue=options.max_queue,
            max_queue_wait_s=options.max_queue_wait,
            acceptance=found.acceptance,
            belief=found.belief,
        ),
        machinery=found,
        front=found.front,
        clients=Clients(
            answer_limit=options.answer_limit,
            retries=options.retries,
            timeout_s=load.timeout,
            concurrency=load.concurrency,
            until_s=None if load.num_requests else bench.traffic.span_s or None,
        ),
        replicas=options.replicas,
        runs=options.runs,
        seed=load.seed,
    )


def check_lengths(bench: Bench, most: int) -> None:
    """Raise UsageError where a first turn is beyond the context: a server would refuse it."""
    for talk in bench.traffic.conversations:
        turn = talk.turns[0]
        tokens = sum(piece.tokens for piece in turn.system + turn.prompt) + turn.output_tokens
        if tokens > most:
            raise UsageError(
                f"A request of class {talk.service_class} has {tokens:,} tokens with its answer; "
                f"the context is {most:,}.",
                f"Shorten it, or scale a trace: --scale-length {most}.",
            )


def simulate(
    wanted: Plan, version: str, watch: Callable[[int, int], None] = lambda done, total: None
) -> SimulatedReport:
    """Run all and report the first, with the interval of each figure over all of them.

    `watch` is told how many runs are done of how many.
    """
    outcomes: list[tuple[Report, World]] = []
    cases = wanted.machinery.cases(wanted.runs, wanted.seed)
    for number, (seed, scale) in enumerate(cases):
        watch(number, len(cases))
        outcomes.append(once(wanted, seed, scale, version))
    watch(len(cases), len(cases))
    return joined(wanted, outcomes)


def once(wanted: Plan, seed: int, scale: float, version: str) -> tuple[Report, World]:
    """One run: the machine's times drawn by `seed`, all of them `scale` times as long."""
    found = wanted.machinery
    replicas = fleet(wanted.served, lambda s: found.truth(s, scale), wanted.replicas, seed)
    options = wanted.bench.options
    writer = IdWriter(options.seed, options.vocab_size)
    world = World(replicas, wanted.front.scaled(scale), writer, wanted.clients, seed)
    with quiet_gc(cleans=False):
        exchanges = world.run(wanted.bench.traffic.conversations)
    for replica in replicas:
        replica.engine.check_integrity()
    world.door.admission.check_integrity()
    return report_of(wanted.bench, exchanges, found.model, found.label, version), world


def joined(wanted: Plan, outcomes: list[tuple[Report, World]]) -> SimulatedReport:
    """The first report, with what all of them say of its error."""
    first, world = outcomes[0]
    found = wanted.machinery
    steps = sum(replica.num_steps for replica in world.replicas)
    beyond = sum(replica.truth.reach.share * replica.num_steps for replica in world.replicas)
    simulation = Simulation(
        label=found.label,
        extrapolated=round(beyond / max(steps, 1), 4),
        drift=round(found.drift, 4),
        runs=len(outcomes),
        replicas=wanted.replicas,
        num_steps=steps,
        num_retries=world.num_retries,
        busy_share=busy_share(world),
        intervals=intervals([report for report, _ in outcomes]),
        notes=found.notes,
    )
    fields = {name: getattr(first, name) for name in Report.__struct_fields__}
    return SimulatedReport(simulation=simulation, **fields)


def busy_share(world: World) -> float:
    """The mean share of the time in which an engine was in a step."""
    end_s = max((x.ended_s or 0.0 for x in world.exchanges), default=0.0) or 1.0
    return round(sum(r.busy_s for r in world.replicas) / end_s / len(world.replicas), 4)
