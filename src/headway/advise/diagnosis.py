"""The diagnosis of a reading: verdict, where the time goes, findings, waste, savings.

All functions are pure. `Diagnosis` is what `--json` prints and what `show` draws.
"""

import msgspec

from headway.advise import rules, symptoms, waste
from headway.advise.reading import ServerReading, decode_step
from headway.advise.shorter import Saving, savings
from headway.advise.what_if.compare import Gain
from headway.telemetry.snapshot import VerdictEvidence

HEALTHY = "healthy"


class DoctorFinding(msgspec.Struct, kw_only=True):
    """A rule that holds. `share` is the upper bound of its gain, of what `of` names: time or
    spend."""

    name: str
    kind: str
    symptom: str
    evidence: list[str]
    cause: str
    fix: str
    share: float
    of: str
    available: bool
    what_if: str = ""
    """The fix as a change that the simulator can try, "" where there is none."""
    simulated: Gain | None = None
    """The simulated gain of the fix; None where it was not simulated."""


class Bottleneck(msgspec.Struct, kw_only=True):
    """The verdict: the most valuable finding, and the server's own verdict."""

    name: str
    kind: str
    text: str
    evidence: list[str]
    server_kind: str
    server_text: str
    server_evidence: list[VerdictEvidence]


class FirstToken(msgspec.Struct, kw_only=True):
    """TTFT in seconds, and its parts. `transfer_s` is the round trip between client and server."""

    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None


class PerToken(msgspec.Struct, kw_only=True):
    """TPOT in seconds against its floor: the bytes that a decode step reads over the bandwidth.

    Where no request has ended, the times are those of the gaps between tokens (ITL).
    """

    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    step_s: float | None
    floor_s: float | None
    bytes_per_step: float | None
    rows: float | None
    why_no_floor: str = ""


class Diagnosis(msgspec.Struct, kw_only=True):
    """The complete result for one server over one window."""

    subject: str
    source: str
    server: str
    seconds: float
    num_ended: int
    bottleneck: Bottleneck
    ttft: FirstToken
    tpot: PerToken
    findings: list[DoctorFinding]
    waste: list[str]
    savings: list[Saving]
    not_known: list[str]
    drafts: list[str] = []
    """Measured results of speculation; empty where it is off."""
    what_ifs: list[Gain] = []
    """Gains of the changes that `--what-if` names."""
    simulated_from: list[str] = []
    """The data that simulated gains rest on; empty where nothing was simulated."""


def diagnose(r: ServerReading) -> Diagnosis:
    """Return the complete diagnosis of a reading."""
    findings = list_findings(r)
    return Diagnosis(
        subject=r.subject,
        source=r.source,
        server=r.server,
        seconds=r.seconds,
        num_ended=r.load.num_ended,
        bottleneck=find_bottleneck(r, findings),
        ttft=ttft_parts(r),
        tpot=tpot_and_floor(r),
        findings=findings,
        waste=[text for remark in waste.WASTE if (text := remark(r))],
        savings=savings(r),
        not_known=list(r.not_known),
        drafts=symptoms.see_drafts(r),
    )


def ttft_parts(r: ServerReading) -> FirstToken:
    """Return TTFT and its parts."""
    ttft = r.latency.ttft
    return FirstToken(
        mean_s=ttft.mean,
        p50_s=ttft.p50,
        p99_s=ttft.p99,
        queue_s=r.queue_s,
        prefill_s=r.prefill_s,
        transfer_s=r.latency.transfer_s,
    )


def list_findings(r: ServerReading) -> list[DoctorFinding]:
    """Return a finding for each rule that holds, in the order of the table: what costs nothing
    first."""
    return [build_finding(rule, r) for rule in rules.RULES if rule.holds(r)]


def build_finding(rule: rules.Rule, r: ServerReading) -> DoctorFinding:
    """Return the finding of a rule with this server's numbers."""
    return DoctorFinding(
        name=rule.name,
        kind=rule.kind,
        symptom=rule.symptom,
        evidence=rule.see(r),
        cause=rule.cause,
        fix=rule.remedy,
        share=rule.share(r),
        of=rule.of,
        available=rule.available,
        what_if=rule.change(r) if rule.change else "",
    )


def find_bottleneck(r: ServerReading, findings: list[DoctorFinding]) -> Bottleneck:
    """Return the most valuable finding as the verdict; `healthy` where no rule holds."""
    own, first = r.verdict, most_valuable(findings)
    return Bottleneck(
        name=first.name if first else HEALTHY,
        kind=first.kind if first else (own.kind if own else "unknown"),
        text=first.symptom if first else "No rule of the doctor's holds.",
        evidence=first.evidence if first else [],
        server_kind=own.kind if own else "",
        server_text=own.text if own else "",
        server_evidence=own.evidence if own else [],
    )


def most_valuable(findings: list[DoctorFinding]) -> DoctorFinding | None:
    """Return the finding with the largest share.

    Rules that are marked `first` come before the others, rules that are marked `last` after them.
    """
    rank = {rule.name: rule.last - rule.first for rule in rules.RULES}
    return min(findings, key=lambda each: (rank[each.name], -each.share), default=None)


def tpot_and_floor(r: ServerReading) -> PerToken:
    """Return TPOT and the floor of a decode step."""
    step = decode_step(r)
    times = r.latency.tpot if r.latency.tpot.count else r.latency.itl
    return PerToken(
        mean_s=times.mean,
        p50_s=times.p50,
        p99_s=times.p99,
        step_s=r.steps.decode_step_s,
        floor_s=step.floor_s() if step else None,
        bytes_per_step=step.num_bytes if step else None,
        rows=r.steps.rows,
        why_no_floor="" if step else why_no_floor(r),
    )


def why_no_floor(r: ServerReading) -> str:
    """Return why the floor of a decode step is unknown, and which source knows it."""
    if r.weights.cache_resident:
        return "the weights stay in the CPU's cache: memory does not bound decoding"
    if r.source == "stats" and r.steps.decode is None:
        return "no step without prefill ran"
    unknown = "bytes of a step or the machine's bandwidth are not known"
    if r.source != "metrics":
        return unknown
    return (
        f"{unknown} from /metrics; the floor is the weights' bytes over the memory's bandwidth, "
        "and headway doctor FOLDER prints it on that machine"
    )
