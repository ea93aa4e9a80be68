"""Verdict: the bottleneck of a server over a window, with its evidence. A pure function.

    contention    other processes, or other virtual machines, use the cores that the model needs
    under-loaded  idle most of the time, without a queue
    compute       FLOP/s near their ceiling
    bandwidth     bytes/s near their ceiling
    capacity      requests wait or are preempted for lack of KV blocks or slots
    host          gaps between steps, scheduling, launching: the device waits for the host
    unknown       nothing ran, or nothing was measured

If no rule holds, the verdict is the side of the roofline under which the work lies, with
`near_ceiling` false: the kernels leave headroom.
"""

from dataclasses import dataclass

from headway.telemetry.contention import CoreUse
from headway.telemetry.snapshot import Verdict, VerdictEvidence

CONTENTION = "contention"
COMPUTE, BANDWIDTH, CAPACITY, HOST = "compute", "bandwidth", "capacity", "host"
UNDER_LOADED, UNKNOWN = "under-loaded", "unknown"
KINDS = (CONTENTION, COMPUTE, BANDWIDTH, CAPACITY, HOST, UNDER_LOADED, UNKNOWN)

THRESHOLDS = {
    "idle_share": 0.5,  # of wall time: more is under-loaded
    "mfu": 0.6,  # of the measured peak: more is near the ceiling
    "mbu": 0.6,
    "waiting": 0.5,  # sequences that wait in an average step: more is a queue
    "kv_usage": 0.9,  # of blocks, at the fullest: more is full
    "rows": 0.95,  # of max_num_seqs, in an average step: more is full
    "preemptions_per_step": 0.01,
    "host_share": 0.4,  # of the time with work: gaps and everything in a step but the model
    "roofline": 0.2,  # of what the ceilings allow: less is far from them
    "step_s": 0.03,  # a longer step is far from them for another reason than launching
    "steal_share": 0.1,  # of the cores' time: more is felt
    "others_share": 0.2,  # of the cores' time, while more tasks want a core than there are
    "run_queue": 1.0,  # tasks that run or wait, for each core
    "probe_share": 0.6,  # of the best probe: less means that others used cores or memory
}
SLOW_PROBE_SCALE = 0.5
"""Factor on the thresholds of steal and of others while a probe is below its threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Inputs of a verdict. Shares are of wall time; None where nothing was measured.

    `host_share` is a share of the time with work. `mfu`, `mbu` and `roofline` are those of the
    steps, with or without prefill, that took more of it; `compute_side` is true if they lie under
    the compute side of the roofline.
    """

    num_steps: int
    idle_share: float
    gap_share: float
    host_share: float
    mfu: float | None
    mbu: float | None
    roofline: float | None
    compute_side: bool
    cache_resident: bool
    running: float
    max_num_seqs: int
    waiting: float
    kv_usage_max: float
    num_preemptions: int
    step_s: float = 0.0
    cores: CoreUse | None = None
    probe_share: float | None = None


def evidence(name: str, value: float, text: str) -> VerdictEvidence:
    """Return a figure with its threshold."""
    return VerdictEvidence(name=name, value=value, threshold=THRESHOLDS[name], text=text)


def judge_window(facts: Facts) -> Verdict:
    """Return the verdict of the first rule that holds, in the order below."""
    if not facts.num_steps:
        return verdict(UNDER_LOADED, "No step ran.", False, [])
    for rule in (contention, under_loaded, near_a_ceiling, capacity, host):
        result = rule(facts)
        if result is not None:
            return result
    return dominating_side(facts)


def verdict(kind: str, text: str, near_ceiling: bool, reasons: list[VerdictEvidence]) -> Verdict:
    return Verdict(kind=kind, text=text, near_ceiling=near_ceiling, evidence=reasons)


def contention(facts: Facts) -> Verdict | None:
    """Return a verdict if other processes or machines use the cores that the model needs."""
    cores, probe = facts.cores, facts.probe_share
    if cores is None:
        return None
    suspect = probe is not None and probe < THRESHOLDS["probe_share"]
    scale = SLOW_PROBE_SCALE if suspect else 1.0
    stolen = cores.steal_share > THRESHOLDS["steal_share"] * scale
    crowded = cores.run_queue > THRESHOLDS["run_queue"]
    crowded_out = crowded and cores.others_share > THRESHOLDS["others_share"] * scale
    if not (stolen or crowded_out):
        return None
    tasks = cores.run_queue * cores.num_cores
    reasons = [
        evidence(
            "others_share", cores.others_share, f"other processes used {cores.others_share:.0%} "
            "of the cores' time"
        ),
        evidence("run_queue", cores.run_queue, f"{tasks:.1f} tasks for {cores.num_cores} cores"),
        evidence(
            "steal_share", cores.steal_share, f"other virtual machines took {cores.steal_share:.0%}"
        ),
    ]  # fmt: skip
    reasons.sort(key=lambda each: -each.value / each.threshold)
    if probe is not None:
        text = f"the last probes reached {probe:.0%} of the best"
        reasons.append(evidence("probe_share", probe, text))
    what = "Other virtual machines" if stolen and not crowded_out else "Other processes"
    return verdict(CONTENTION, f"{what} use the cores that the model needs.", False, reasons)


def under_loaded(facts: Facts) -> Verdict | None:
    """Return a verdict if the server is idle most of the time, without a queue."""
    if facts.idle_share <= THRESHOLDS["idle_share"] or facts.waiting > THRESHOLDS["waiting"]:
        return None
    reasons = [
        evidence("idle_share", facts.idle_share, f"idle {facts.idle_share:.0%} of the time"),
        evidence("waiting", facts.waiting, f"{facts.waiting:.1f} sequences wait"),
    ]
    return verdict(UNDER_LOADED, "Most of the time there is nothing to do.", False, reasons)


def near_a_ceiling(facts: Facts) -> Verdict | None:
    """Return a verdict if MFU or MBU is near the measured ceiling."""
    mfu, mbu = facts.mfu or 0.0, facts.mbu or 0.0
    if mfu > THRESHOLDS["mfu"] and mfu >= mbu:
        reasons = [evidence("mfu", mfu, f"{mfu:.0%} of the measured FLOP/s")]
        return verdict(COMPUTE, "GEMMs run near the machine's peak.", True, reasons)
    if mbu > THRESHOLDS["mbu"]:
        reasons = [evidence("mbu", mbu, f"{mbu:.0%} of the measured bandwidth")]
        return verdict(BANDWIDTH, "Weights and KV are read near the memory's speed.", True, reasons)
    return None


def capacity(facts: Facts) -> Verdict | None:
    """Return a verdict if requests wait or are preempted for lack of KV blocks or slots."""
    preempted = facts.num_preemptions / facts.num_steps
    queued = facts.waiting > THRESHOLDS["waiting"]
    kv_full = facts.kv_usage_max > THRESHOLDS["kv_usage"]
    rows = facts.running / facts.max_num_seqs if facts.max_num_seqs else 0.0
    rows_full = rows >= THRESHOLDS["rows"]
    thrashing = preempted > THRESHOLDS["preemptions_per_step"]
    if not (thrashing or (queued and (kv_full or rows_full))):
        return None
    reasons = [
        evidence("waiting", facts.waiting, f"{facts.waiting:.1f} sequences wait"),
        evidence("kv_usage", facts.kv_usage_max, f"KV blocks {facts.kv_usage_max:.0%} full"),
        evidence("rows", rows, f"{facts.running:.1f} of {facts.max_num_seqs} rows in use"),
        evidence("preemptions_per_step", preempted, f"{facts.num_preemptions} sequences preempted"),
    ]
    what = "KV blocks" if kv_full or thrashing else "rows (max_num_seqs)"
    return verdict(CAPACITY, f"Requests wait for {what}.", False, reasons)


def host(facts: Facts) -> Verdict | None:
    """Return a verdict if gaps and bookkeeping, or launching small kernels, take most time."""
    far = facts.roofline is not None and facts.roofline < THRESHOLDS["roofline"]
    slow = far and facts.step_s <= THRESHOLDS["step_s"]
    if facts.host_share <= THRESHOLDS["host_share"] and not slow:
        return None
    share = facts.host_share
    what = "The device waits for the host."
    if share <= THRESHOLDS["host_share"]:
        what = "The model's time goes into starting small operations, not into their work."
    reasons = [evidence("host_share", share, f"{share:.0%} of the time with work is not the model")]
    if facts.roofline is not None:
        text = f"steps take {1 / max(facts.roofline, 1e-9):.0f} times what the ceilings allow"
        reasons.append(evidence("roofline", facts.roofline, text))
    return verdict(HOST, what, False, reasons)


def dominating_side(facts: Facts) -> Verdict:
    """Return the ceiling that is lower for this work; unknown if none was measured."""
    if facts.roofline is None:
        return verdict(UNKNOWN, "The machine's ceilings were not measured.", False, [])
    kind = COMPUTE if facts.compute_side else BANDWIDTH
    used = f"{facts.roofline:.0%} of what the ceilings allow for this work"
    what = "its GEMMs" if facts.compute_side else "what it reads"
    reasons = [evidence("roofline", facts.roofline, used)]
    for name, value in (("mfu", facts.mfu), ("mbu", facts.mbu)):
        if value is not None:
            reasons.append(evidence(name, value, f"{name.upper()} {value:.0%}"))
    return verdict(kind, f"The step's time goes into {what}.", False, reasons)
