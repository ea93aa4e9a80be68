"""A healthy server that is made up, and for each rule of the doctor what makes it hold."""

from dataclasses import replace
from typing import Any

from headway.advise.reading import (
    DraftReading,
    KVReading,
    LatencyReading,
    LengthReading,
    LimitReading,
    LoadReading,
    MachineReading,
    PrefixReading,
    ServerReading,
    SlowStream,
    StepReading,
    WeightReading,
)
from headway.perf.roofline import Utilization
from headway.telemetry.contention import CoreUse
from headway.telemetry.snapshot import Percentiles, Verdict, VerdictEvidence

BANDWIDTH, FLOPS = 17e9, 100e9
WEIGHTS = 500e6


def all_at(value: float, count: int = 100) -> Percentiles:
    """A distribution without spread."""
    return Percentiles(count=count, mean=value, p50=value, p90=value, p95=value, p99=value)


def steps(step_s: float, num_bytes: float, flops: float, count: int = 100) -> Utilization:
    """`count` alike steps."""
    floor_s = max(num_bytes / BANDWIDTH, flops / FLOPS)
    return Utilization(
        num_steps=count,
        time_s=step_s * count,
        flops_per_s=flops / step_s,
        bytes_per_s=num_bytes / step_s,
        flops_per_byte=flops / num_bytes,
        mfu=flops / step_s / FLOPS,
        mbu=num_bytes / step_s / BANDWIDTH,
        roofline=floor_s / step_s,
        above_ceiling=False,
    )


def verdict(kind: str) -> Verdict:
    text = "90% of the measured bandwidth"
    shown = VerdictEvidence(name="mbu", value=0.9, threshold=0.6, text=text)
    return Verdict(kind=kind, text="Said by the server.", near_ceiling=True, evidence=[shown])


HEALTHY = ServerReading(
    source="stats",
    subject="http://made.up",
    server="Headway",
    seconds=20.0,
    load=LoadReading(
        num_ended=100,
        arrivals_per_s=5.0,
        finished_per_s=5.0,
        running=48.0,
        waiting=0.0,
        waiting_growth=0.0,
    ),
    latency=LatencyReading(
        ttft=all_at(0.05),
        tpot=all_at(0.04),
        itl=all_at(0.04),
        e2e=all_at(4.05),
        queue=all_at(0.005),
        prefill=all_at(0.045),
        transfer_s=0.001,
    ),
    lengths=LengthReading(
        prompt=all_at(20), output=all_at(101), short_prompt=20, longest_prompt=30
    ),
    steps=StepReading(
        idle_share=0.05,
        host_share=0.05,
        decode=steps(0.04, WEIGHTS + 48 * 1e6, 48 * 0.05e9),
        rows=48.0,
    ),
    limits=LimitReading(max_num_seqs=64, max_num_batched_tokens=512),
    machine=MachineReading(bandwidth=BANDWIDTH, flops=FLOPS),
    weights=WeightReading(
        step_bytes=WEIGHTS,
        choices={"--quantization int8": WEIGHTS // 2, "--quantization int4": WEIGHTS // 3},
    ),
    kv=KVReading(
        usage_max=0.4,
        num_preemptions=0,
        num_tokens=100_000,
        bytes_per_token=12_288,
        choices={"--kv-cache-dtype int8": 6_528},
    ),
    prefix=PrefixReading(hit_rate=0.0),
    verdict=verdict("bandwidth"),
)
QUEUED = {
    "load.waiting": 40.0,
    "latency.queue": all_at(4.0),
    "latency.ttft": all_at(4.05),
    "latency.e2e": all_at(8.05),
    "steps.rows": 64.0,
    "load.running": 64.0,
}
FEW = {
    "steps.rows": 3.0,
    "load.running": 3.0,
    "steps.decode": steps(0.038, WEIGHTS + 80e6, 3 * 0.5e9),
}
LONG = {
    "lengths.prompt": all_at(4000),
    "lengths.short_prompt": 4000,
    "lengths.longest_prompt": 4100,
    "latency.prefill": all_at(8.0),
    "latency.ttft": all_at(8.0),
    "steps.prefill": steps(1.0, WEIGHTS, 60e9, count=8),
    "verdict": verdict("compute"),
}
BROKEN = {"faults.errors": {"integer_below_min_value": 30}, "faults.validation_failures": 30}
SLOW = SlowStream(id="cmpl-1", age_s=9.0, seconds=6.0, generated=300, sent=4)

CONTENDED = {
    "verdict": verdict("contention"),
    "machine.cores": CoreUse(
        seconds=20, num_cores=2, steal_share=0.1, others_share=0.4, idle_share=0.0, run_queue=2.0
    ),
}
GUESSING = DraftReading(
    sources=("lookup", "draft"),
    acceptance=0.625,
    per_step=2.0,
    tokens_per_step=2.25,
    cost_share=0.4,
    speedup=1.35,
    acceptance_by_source={"lookup": 0.5, "draft": 0.75},
)
IN_VAIN = replace(
    GUESSING,
    acceptance=0.05,
    tokens_per_step=1.1,
    speedup=0.66,
    acceptance_by_source={"lookup": 0.05},
)
WIDE = {"--dtype bfloat16": WEIGHTS // 2, "--quantization int8": WEIGHTS // 4}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contention": (CONTENDED, {}),
    "engine-restarts": ({"faults.num_restarts": 1}, {}),
    "client-bottleneck": ({"client.bottleneck": "it used 95% of a core"}, {}),
    "failures": ({"faults.num_failed": 60}, {"faults.num_failed": 1}),
    "slow-client": ({"client.slow_streams": (SLOW,)}, {}),
    "long-prefill": (
        LONG,
        {**LONG, "latency.ttft": all_at(0.05), "latency.prefill": all_at(0.045)},
    ),
    "validation": (BROKEN, {**BROKEN, "faults.validation_failures": 2}),
    "cold-cache": (
        {
            **LONG,
            "prefix.shared_tokens": 3600.0,
            "prefix.shared_text": "100 requests share 3600 tokens",
        },
        {**LONG, "prefix.shared_tokens": 3600.0, "prefix.hit_rate": 0.85},
    ),
    "small-batch": (FEW, {**FEW, "limits.max_num_seqs": 4}),
    "rows": (
        {
            **QUEUED,
            "steps.rows": 4.0,
            "limits.max_num_seqs": 4,
            "steps.decode": FEW["steps.decode"],
        },
        {**QUEUED, "steps.rows": 2.0, "limits.max_num_seqs": 4},
    ),
    "kv-capacity": (
        {**QUEUED, "kv.usage_max": 0.99, "steps.rows": 9.0},
        {**QUEUED, "kv.usage_max": 0.2, "steps.rows": 9.0},
    ),
    "host-bound": (
        {"steps.host_share": 0.6},
        {"steps.host_share": 0.6, "steps.idle_share": 0.9},
    ),
    "wide-weights": ({"weights.choices": WIDE}, {}),
    "weight-bytes": ({}, {"weights.choices": {"--quantization int4": WEIGHTS}}),
    "kv-bytes": (
        {"weights.step_bytes": 100e6},
        {"weights.step_bytes": 100e6, "kv.bytes_per_token": 6_528},
    ),
    "over-saturated": ({**QUEUED, "load.arrivals_per_s": 50.0}, {"load.arrivals_per_s": 50.0}),
    "queueing": (
        {**QUEUED, "load.arrivals_per_s": 50.0, "load.in_slo": 0.99},
        {**QUEUED, "load.arrivals_per_s": 50.0, "load.in_slo": 0.9},
    ),
    "hogging": (
        {
            **LONG,
            "lengths.short_prompt": 20,
            "lengths.longest_prompt": 4000,
            "lengths.prompt": all_at(20),
        },
        LONG,
    ),
    "refusals": ({"faults.refused": 20, "faults.num_failed": 20}, {"faults.refused": 1}),
    "drafts": (FEW, {**FEW, "drafts": GUESSING}),
    "drafts-in-vain": ({"drafts": IN_VAIN}, {"drafts": GUESSING}),
    "slow-forward": (
        {"steps.decode": steps(0.4, WEIGHTS, 1e9)},
        {"steps.decode": steps(0.4, WEIGHTS, 1e9), **CONTENDED},
    ),
    "retries": ({"faults.num_retries": 30}, {"faults.num_retries": 2}),
    "under-loaded": ({"steps.idle_share": 0.9}, {"steps.idle_share": 0.3}),
}
"""Rule → what makes it hold, and nearly the same, where it must not."""
BESIDE_OTHERS = {
    *("host-bound", "wide-weights", "weight-bytes", "drafts", "retries", "refusals", "kv-bytes"),
    "drafts-in-vain",
}
"""Their cases make another rule worth more, too."""


def varied(reading: ServerReading, *changes: dict[str, Any]) -> ServerReading:
    """With {"kv.usage_max": 0.99}: the same, with fuller blocks."""
    for name, value in {k: v for each in changes for k, v in each.items()}.items():
        part, _, field = name.partition(".")
        if field:
            value = replace(getattr(reading, part), **{field: value})
        reading = replace(reading, **{part: value})
    return reading
