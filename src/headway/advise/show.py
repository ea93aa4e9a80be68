"""A diagnosis on one screen, or as an HTML page, the verdict first."""

import io
from html import escape as escape_html

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headway.advise.diagnosis import HEALTHY, Diagnosis, DoctorFinding
from headway.advise.shorter import Saving
from headway.advise.what_if.compare import Gain
from headway.advise.what_if.gains import format_gain
from headway.advise.words import dollars, duration, percent
from headway.config.memory_plan import gib
from headway.measure.onepage import one_page, preformatted, section
from headway.measure.plot import Plot, bars

MAX_FINDINGS = 4
STYLES = {HEALTHY: "green", "under-loaded": "yellow"}
BAR_WIDTH = 24
TONES = {HEALTHY: "good", "under-loaded": ""}
SHOWN_CHANGES = 12


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print all parts of the diagnosis."""
    console.print(Group(*render(diagnosis)), highlight=False)


def render(d: Diagnosis) -> list[RenderableType]:
    """Return verdict, where the time goes, findings, waste, savings, and what is not known."""
    blocks: list[RenderableType] = [*verdict_lines(d), Text(), ttft_section(d), tpot_section(d)]
    blocks += findings_section(d) if d.findings else []
    if d.what_ifs:
        blocks += [Text(), what_if_table(d.what_ifs)]
    blocks += [
        Text.from_markup(f"[dim]simulated from {escape(text)}[/]") for text in d.simulated_from
    ]
    if d.waste:
        blocks += [Text(), Text.from_markup("[bold]Would be a waste[/]")]
        blocks += [Text.from_markup(f"  {escape(text)}") for text in d.waste]
    if d.savings:
        blocks += [Text(), savings_table(d.savings)]
    if d.not_known:
        blocks += [Text(), Text.from_markup("[dim]Not known from here:[/]")]
        blocks += [Text.from_markup(f"[dim]  {escape(text)}[/]") for text in d.not_known]
    return blocks


def findings_section(d: Diagnosis) -> list[RenderableType]:
    """Return the table of the first findings, and the names of the others."""
    shown, hidden = split_findings(d)
    more = ", ".join(each.name for each in hidden)
    rest = [Text.from_markup(f"[dim]and {more}: see --json[/]")] if hidden else []
    return [Text(), findings_table(shown), *rest]


def split_findings(d: Diagnosis) -> tuple[list[DoctorFinding], list[DoctorFinding]]:
    """Return (the first findings in their order and that of the verdict, the others)."""
    named = [each for each in d.findings[MAX_FINDINGS:] if each.name == d.bottleneck.name]
    shown = d.findings[: MAX_FINDINGS - len(named)] + named
    return shown, [each for each in d.findings if each not in shown]


def verdict_lines(d: Diagnosis) -> list[RenderableType]:
    """Return the two or three lines of the verdict."""
    b = d.bottleneck
    style = STYLES.get(b.name, "red")
    lines = [f"[bold {style}]{b.name}[/] [bold]{escape(b.text)}[/]"]
    lines += [f"  {escape(text)}" for text in b.evidence]
    if b.server_kind:
        evidence = "; ".join(each.text for each in b.server_evidence)
        near = f" ({evidence})" if evidence else ""
        lines.append(f"  [dim]the server says: {b.server_kind}. {escape(b.server_text + near)}[/]")
    head = f"{d.server} · {d.seconds:.0f} s · {d.num_ended} requests ended"
    return [
        Text.from_markup(f"[dim]{escape(head)}[/]"),
        *(Text.from_markup(line) for line in lines),
    ]


def ttft_section(d: Diagnosis) -> RenderableType:
    """Return TTFT and its three parts as bars."""
    t = d.ttft
    table = plain_table("", "", "", "")
    head = f"mean {duration(t.mean_s)}, p50 {duration(t.p50_s)}, p99 {duration(t.p99_s)}"
    parts = (("queue", t.queue_s), ("prefill", t.prefill_s), ("transfer", t.transfer_s))
    whole = sum(seconds or 0.0 for _, seconds in parts)
    for name, seconds in parts:
        share = (seconds or 0.0) / whole if whole else 0.0
        bar = "█" * round(share * BAR_WIDTH)
        table.add_row(f"  {name}", duration(seconds), percent(share) if whole else "", bar)
    return Group(Text.from_markup(f"[bold]Time to the first token[/] {head}"), table)


def tpot_section(d: Diagnosis) -> RenderableType:
    """Return TPOT and its floor."""
    t = d.tpot
    line = (
        f"[bold]Time per token[/] mean {duration(t.mean_s)}, p50 {duration(t.p50_s)}, "
        f"p99 {duration(t.p99_s)}"
    )
    if t.floor_s is not None and t.step_s is not None:
        line += (
            f"\n  a decode step takes {duration(t.step_s)} at {t.rows or 0:.1f} rows; its floor is "
            f"{duration(t.floor_s)}: {gib(t.bytes_per_step or 0)} at the measured bandwidth"
        )
    else:
        line += f"\n  [dim]no floor: {escape(t.why_no_floor)}[/]"
    line += "".join(f"\n  {escape(text)}" for text in d.drafts)
    return Text.from_markup(line)


def findings_table(findings: list[DoctorFinding]) -> RenderableType:
    """Return symptom, cause and fix of each finding."""
    table = plain_table("symptom", "cause", "fix", "at most")
    table.padding = (0, 2, 0, 0)
    table.expand = True
    for column, ratio in zip(table.columns, (3, 3, 6, 1), strict=True):
        column.ratio = ratio
    for each in findings:
        table.add_row(
            f"[bold]{each.name}[/] {escape(each.symptom)}",
            escape(each.cause),
            f"{escape(each.fix)}{format_trial(each)}",
            f"{percent(each.share)} [dim]of {each.of}[/]",
        )
    return table


def format_trial(each: DoctorFinding) -> str:
    """Return a line with the change in this server's numbers, and what it gives by simulation."""
    if not each.what_if:
        return ""
    result = f": {format_gain(each.simulated)}" if each.simulated else ""
    return escape(f"\n{each.what_if}{result}")


def what_if_table(gains: list[Gain]) -> RenderableType:
    """Return the simulated figures of each requested change, now and then."""
    names = ("a request", "TTFT p50", "TTFT p99", "TPOT p50", "in SLO", "refused", "saves")
    table = plain_table("What if", *names, "")
    for each in gains:
        now, then = each.now, each.then
        low, high = each.share_interval.low, each.share_interval.high
        table.add_row(
            f"  {escape(each.change)}",
            *(
                f"{duration(before)} → {duration(after)}"
                for before, after in (
                    (now.request_s, then.request_s),
                    (now.ttft_p50_s, then.ttft_p50_s),
                    (now.ttft_p99_s, then.ttft_p99_s),
                    (now.tpot_p50_s, then.tpot_p50_s),
                )
            ),
            f"{percent(now.in_slo)} → {percent(then.in_slo)}",
            f"{percent(now.refused)} → {percent(then.refused)}",
            f"{each.share:+.0%} ({low:+.0%} to {high:+.0%})",
            f"[dim]{each.label}[/]",
        )
    return table


def savings_table(savings: list[Saving]) -> RenderableType:
    """Return the savings of changes of the product."""
    table = plain_table("What less would save", "a request", "", "an hour", "")
    for each in savings:
        money = "–" if each.usd_per_hour is None else dollars(each.usd_per_hour)
        table.add_row(
            f"  {escape(each.what)}",
            duration(each.seconds),
            percent(each.share),
            money,
            f"[dim]{escape(each.note)}[/]",
        )
    return table


def plain_table(*columns: str) -> Table:
    """Return a table without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns[1:]))
    for column in columns:
        table.add_column(column)
    return table


# ── the page ────────────────────────────────────────────────────────────────────────────────


def html(diagnosis: Diagnosis) -> str:
    """Return the page as one self-contained file."""
    ttft, tpot = diagnosis.ttft, diagnosis.tpot
    bottleneck = diagnosis.bottleneck
    findings = "".join(map(finding, diagnosis.findings)) or "<p>No rule holds.</p>"
    return one_page(
        f"{diagnosis.server} · headway doctor",
        f"{bottleneck.name}: {bottleneck.text}",
        f"{diagnosis.server} · {diagnosis.seconds:.0f} s · {diagnosis.num_ended} requests ended",
        [first_token(diagnosis), per_token(diagnosis), changes(diagnosis)],
        [section("Findings", findings), section("All figures", preformatted(as_text(diagnosis)))],
        figures=[
            ("TTFT p50", duration(ttft.p50_s)),
            ("TTFT p99", duration(ttft.p99_s)),
            ("TPOT p50", duration(tpot.p50_s)),
            ("TPOT p99", duration(tpot.p99_s)),
        ],
        tone=TONES.get(bottleneck.name, "warn"),
    )


def as_text(diagnosis: Diagnosis) -> str:
    """Return what the terminal shows, without colours."""
    written = io.StringIO()
    show_diagnosis(diagnosis, Console(file=written, width=150, no_color=True))
    return written.getvalue()


def finding(each: DoctorFinding) -> str:
    """Return one finding: what is seen, why, what to do, and what it gives at most."""
    gain = f"at most {percent(each.share)} of {each.of}"
    trial = f" {each.what_if}: {format_gain(each.simulated)}" if each.simulated else ""
    lines = [each.cause, each.fix + trial, *each.evidence]
    body = "".join(f"<p>{escape_html(line)}</p>" for line in lines[:2])
    body += "".join(f'<p class="quiet">{escape_html(line)}</p>' for line in lines[2:])
    head = escape_html(f"{each.name}: {each.symptom} ({gain})")
    return f"<h3>{head}</h3>{body}"


def first_token(d: Diagnosis) -> Plot:
    """Return the parts of the time to the first token."""
    parts = {"queue": d.ttft.queue_s, "prefill": d.ttft.prefill_s, "transfer": d.ttft.transfer_s}
    known = {name: 1e3 * seconds for name, seconds in parts.items() if seconds is not None}
    return Plot(
        title="Time to the first token",
        caption=f"Means of {d.seconds:.0f} s.",
        x="",
        y="ms",
        series=[bars("", list(known), list(known.values()))],
    )


def per_token(d: Diagnosis) -> Plot:
    """Return the time of a decode step beside its floor."""
    times = {"a decode step": d.tpot.step_s, "its floor": d.tpot.floor_s}
    known = {name: 1e3 * seconds for name, seconds in times.items() if seconds is not None}
    both = known if len(known) == len(times) else {}
    return Plot(
        title="A decode step beside its floor",
        caption="The floor is the bytes that it must read at the measured bandwidth.",
        x="",
        y="ms",
        series=[bars("", list(both), list(both.values()))],
    )


def changes(d: Diagnosis) -> Plot:
    """Return what the simulated changes make of a request's time."""
    gains = [each.simulated for each in d.findings if each.simulated is not None]
    shown = [*d.what_ifs, *gains][:SHOWN_CHANGES]
    rows = [
        (each.change, each.now.request_s, each.then.request_s)
        for each in shown
        if each.now.request_s is not None and each.then.request_s is not None
    ]
    return Plot(
        title="What changes would give",
        caption="Simulated: the mean time of a request, now and then.",
        x="",
        y="s a request",
        series=[
            bars("now", [c for c, _, _ in rows], [a for _, a, _ in rows]),
            bars("then", [c for c, _, _ in rows], [b for _, _, b in rows]),
        ],
    )
