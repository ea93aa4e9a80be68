"""A simulated report for the terminal and as files: bench's own, with its basis and intervals."""

import sys

from rich.console import Console
from rich.table import Table

from headway.advise.simulate.outcome import SimulatedReport, Simulation
from headway.advise.simulate.run import SimulationPlan
from headway.advise.simulate.truth import ROOFLINE
from headway.advise.words import plural
from headway.bench import export, page, table
from headway.config.options import BenchOptions
from headway.measure.saved import write

LATENCIES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "TPOT p99",
    "e2e_p50_s": "e2e p50",
    "e2e_p99_s": "e2e p99",
}
SHARES = {"attainment": "in SLO", "refused_share": "refused"}
RATES = {
    "goodput_per_s": "goodput, requests/s",
    "requests_per_s": "answers/s",
    "output_tokens_per_s": "tokens/s",
}


def outline(plan: SimulationPlan) -> str:
    """Return what `--dry-run` prints."""
    machine, traffic = plan.machinery, plan.bench.traffic
    settings = machine.settings
    return "\n".join(
        [
            f"{machine.model}: {len(traffic.conversations)} conversations in "
            f"{traffic.span_s:.1f} s on {plural(plan.replicas, 'engine')}, {machine.label}",
            f"policy {settings.scheduler.policy}, {settings.max_num_seqs} rows, "
            f"{settings.max_num_batched_tokens} tokens a step, "
            f"{(settings.cache.num_blocks[0] - 1) * settings.cache.block_size:,} KV tokens",
            *machine.notes,
        ]
    )


def publish(report: SimulatedReport, options: BenchOptions) -> None:
    """Print the report and write the files that the options name."""
    if options.json:
        export.write_json(report, options.json)
    if options.csv:
        export.write_csv(report, options.csv)
    if options.html:
        write(options.html, page.html(report).encode())
    console = Console(width=None if sys.stdout.isatty() else 160)
    for line in heading(report.simulation):
        console.print(line, highlight=False)
    console.print(errors(report.simulation))
    if (
        report.simulation.label == ROOFLINE
    ):  # an interval of two estimates has no single time to print
        return
    table.show_report(report, console, options.words)


def heading(simulation: Simulation) -> list[str]:
    """Return the basis of the figures: label, steps, runs, extrapolation."""
    beyond = simulation.extrapolated
    lines = [
        f"[bold]Simulated, {simulation.label}[/]: {simulation.num_steps:,} steps, "
        f"{simulation.busy_share:.0%} busy, {simulation.runs} runs; the machine's pace varied by "
        f"{simulation.drift:.0%} while it was measured"
    ]
    if beyond:
        lines.append(f"{beyond:.0%} of the steps are extrapolated: larger than any measured")
    if simulation.num_retries:
        lines.append(f"{simulation.num_retries} requests were sent again")
    return [*lines, *simulation.notes]


def errors(simulation: Simulation) -> Table:
    """Return a table of each figure's interval over all runs."""
    shown = Table(title="intervals over all runs", title_justify="left")
    for column in ("", "from", "to"):
        shown.add_column(column, justify="right" if column else "left")
    for names, write_out in ((LATENCIES, milliseconds), (SHARES, percent), (RATES, plain)):
        for name, label in names.items():
            interval = simulation.intervals.get(name)
            if interval is not None:
                shown.add_row(label, write_out(interval.low), write_out(interval.high))
    return shown


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def percent(value: float) -> str:
    return f"{value:.1%}"


def plain(value: float) -> str:
    return f"{value:.3g}"
