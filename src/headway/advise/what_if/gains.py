"""The doctor's what-ifs: requested changes, and the fixes that can be simulated."""

import urllib.parse
from collections.abc import Callable

from headway.advise.diagnosis import Diagnosis, DoctorFinding
from headway.advise.reading import ServerReading
from headway.advise.watch import WatchedServer
from headway.advise.what_if.case import case_of
from headway.advise.what_if.changes import WhatIfChange, parse_change
from headway.advise.what_if.compare import Gain, PresentCase
from headway.bench.calibrate import parse_calibration
from headway.core.errors import UsageError
from headway.telemetry.calibration import MachineCalibration

MIN_SECONDS, MAX_SECONDS = 60.0, 300.0
"""Bounds of the seconds of traffic and steps that the server is asked for."""
MAX_FIXES = 4
MAX_MODEL_ERROR = 0.25
"""Where the simulated present differs from the measured one by more than this share, a note says
so."""

Watch = Callable[[str], None]


def fetch(url: str, api_key: str, model: str, seconds: float) -> MachineCalibration:
    """Return the server's calibration; UsageError where it has none."""
    server = WatchedServer(url, api_key)
    query = {"seconds": f"{min(max(seconds, MIN_SECONDS), MAX_SECONDS):g}"}
    query |= {"model": model} if model else {}
    status, body = server.get(f"/calibration?{urllib.parse.urlencode(query)}")
    if status in (401, 403):
        raise UsageError(
            f"{server.url}/calibration needs an operator's key.",
            "Give --api-key; `headway key NAME --admin` makes one.",
        )
    if status != 200:
        raise UsageError(
            f"{server.url} has no /calibration (status {status}).", "A ready Headway has one."
        )
    return parse_calibration(body, f"{server.url}/calibration")


def add_what_ifs(
    diagnosis: Diagnosis,
    r: ServerReading,
    calibration: MachineCalibration,
    requested: list[WhatIfChange],
    watch: Watch = lambda text: None,
) -> None:
    """Write the simulated gains of the requested changes and of the fixes into the diagnosis.

    Raises UsageError for an impossible change; an impossible fix is left out.
    """
    case = case_of(calibration)
    changed = [(change, change.of(case)) for change in requested]
    watch(f"{len(case.traffic)} requests of {case.span_s:.0f} s, as they were")
    present = PresentCase(case)
    for change, then in changed:
        watch(f"what if {change}")
        diagnosis.what_ifs.append(present.gain(then, str(change)))
    for finding in diagnosis.findings[:MAX_FIXES]:
        simulate_fix(present, finding, watch)
    diagnosis.simulated_from = basis(present, r)


def simulate_fix(present: PresentCase, finding: DoctorFinding, watch: Watch) -> None:
    """Simulate the fix of a finding, where that is possible."""
    if not finding.what_if or not finding.available:
        return
    change = parse_change(finding.what_if)
    try:
        then = change.of(present.case)
    except UsageError:
        return
    watch(f"{finding.name}: {change}")
    finding.simulated = present.gain(then, str(change))


def basis(present: PresentCase, r: ServerReading) -> list[str]:
    """Return what the simulations rest on, and how near the simulated present is to the measured
    one."""
    case, now = present.case, present.figures[0]
    cached = sum(request.cached for request in case.traffic)
    total = sum(request.prompt for request in case.traffic)
    lines = [
        f"{len(case.traffic)} requests of {case.span_s:.0f} s as they came, "
        f"{cached / max(total, 1):.0%} of their prompts behind one beginning; "
        f"{len(case.calibration.steps):,} steps; {present.machinery.label}"
    ]
    measured = r.latency.e2e.mean
    if measured and now.request_s:
        off = now.request_s / measured - 1
        if abs(off) > MAX_MODEL_ERROR:
            lines.append(
                f"The present is simulated {abs(off):.0%} {'slower' if off > 0 else 'faster'} than "
                "it was measured: read gains as directions."
            )
    return [*lines, *present.machinery.notes]


def format_gain(gain: Gain) -> str:
    """Return a simulated gain in one line."""
    low, high = gain.share_interval.low, gain.share_interval.high
    points = f", in SLO {gain.now.in_slo:.0%} → {gain.then.in_slo:.0%}"
    line = f"simulated, {gain.label}: {gain.share:+.0%} ({low:+.0%} to {high:+.0%}){points}"
    if gain.now.refused or gain.then.refused:
        line += f", refused {gain.now.refused:.0%} → {gain.then.refused:.0%}"
    return line
