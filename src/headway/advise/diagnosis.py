"""From a reading to what is said of it: verdict, where the time goes, findings, waste, savings.

Pure. `Diagnosis` is what `--json` prints and what `show` draws.
"""

import msgspec

from headway.advise import rules, symptoms, waste
from headway.advise.reading import Reading, decode_step
from headway.advise.shorter import Saving, savings
from headway.advise.what_if.compare import Gain
from headway.telemetry.snapshot import VerdictEvidence

HEALTHY = "healthy"


class Finding(msgspec.Struct, kw_only=True):
    """A rule that holds; `share` of a request's time, or of the spend, is the most it can give."""

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
    """The fix as a change that can be simulated."""
    simulated: Gain | None = None
    """What it gives by simulation, where that was asked and can be."""


class Bottleneck(msgspec.Struct, kw_only=True):
    """The verdict: the most valuable finding, and what the server itself says."""

    name: str
    kind: str
    text: str
    evidence: list[str]
    server_kind: str
    server_text: str
    server_evidence: list[VerdictEvidence]


class FirstToken(msgspec.Struct, kw_only=True):
    """TTFT in seconds, and its parts. `transfer_s` is the way to the client and back."""

    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None


class PerToken(msgspec.Struct, kw_only=True):
    """TPOT in seconds against its floor: what a decode step reads over the bandwidth.

    Where no request ended, of the gaps between tokens.
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
    """All that is said of one server over one window."""

    subject: str
    source: str
    server: str
    seconds: float
    num_ended: int
    bottleneck: Bottleneck
    ttft: FirstToken
    tpot: PerToken
    findings: list[Finding]
    waste: list[str]
    savings: list[Saving]
    not_known: list[str]
    drafts: list[str] = []
    """What speculation brings here, measured; empty where it is off."""
    what_ifs: list[Gain] = []
    """What was asked with `--what-if`."""
    simulated_from: list[str] = []
    """What simulated gains are made of; empty where nothing was simulated."""


def diagnose(r: Reading) -> Diagnosis:
    """Everything."""
    found = findings(r)
    return Diagnosis(
        subject=r.subject,
        source=r.source,
        server=r.server,
        seconds=r.seconds,
        num_ended=r.load.num_ended,
        bottleneck=bottleneck(r, found),
        ttft=first_token(r),
        tpot=per_token(r),
        findings=found,
        waste=[text for remark in waste.WASTE if (text := remark(r))],
        savings=savings(r),
        not_known=list(r.not_known),
        drafts=symptoms.see_drafts(r),
    )


def first_token(r: Reading) -> FirstToken:
    """TTFT and its parts."""
    ttft = r.latency.ttft
    return FirstToken(
        mean_s=ttft.mean,
        p50_s=ttft.p50,
        p99_s=ttft.p99,
        queue_s=r.queue_s,
        prefill_s=r.prefill_s,
        transfer_s=r.latency.transfer_s,
    )


def findings(r: Reading) -> list[Finding]:
    """The rules that hold, in the order of the table: what costs nothing comes first."""
    return [finding(rule, r) for rule in rules.RULES if rule.holds(r)]


def finding(rule: rules.Rule, r: Reading) -> Finding:
    """One row with this server's numbers."""
    return Finding(
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


def bottleneck(r: Reading, found: list[Finding]) -> Bottleneck:
    """The most valuable finding; without one there is nothing to mend that we know of."""
    own, first = r.verdict, most_valuable(found)
    return Bottleneck(
        name=first.name if first else HEALTHY,
        kind=first.kind if first else (own.kind if own else "unknown"),
        text=first.symptom if first else "No rule of the doctor's holds.",
        evidence=first.evidence if first else [],
        server_kind=own.kind if own else "",
        server_text=own.text if own else "",
        server_evidence=own.evidence if own else [],
    )


def most_valuable(found: list[Finding]) -> Finding | None:
    """The finding with the largest share; others on the cores come before it, being idle after."""
    rank = {rule.name: rule.last - rule.first for rule in rules.RULES}
    return min(found, key=lambda each: (rank[each.name], -each.share), default=None)


def per_token(r: Reading) -> PerToken:
    """TPOT and the floor of a decode step."""
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


def why_no_floor(r: Reading) -> str:
    """Why there is no floor of a decode step, and where it can be had."""
    if r.weights.cache_resident:
        return "the weights stay in the CPU's cache: memory does not bound decoding"
    if r.source == "stats" and r.steps.decode is None:
        return "no step without prefill ran"
    unknown = "bytes of a step or the machine's bandwidth are not known"
    if r.source != "metrics":
        return unknown
    return (
        f"{unknown} from /metrics; the floor is the weights' bytes over the memory's bandwidth, "
        "and headway doctor FOLDER tells it on that machine"
    )
