"""A report for the terminal: warnings first, then the figures, then the checks."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.bench.latency import latency
from headway.bench.names import WITH_TTFT, also_called, per_token_with_ttft
from headway.bench.percentiles import Distribution
from headway.bench.report import BenchReport, ClassReport, GoodputSearch, RequestFigures

LATENCIES = (
    ("ttft_s", "TTFT"),
    ("publish_s", "time to publish"),
    ("tpot_s", "TPOT"),
    ("itl_s", "ITL"),
    ("chunk_gap_s", "chunk gap"),
    ("e2e_s", "e2e"),
)
TOKENS = (("prompt_tokens", "prompt"), ("output_tokens", "answer"))
COLUMNS = ("p50", "p90", "p95", "p99", "mean", "max")
GAUGE_LABELS = (
    ("KV use", "kv_cache_usage_perc"),
    ("decode MBU", "mbu_ratio_decode"),
    ("decode MFU", "mfu_ratio_decode"),
    ("prefill MBU", "mbu_ratio_prefill"),
    ("prefill MFU", "mfu_ratio_prefill"),
    ("MBU", "mbu_ratio"),
    ("MFU", "mfu_ratio"),
)
MESSAGE_LENGTH = 110
BAR = "▁▂▃▄▅▆▇█"


def show_report(report: BenchReport, console: Console, words: Sequence[str] = ()) -> None:
    """Print the report."""
    for line in warnings(report):
        console.print(f"[bold red]![/] {line}", highlight=False)
    console.print(f"[bold]{heading(report)}[/]", highlight=False)
    console.print(latency_table(report.figures, words))
    if words:
        show_foreign_figures(report, console, words)
    for line in rate_lines(report):
        console.print(line, highlight=False)
    if any(each.slo for each in report.classes.values()):
        console.print(class_table(report.classes))
    for line in [*timeline_lines(report), *sharing_lines(report), *check_lines(report)]:
        console.print(line, highlight=False)
    if report.goodput_search is not None:
        console.print(goodput_table(report.goodput_search))
        console.print(report.goodput_search.note, highlight=False)


def heading(report: BenchReport) -> str:
    """Return the load in one line."""
    load, server = report.run.load, report.run.server
    pace = f"closed loop, {load.concurrency} at a time" if load.loop == "closed" else (
        f"open loop, {load.arrivals}, {load.rate:.3g} requests/s"
    )  # fmt: skip
    more = [f"speed {load.speed:g}"] if load.speed != 1 else []
    more += [f"lengths × {load.scale:.3g}"] if load.scale != 1 else []
    cut = f"{report.counts.cut} cut" if report.counts.cut else "none cut"
    return (
        f"{server.model} at {server.url} · {load.workload} · {', '.join([pace, *more])} · "
        f"{report.counts.counted} requests count, {cut} · window {load.to_s - load.from_s:.1f} s"
    )


def warnings(report: BenchReport) -> list[str]:
    """Return what a reader must know before any figure."""
    lines = [f"{c.name}: {c.detail}" for c in report.checks if c.passed is False]
    if report.saturation.over_saturated:
        lines.append(report.saturation.why)
    if report.counts.failed:
        lines.append(f"{report.counts.failed} of {report.counts.counted} requests failed")
        for reason, count in report.counts.reasons.items():
            message = next((x.message for x in report.run.exchanges if x.error == reason), "")
            lines.append(escape(f"  {count} × {reason}: {message[:MESSAGE_LENGTH]}"))
    return lines


def latency_table(figures: RequestFigures, words: Sequence[str]) -> Table:
    """Return percentiles of every latency and length."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for field, label in LATENCIES:
        distribution: Distribution | None = getattr(figures, field)
        if field == "publish_s" and distribution == figures.ttft_s:
            continue
        if distribution is not None:
            called = also_called(field, words)
            name = f"{label} [dim]({called})[/]" if called else label
            table.add_row(name, *(milliseconds(getattr(distribution, c)) for c in COLUMNS))
    for field, label in TOKENS:
        distribution = getattr(figures, field)
        if distribution is not None:
            row = [f"{getattr(distribution, c):,.0f}" for c in COLUMNS]
            table.add_row(f"{label} tokens", *row)
    return table


def show_foreign_figures(report: BenchReport, console: Console, words: Sequence[str]) -> None:
    """Print figures that only another tool has."""
    load = report.run.load
    timed = [
        (x, latency(x)) for x in report.run.exchanges if load.from_s <= x.scheduled_s <= load.to_s
    ]
    distribution = per_token_with_ttft(timed)
    for tool in words:
        if distribution is not None and tool in WITH_TTFT:
            row = "  ".join(f"{c} {milliseconds(getattr(distribution, c))}" for c in COLUMNS)
            console.print(f"{tool}: {WITH_TTFT[tool]} (e2e / n)  {row}", highlight=False)


def milliseconds(seconds: float) -> str:
    """Format seconds: 0.01234 → 12.3 ms, 12.5 → 12.50 s."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def rate_lines(report: BenchReport) -> list[str]:
    """Return throughput, goodput, cache, cost."""
    rates = report.rates
    lines = [
        f"requests/s {rates.requests_per_s:.2f} (offered {rates.offered_per_s:.2f}) · "
        f"input tok/s {rates.input_tokens_per_s:,.0f} · "
        f"output tok/s {rates.output_tokens_per_s:,.0f}"
    ]
    if rates.goodput_per_s is not None and rates.attainment is not None:
        lines.append(
            f"goodput {rates.goodput_per_s:.2f} requests/s, "
            f"{rates.token_goodput_per_s:,.0f} tok/s · {rates.attainment:.1%} met their objectives"
        )
    if rates.cache_hit_rate is not None:
        lines.append(f"prompt tokens from the cache {rates.cache_hit_rate:.1%}")
    if rates.usd_per_million_tokens is not None:
        each = "" if rates.usd_per_request is None else f" · ${rates.usd_per_request:.6f} a request"
        lines.append(f"${rates.usd_per_million_tokens:.2f} per million tokens, in and out{each}")
    return [*lines, *server_lines(report)]


def server_lines(report: BenchReport) -> list[str]:
    """Return the server's own metrics of the run."""
    counters, gauges = report.run.server.counters, report.run.server.gauges
    parts = []
    for label, name in (("queue", "queue"), ("prefill", "prefill"), ("decode", "decode")):
        count = counters.get(f"request_{name}_time_seconds_count", 0)
        if count:
            mean_s = counters[f"request_{name}_time_seconds_sum"] / count
            parts.append(f"mean {label} {milliseconds(mean_s)}")
    if queries := counters.get("prefix_cache_queries_total"):
        parts.append(f"cache hits {counters.get('prefix_cache_hits_total', 0) / queries:.1%}")
    if drafted := counters.get("spec_decode_num_draft_tokens_total"):
        meets_slo = counters.get("spec_decode_num_accepted_tokens_total", 0)
        length = 1 + meets_slo / counters.get("spec_decode_num_drafts_total", drafted)
        parts.append(
            f"draft tokens accepted {meets_slo / drafted:.1%}, acceptance length {length:.2f}"
        )
    if "num_preemptions_total" in counters:
        parts.append(f"preemptions {counters['num_preemptions_total']:.0f}")
    sampled = report.run.server.sampled_s
    for label, name in GAUGE_LABELS:
        values = [
            value
            for at_s, value in zip(sampled, gauges.get(name, []), strict=False)
            if report.run.load.from_s <= at_s <= report.run.load.to_s
            and value is not None
            and not math.isnan(value)
        ]
        if values:
            parts.append(f"{label} mean {sum(values) / len(values):.2f}, most {max(values):.2f}")
    return [f"the server says: {' · '.join(parts)}"] if parts else []


def class_table(classes: dict[str, ClassReport]) -> Table:
    """Return a row for each class."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("class", "objectives", "requests", "attainment", "goodput/s", "budget left"):
        table.add_column(column, justify="left" if column in ("class", "objectives") else "right")
    table.add_column("missed")
    for name, each in classes.items():
        rates = each.rates
        table.add_row(
            name,
            each.slo or "none",
            str(each.counts.counted),
            "–" if rates.attainment is None else f"{rates.attainment:.1%}",
            "–" if rates.goodput_per_s is None else f"{rates.goodput_per_s:.2f}",
            "–" if each.remaining_budget is None else f"{each.remaining_budget:.0%}",
            ", ".join(f"{which} {n}" for which, n in each.missed.items()),
        )
    return table


def timeline_lines(report: BenchReport) -> list[str]:
    """Return the run as rows of bars."""
    times = report.timeline
    rows = (
        ("in flight", times.concurrency, "{:.1f}"),
        ("output tok/s", times.output_tokens_per_s, "{:.0f}"),
        ("TTFT p50", [value or 0.0 for value in times.ttft_p50_s], "{:.3f} s"),
    )
    return [
        f"[dim]{label:<13}[/]{bars(values)} [dim]most {unit.format(max(values))}, "
        f"{times.step_s:g} s a bar[/]"
        for label, values, unit in rows
    ]


def bars(values: Sequence[float]) -> str:
    """Return [0, 1, 2] as "▁▅█"."""
    top = max(values, default=0.0) or 1.0
    return "".join(BAR[min(int(value / top * (len(BAR) - 1) + 0.5), 7)] for value in values)


def sharing_lines(report: BenchReport) -> list[str]:
    """Return the places where prompts begin to differ."""
    lines = []
    for sharing in report.sharing[:5]:
        lines.append(f"prefix: {sharing.sentence}")
        lines += [f"        {parting.sentence}" for parting in sharing.outliers[:3]]
    return lines


def check_lines(report: BenchReport) -> list[str]:
    """Return every check with its outcome."""
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}
    lines = [f"{marks[c.passed]} {c.name} [dim]({c.detail})[/]" for c in report.checks]
    return [*lines, f"[dim]load: {report.saturation.why}[/]"]


def goodput_table(search: GoodputSearch) -> Table:
    """Return the points of the search."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("rate", "attainment", "goodput/s", "output tok/s", "TTFT p99", "TPOT p99"):
        table.add_column(column, justify="right")
    table.add_column("")
    for point in sorted(search.points, key=lambda p: p.rate):
        table.add_row(
            f"{point.rate:.3g}",
            f"{point.attainment:.1%}",
            f"{point.goodput_per_s:.2f}",
            f"{point.output_tokens_per_s:,.0f}",
            "–" if point.ttft_p99_s is None else milliseconds(point.ttft_p99_s),
            "–" if point.tpot_p99_s is None else milliseconds(point.tpot_p99_s),
            "kept" if point.meets_slo else f"[red]not kept[/] {point.why}",
        )
    return table
