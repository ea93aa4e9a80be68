"""The planner's report: a row for each machine, the reason in a sentence, and the tables."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from headway.advise.plan.capacity import MachineRow, size_machine
from headway.advise.plan.demand import PlannedDemand, demand_of
from headway.advise.plan.machines import (
    PRICES_READ,
    MachineCandidate,
    RefusedMachine,
    find_candidates,
)
from headway.advise.plan.trial import PlanTarget
from headway.advise.simulate.run import SIMULATED_URL
from headway.advise.simulate.truth import ROOFLINE
from headway.advise.words import duration, plural
from headway.bench.run import prepare
from headway.config.options import BenchOptions, EngineOptions
from headway.config.options.plan import PlanOptions
from headway.core.errors import UsageError
from headway.core.service import service_classes
from headway.spec import read_model_spec

MAX_TOKENS_PER_P99 = 4
"""The max_tokens that clients are assumed to send, as a multiple of the p99 of answers."""


SILENT_S = 5.0
"""A plan that takes longer says how long the rest takes."""


class PlanAnswer(msgspec.Struct, kw_only=True):
    """The complete plan; `headway` is the version that made it."""

    format: str = "headway-plan"
    version: int = 1
    headway: str
    model: str
    mean_rate: float
    peak_rate: float
    at_once: int | None = None
    attainment: float
    assumed: list[str]
    rows: list[MachineRow]
    refused: list[str]
    best: str


def plan_capacity(
    folder: Path,
    options: PlanOptions,
    load: BenchOptions,
    engine: EngineOptions,
    version: str,
    watch: Callable[[str], None] = lambda text: None,
) -> PlanAnswer:
    """Size every machine for the demand; raise HeadwayError before anything is simulated.

    `watch` gets a line before the first machine, and after each that took long: how long the rest
    takes.
    """
    if not (load.slo or load.classes):
        raise UsageError("plan needs objectives.", "Add --slo ttft=1s,tpot=50ms.")
    if load.attainment >= 1:
        raise UsageError(
            "--attainment 1 allows no miss: no number of servers promises that.", "Write 0.99."
        )
    bench = prepare(SIMULATED_URL, load)
    spec = read_model_spec(folder)
    context = engine.max_model_len or spec.default_len
    demand = demand_of(bench, options, context)
    longest = min(demand.prompt_p99 + demand.answer_p99, context)
    usable, refused = find_candidates(folder, options, engine, longest)
    target = PlanTarget(
        bench=bench,
        classes=service_classes(load.slo),
        attainment=load.attainment,
        answer_limit=options.answer_limit or MAX_TOKENS_PER_P99 * demand.answer_p99,
        survive=options.survive,
    )
    rows = size_machines(usable, demand, target, watch)
    return PlanAnswer(
        headway=version,
        model=folder.name,
        mean_rate=demand.mean_rate,
        peak_rate=demand.peak_rate,
        at_once=demand.at_once,
        attainment=load.attainment,
        assumed=[*demand.assumed, max_tokens_note(target)],
        rows=rows,
        refused=[format_rejection(each) for each in refused],
        best=format_best(rows, demand, load.attainment),
    )


def size_machines(
    usable: list[MachineCandidate],
    demand: PlannedDemand,
    target: PlanTarget,
    watch: Callable[[str], None],
) -> list[MachineRow]:
    """Size machine after machine, and say how long the rest takes where that is long."""
    rows: list[MachineRow] = []
    started_s = time.monotonic()
    watch(f"simulating {plural(len(usable), 'machine')}, each under tens of loads")
    for number, candidate in enumerate(usable, 1):
        rows.append(size_machine(candidate, demand, target))
        passed_s = time.monotonic() - started_s
        if passed_s > SILENT_S and number < len(usable):
            rest_s = passed_s / number * (len(usable) - number)
            watch(
                f"{number} of {len(usable)} machines simulated: about {duration(rest_s)} to go; "
                "fewer --machines take less"
            )
    return rows


def max_tokens_note(target: PlanTarget) -> str:
    return (
        f"clients send max_tokens {target.answer_limit:,}; the engine learns no more of a length, "
        "and they try twice more after a 503"
    )


def format_rejection(refused: RefusedMachine) -> str:
    return f"{refused.name}: {refused.why}"


def format_best(rows: list[MachineRow], demand: PlannedDemand, attainment: float) -> str:
    """Return the cheapest fleet in a sentence, or why no machine can serve the demand."""
    can = [row for row in rows if row.servers is not None]
    if not can:
        whys = [f"{row.machine}: {row.hopeless}" for row in rows if row.hopeless]
        return "None of these machines can. " + "; ".join(whys)
    priced = [row for row in can if row.usd_per_hour is not None]
    chosen = min(priced or can, key=lambda r: (r.usd_per_hour or 0.0, r.servers or 0))
    low, high = chosen.servers_range
    cost = "" if chosen.usd_per_hour is None else f" for ${chosen.usd_per_hour:.2f} an hour"
    between = f" ({low} to {high} at the ends of the uncertainty)" if low != high else ""
    machines = f"{chosen.machine}{format_degrees(chosen)}{between}"
    return (
        f"{chosen.servers} x {machines} keep {attainment:.0%} of "
        f"{format_demand(demand)} in their objectives{cost}, "
        f"{chosen.label}; fails first: {chosen.breaks_first}"
    )


def format_demand(demand: PlannedDemand) -> str:
    """Return the peak load in words."""
    if demand.at_once is not None:
        return f"{demand.at_once:,} requests at once"
    return f"{demand.peak_rate:.3g} requests/s at the peak"


def format_degrees(row: MachineRow) -> str:
    """Return ` (tensor parallel 2)` where a server has several devices, else ""."""
    parts = [f"tensor parallel {row.tensor}"] if row.tensor > 1 else []
    parts += [f"pipeline of {row.pipeline}"] if row.pipeline > 1 else []
    return f" ({', '.join(parts)})" if parts else ""


def show_plan(answer: PlanAnswer, console: Console) -> None:
    """Print the plan."""
    console.print(f"[bold]{answer.best}[/]", highlight=False)
    comes = f"{answer.mean_rate:.3g} requests/s in the mean, {answer.peak_rate:.3g} at the peak"
    if answer.at_once is not None:
        comes = f"{answer.at_once:,} requests at once, each sent when another is answered"
    console.print(f"{answer.model}: {comes}", highlight=False)
    console.print(plan_table(answer))
    show_notes(answer, console)


def show_notes(answer: PlanAnswer, console: Console) -> None:
    """Print the machines that no number helps, those that cannot serve, and the assumptions."""
    for row in answer.rows:
        if row.hopeless:
            console.print(f"{row.machine}, {row.weights}: {row.hopeless}", highlight=False)
        for note in row.notes:
            console.print(f"{row.machine}: {note}", highlight=False)
    for line in answer.refused:
        console.print(f"cannot: {line}", highlight=False)
    for line in answer.assumed:
        console.print(f"[dim]assumed: {line}[/]", highlight=False)
    if any(row.usd_per_hour for row in answer.rows):
        note = f"prices of the table as read {PRICES_READ}; energy is TDP x busy share, at most"
        console.print(f"[dim]{note}[/]", highlight=False)


def plan_table(answer: PlanAnswer) -> Table:
    """Return a table with a row for each machine."""
    shown = Table()
    for name in (
        *("machine", "weights", "figures are", "KV tokens", "p95 prompt", "token alone"),
        *(
            "requests/s a server" if answer.at_once is None else "at once a server",
            "servers",
            "in SLO",
            "$/h",
            "$/M tokens",
            "J/token",
            "kWh/year",
        ),
    ):
        shown.add_column(name, justify="left" if name in ("machine", "weights") else "right")
    for row in answer.rows:
        shown.add_row(*cells(row))
    return shown


def cells(row: MachineRow) -> list[str]:
    servers = "none" if row.servers is None else str(row.servers)
    if row.servers is not None and row.servers_range[0] != row.servers_range[1]:
        servers += f" ({row.servers_range[0]} to {row.servers_range[1]})"
    share = "" if row.attainment is None else f"{row.attainment[0]:.0%} to {row.attainment[1]:.0%}"
    about = "about " if row.label == ROOFLINE else ""
    return [
        row.machine + format_degrees(row),
        row.weights,
        row.label,
        f"{row.kv_tokens:,}",
        f"{about}{row.prompt_s:.3g} s",
        f"{about}{1e3 * row.tpot_s:.3g} ms",
        format_rate(row),
        servers,
        share,
        *(format_figure(v) for v in (row.usd_per_hour, row.usd_per_million_tokens)),
        *(format_figure(v) for v in (row.joules_per_token, row.kwh_per_year)),
    ]


def format_rate(row: MachineRow) -> str:
    """Return the load that one server keeps, with its range; on a roofline the range alone."""
    low, middle, high = row.at_once or row.rate
    ends = f"{low:.3g} to {high:.3g}"
    return ends if row.label == ROOFLINE else f"{middle:.3g} ({ends})" if middle else "0"


def format_figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
