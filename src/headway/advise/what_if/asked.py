"""The doctor's what-ifs: those that were asked for, and the fixes that a simulation applies to."""

import urllib.parse
from collections.abc import Callable

from headway.advise.diagnosis import Diagnosis, Finding
from headway.advise.reading import Reading
from headway.advise.watch import Server
from headway.advise.what_if.case import case_of
from headway.advise.what_if.changes import Change, parse_change
from headway.advise.what_if.compare import Gain, Present
from headway.bench.calibrate import parse_calibration
from headway.core.errors import UsageError
from headway.telemetry.calibration import MachineCalibration

LEAST_SECONDS, MOST_SECONDS = 60.0, 300.0
"""Of traffic and steps that the server is asked for."""
MOST_FIXES = 4
OFF = 0.25
"""Where the present is simulated by so much off what was measured, that is said."""

Watch = Callable[[str], None]


def fetch(url: str, api_key: str, model: str, seconds: float) -> MachineCalibration:
    """What the server tells; UsageError where it does not."""
    server = Server(url, api_key)
    query = {"seconds": f"{min(max(seconds, LEAST_SECONDS), MOST_SECONDS):g}"}
    query |= {"model": model} if model else {}
    status, body = server.get(f"/calibration?{urllib.parse.urlencode(query)}")
    if status in (401, 403):
        raise UsageError(
            f"{server.url}/calibration wants an operator's key.",
            "Give --api-key; `headway key NAME --admin` makes one.",
        )
    if status != 200:
        raise UsageError(
            f"{server.url} has no /calibration (status {status}).", "A ready Headway has one."
        )
    return parse_calibration(body, f"{server.url}/calibration")


def add_what_ifs(
    found: Diagnosis,
    r: Reading,
    calibration: MachineCalibration,
    asked: list[Change],
    watch: Watch = lambda text: None,
) -> None:
    """Simulate what was asked and the fixes; write the gains into the diagnosis.

    Raises UsageError where a change that was asked for cannot be; of a fix it is then left out.
    """
    case = case_of(calibration)
    changed = [(change, change.of(case)) for change in asked]
    watch(f"{len(case.traffic)} requests of {case.span_s:.0f} s, as they were")
    present = Present(case)
    for change, then in changed:
        watch(f"what if {change}")
        found.what_ifs.append(present.gain(then, str(change)))
    for finding in found.findings[:MOST_FIXES]:
        simulate_fix(present, finding, watch)
    found.simulated_from = basis(present, r)


def simulate_fix(present: Present, finding: Finding, watch: Watch) -> None:
    """What the finding's fix gives, where it is one that can be simulated."""
    if not finding.what_if or not finding.available:
        return
    change = parse_change(finding.what_if)
    try:
        then = change.of(present.case)
    except UsageError:
        return
    watch(f"{finding.name}: {change}")
    finding.simulated = present.gain(then, str(change))


def basis(present: Present, r: Reading) -> list[str]:
    """What the simulations are made of, and how near the present one is to what was measured."""
    case, now = present.case, present.figures[0]
    cached = sum(asked.cached for asked in case.traffic)
    total = sum(asked.prompt for asked in case.traffic)
    lines = [
        f"{len(case.traffic)} requests of {case.span_s:.0f} s as they came, "
        f"{cached / max(total, 1):.0%} of their prompts behind one beginning; "
        f"{len(case.calibration.steps):,} steps; {present.machinery.label}"
    ]
    measured = r.latency.e2e.mean
    if measured and now.request_s:
        off = now.request_s / measured - 1
        if abs(off) > OFF:
            lines.append(
                f"The present is simulated {abs(off):.0%} {'slower' if off > 0 else 'faster'} than "
                "it was measured: read gains as directions."
            )
    return [*lines, *present.machinery.notes]


def shown_gain(gain: Gain) -> str:
    """One line: what is saved, by simulation."""
    low, high = gain.share_interval.low, gain.share_interval.high
    points = f", in SLO {gain.now.in_slo:.0%} → {gain.then.in_slo:.0%}"
    line = f"simulated, {gain.label}: {gain.share:+.0%} ({low:+.0%} to {high:+.0%}){points}"
    if gain.now.refused or gain.then.refused:
        line += f", refused {gain.now.refused:.0%} → {gain.then.refused:.0%}"
    return line
