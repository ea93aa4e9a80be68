"""A simulation from end to end: a folder, options and traffic in, a report with intervals out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import SimulatedMachine, build_machine
from headway.advise.simulate.outcome import (
    SimulatedReport,
    Simulation,
    intervals,
    report_of,
)
from headway.advise.simulate.replica import ServerSetup, build_replicas
from headway.bench.load import quiet_gc
from headway.bench.prompts import IdWriter
from headway.bench.report import BenchReport
from headway.bench.run import Bench, prepare
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.simulate import SimulateOptions
from headway.core.errors import UsageError
from headway.core.service import service_classes

SIMULATED_URL = "http://simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """The checked inputs of a simulation."""

    bench: Bench
    served: ServerSetup
    machinery: SimulatedMachine
    front: FrontendTimes
    clients: Clients
    replicas: int
    runs: int
    seed: int


def prepare_simulation(
    folder: Path, options: SimulateOptions, load: BenchOptions, engine: EngineOptions
) -> SimulationPlan:
    """Check the options and read the files that they name; raise HeadwayError before anything
    runs."""
    bench = prepare(SIMULATED_URL, load)
    machine = build_machine(folder, options, engine)
    classes = service_classes(
        options.served_slo, Path(options.served_classes) if options.served_classes else None
    )
    check_lengths(bench, machine.settings.max_model_len)
    return SimulationPlan(
        bench=bench,
        served=ServerSetup(
            spec=machine.spec,
            settings=machine.settings,
            description=machine.description,
            classes=classes,
            max_queue=options.max_queue,
            max_queue_wait_s=options.max_queue_wait,
            acceptance=machine.acceptance,
            belief=machine.belief,
        ),
        machinery=machine,
        front=machine.front,
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
    plan: SimulationPlan,
    version: str,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> SimulatedReport:
    """Run all cases and report the first, with the interval of each figure over all of them.

    `watch` is called with the number of finished runs and of all runs.
    """
    outcomes: list[tuple[BenchReport, World]] = []
    cases = plan.machinery.cases(plan.runs, plan.seed)
    for number, (seed, scale) in enumerate(cases):
        watch(number, len(cases))
        outcomes.append(run_once(plan, seed, scale, version))
    watch(len(cases), len(cases))
    return merge_runs(plan, outcomes)


def run_once(
    plan: SimulationPlan, seed: int, scale: float, version: str
) -> tuple[BenchReport, World]:
    """Run one case: the machine's pace is drawn by `seed`, all times are scaled by `scale`."""
    machine = plan.machinery
    replicas = build_replicas(plan.served, lambda s: machine.truth(s, scale), plan.replicas, seed)
    options = plan.bench.options
    writer = IdWriter(options.seed, options.vocab_size)
    world = World(replicas, plan.front.scaled(scale), writer, plan.clients, seed)
    with quiet_gc(cleans=False):
        exchanges = world.run(plan.bench.traffic.conversations)
    for replica in replicas:
        replica.engine.check_integrity()
    world.door.admission.check_integrity()
    return report_of(plan.bench, exchanges, machine.model, machine.label, version), world


def merge_runs(plan: SimulationPlan, outcomes: list[tuple[BenchReport, World]]) -> SimulatedReport:
    """Return the first report, with its error from all runs."""
    first, world = outcomes[0]
    machine = plan.machinery
    steps = sum(replica.num_steps for replica in world.replicas)
    beyond = sum(replica.truth.reach.share * replica.num_steps for replica in world.replicas)
    simulation = Simulation(
        label=machine.label,
        extrapolated=round(beyond / max(steps, 1), 4),
        drift=round(machine.drift, 4),
        runs=len(outcomes),
        replicas=plan.replicas,
        num_steps=steps,
        num_retries=world.num_retries,
        busy_share=busy_share(world),
        intervals=intervals([report for report, _ in outcomes]),
        notes=machine.notes,
    )
    fields = {name: getattr(first, name) for name in BenchReport.__struct_fields__}
    return SimulatedReport(simulation=simulation, **fields)


def busy_share(world: World) -> float:
    """Return the mean share of the time in which an engine was in a step."""
    end_s = max((x.ended_s or 0.0 for x in world.exchanges), default=0.0) or 1.0
    return round(sum(r.busy_s for r in world.replicas) / end_s / len(world.replicas), 4)
