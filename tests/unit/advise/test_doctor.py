"""The doctor's rules, arithmetic and order on made-up readings; no server, no torch."""

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.advise import reference, rules
from headway.advise.diagnosis import diagnose, findings
from headway.advise.reading import (
    KVReading,
    LatencyReading,
    LengthReading,
    LimitReading,
    LoadReading,
    MachineReading,
    PrefixReading,
    Reading,
    SlowStream,
    SpendReading,
    StepReading,
    WeightReading,
)
from headway.advise.roofline import decode_step
from headway.advise.words import dollars, duration, plural, rate
from headway.core.contention import CoreUse
from headway.core.options import EngineOptions
from headway.telemetry.snapshot import Evidence, Percentiles, Utilization, Verdict

ROOT = Path(__file__).resolve().parents[3]
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
    seen = Evidence(name="mbu", value=0.9, threshold=0.6, text="90% of the measured bandwidth")
    return Verdict(kind=kind, text="Said by the server.", near_ceiling=True, evidence=[seen])


HEALTHY = Reading(
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
SLOW = SlowStream(id="cmpl-1", age_s=9.0, seconds=6.0, made=300, left=4)

CONTENDED = {
    "verdict": verdict("contention"),
    "machine.cores": CoreUse(
        seconds=20, num_cores=2, steal_share=0.1, others_share=0.4, idle_share=0.0, run_queue=2.0
    ),
}
WIDE = {"--dtype bfloat16": WEIGHTS // 2, "--quantization int8": WEIGHTS // 4}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contention": (CONTENDED, {}),
    "engine-restarts": ({"faults.num_restarts": 1}, {}),
    "client-bottleneck": ({"client.bottleneck": "it used 95% of a core"}, {}),
    "validation": (BROKEN, {**BROKEN, "faults.validation_failures": 2}),
    "failures": ({"faults.num_failed": 60}, {"faults.num_failed": 1}),
    "refusals": ({"faults.refused": 20, "faults.num_failed": 20}, {"faults.refused": 1}),
    "slow-client": ({"client.slow_streams": (SLOW,)}, {}),
    "kv-capacity": (
        {**QUEUED, "kv.usage_max": 0.99, "steps.rows": 9.0},
        {**QUEUED, "kv.usage_max": 0.2, "steps.rows": 9.0},
    ),
    "rows": (
        {
            **QUEUED,
            "steps.rows": 4.0,
            "limits.max_num_seqs": 4,
            "steps.decode": FEW["steps.decode"],
        },
        {**QUEUED, "steps.rows": 2.0, "limits.max_num_seqs": 4},
    ),
    "over-saturated": ({**QUEUED, "load.arrivals_per_s": 50.0}, {"load.arrivals_per_s": 50.0}),
    "hogging": (
        {
            **LONG,
            "lengths.short_prompt": 20,
            "lengths.longest_prompt": 4000,
            "lengths.prompt": all_at(20),
        },
        LONG,
    ),
    "cold-cache": (
        {
            **LONG,
            "prefix.shared_tokens": 3600.0,
            "prefix.shared_said": "100 requests share 3600 tokens",
        },
        {**LONG, "prefix.shared_tokens": 3600.0, "prefix.hit_rate": 0.85},
    ),
    "long-prefill": (
        LONG,
        {**LONG, "latency.ttft": all_at(0.05), "latency.prefill": all_at(0.045)},
    ),
    "host-bound": (
        {"steps.host_share": 0.6},
        {"steps.host_share": 0.6, "steps.idle_share": 0.9},
    ),
    "slow-forward": (
        {"steps.decode": steps(0.4, WEIGHTS, 1e9)},
        {"steps.decode": steps(0.4, WEIGHTS, 1e9), **CONTENDED},
    ),
    "small-batch": (FEW, {**FEW, "limits.max_num_seqs": 4}),
    "wide-weights": ({"weights.choices": WIDE}, {}),
    "weight-bytes": ({}, {"weights.choices": {"--quantization int4": WEIGHTS}}),
    "kv-bytes": (
        {"weights.step_bytes": 100e6},
        {"weights.step_bytes": 100e6, "kv.bytes_per_token": 6_528},
    ),
    "drafts": (FEW, {}),
    "retries": ({"faults.num_retries": 30}, {"faults.num_retries": 2}),
    "under-loaded": ({"steps.idle_share": 0.9}, {"steps.idle_share": 0.3}),
}
"""Rule → what makes it hold, and nearly the same, where it must not."""
BESIDE_OTHERS = {
    *("host-bound", "wide-weights", "weight-bytes", "drafts", "retries", "refusals", "kv-bytes"),
}
"""Their cases make another rule worth more, too."""


def varied(reading: Reading, *changes: dict[str, Any]) -> Reading:
    """With {"kv.usage_max": 0.99}: the same, with fuller blocks."""
    for name, value in {k: v for each in changes for k, v in each.items()}.items():
        part, _, field = name.partition(".")
        if field:
            value = replace(getattr(reading, part), **{field: value})
        reading = replace(reading, **{part: value})
    return reading


def names(reading: Reading) -> list[str]:
    return [each.name for each in findings(reading)]


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in rules.RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_holds_where_it_should_and_not_beside(name: str) -> None:
    holds, holds_not = CASES[name]
    assert name in names(varied(HEALTHY, holds))
    assert name not in names(varied(HEALTHY, holds_not))


@pytest.mark.parametrize("name", [name for name in CASES if name not in BESIDE_OTHERS])
def test_the_planted_fault_is_the_verdict(name: str) -> None:
    found = diagnose(varied(HEALTHY, CASES[name][0]))
    assert found.bottleneck.name == name, [(each.name, each.share) for each in found.findings]
    assert found.bottleneck.evidence


@pytest.mark.parametrize("name", CASES)
def test_a_finding_has_figures_a_fix_and_an_honest_share(name: str) -> None:
    found = {each.name: each for each in findings(varied(HEALTHY, CASES[name][0]))}[name]
    assert 0 <= found.share <= 1
    assert found.evidence and all(found.evidence)
    assert found.do and found.expect and found.assumes
    assert "None" not in f"{found.do}{found.expect}{found.evidence}"
    assert found.available == (name != "drafts")


def test_contention_comes_before_what_is_worth_more() -> None:
    small = {
        "machine.cores": msgspec.structs.replace(CONTENDED["machine.cores"], others_share=0.01)
    }
    found = findings(varied(HEALTHY, FEW, CONTENDED, small, {"steps.idle_share": 0.2}))
    assert found[0].name == "contention" and found[0].share < max(each.share for each in found)


def test_what_is_missing_has_no_option() -> None:
    """Whoever adds speculative decoding mends the rule that says it is not there."""
    options = {field.name for field in fields(EngineOptions)}
    assert not any("spec" in name or "draft" in name for name in options)


def test_only_options_that_narrow_are_named() -> None:
    """On a server in int4 nothing is left to round; one in int8 may still go to int4."""
    int4 = {"--quantization int8": 165e6, "--quantization int4": 110e6}
    low = {**FEW, "weights.choices": int4, "steps.decode": steps(0.038, 190e6, 3 * 0.5e9)}
    in_int4 = varied(HEALTHY, low, {"weights.step_bytes": 110e6})
    assert not {"weight-bytes", "wide-weights"} & set(names(in_int4))
    in_int8 = varied(HEALTHY, low, {"weights.step_bytes": 165e6})
    (advice,) = [each for each in findings(in_int8) if each.name == "weight-bytes"]
    assert advice.do == "--quantization int4" and "int8" not in advice.expect
    in_bf16 = varied(HEALTHY, FEW)
    (advice,) = [each for each in findings(in_bf16) if each.name == "weight-bytes"]
    assert advice.do == "--quantization int4" and "--quantization int8: " in advice.expect
    step = decode_step(in_bf16)
    assert step is not None
    assert advice.share == pytest.approx(
        in_bf16.decode_share * (1 - step.with_(weights=1 / 3) / step.seconds), rel=1e-3
    )


def test_nothing_is_known_of_an_empty_reading() -> None:
    """Unknown is not zero: no rule may hold, and nothing may divide by it."""
    found = diagnose(Reading(source="metrics", subject="nobody"))
    assert found.bottleneck.name == "healthy" and found.findings == []
    assert found.waste == [] and found.savings == []


def test_decode_is_judged_before_any_request_has_ended() -> None:
    """Answers of thousands of tokens end in no window; gaps and steps are known all the same."""
    ended = ("ttft", "tpot", "e2e", "queue", "prefill")
    none = {f"latency.{name}": Percentiles() for name in ended}
    found = diagnose(varied(HEALTHY, none, {"lengths.output": Percentiles()}))
    assert found.bottleneck.name == "weight-bytes" and found.findings[0].share > 0.1
    assert found.tpot.mean_s == pytest.approx(0.04), "of the gaps"


@pytest.mark.parametrize(
    "module", ["reading", "roofline", "symptoms", "gains", "rules", "waste", "diagnosis", "words"]
)
def test_rules_do_no_io(module: str) -> None:
    source = (ROOT / "src" / "headway" / "advise" / f"{module}.py").read_text(encoding="utf-8")
    allowed = {"dataclasses", "collections", "headway", "msgspec"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in allowed
        assert not (isinstance(node, ast.Name) and node.id in ("open", "print", "input"))


# ── the arithmetic of gains ─────────────────────────────────────────────────────────────────────


def test_int8_halves_the_weights_and_leaves_the_kv() -> None:
    """The docstring's example: 38 ms at 3 rows, 500 MB and 80 MB at 17 GB/s."""
    step = decode_step(varied(HEALTHY, FEW))
    assert step is not None
    assert step.floor_s() == pytest.approx(0.0341, abs=1e-4)
    assert step.floor_s(weights=0.5) == pytest.approx(0.0194, abs=1e-4)
    assert step.with_(weights=0.5) == pytest.approx(0.0233, abs=1e-4)


def test_more_rows_cost_their_kv_until_products_bind() -> None:
    step = decode_step(varied(HEALTHY, FEW))
    assert step is not None
    assert step.with_(rows=6) == pytest.approx(0.0432, abs=1e-4)
    assert step.floor_s(rows=100) == pytest.approx(100 * 0.5e9 / FLOPS)
    assert step.speedup(6) == pytest.approx(2 * 0.038 / 0.0432, rel=1e-2)
    assert step.speedup(3) == 1


def test_a_floor_is_never_undercut() -> None:
    """A measured step below its own floor (a stale ceiling) must not promise negative time."""
    step = decode_step(varied(HEALTHY, FEW, {"steps.decode": steps(0.01, WEIGHTS, 1e9)}))
    assert step is not None
    assert step.floor_s() == pytest.approx(step.seconds), "the machine can do what it did"
    assert step.with_(weights=0.5) >= step.floor_s(weights=0.5) > 0


def test_cache_resident_models_have_no_floor() -> None:
    resident = varied(HEALTHY, {"weights.cache_resident": True})
    assert decode_step(resident) is None
    said = diagnose(resident).tpot.why_no_floor
    assert "cache" in said


def test_those_that_still_wait_count_as_waiting() -> None:
    """Ten waited 1 s and are done, ten have waited 11 s: 6 s, not 1."""
    waiting = {"latency.queue": all_at(1.0, count=10), "load.waiting_ages_s": (11.0,) * 10}
    reading = varied(HEALTHY, waiting)
    assert reading.queue_s == pytest.approx(6.0)


def test_savings_in_seconds_and_dollars() -> None:
    """A fifth of 101 tokens at 5 requests/s and $5 a million: 20.2 · 5 · 3600 · 5e-6 = $1.82."""
    spend = SpendReading(price_per_hour=2.0, usd_per_million_output=5.0, usd_per_million_input=1.0)
    found = diagnose(varied(HEALTHY, {"spend": spend})).savings
    outputs, prompts, prefix = found
    assert outputs.seconds == pytest.approx(0.2 * 4.0)
    assert outputs.usd_per_hour == pytest.approx(1.818)
    assert outputs.note == "output length is a product decision"
    assert prompts.seconds == pytest.approx(0.2 * 0.045)
    assert prefix.seconds == pytest.approx(0.5 * 0.045) and "prefix cache" in prefix.note


def test_a_known_prefix_takes_the_place_of_the_assumed_half() -> None:
    prefix = diagnose(varied(HEALTHY, LONG, {"prefix.shared_tokens": 1000.0})).savings[-1]
    assert prefix.what.startswith("a stable prefix of 25%")
    assert prefix.seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (QUEUED, "TTFT is 99% queueing: quantization"),
        ({}, "more KV memory buys nothing"),
        ({}, "a higher --max-num-seqs buys nothing"),
        ({}, "99% decode: shorter prompts"),
        (LONG | {"lengths.output": all_at(3)}, "prefill: speculative decoding"),
        ({"steps.idle_share": 0.9}, "more replicas"),
        ({"steps.host_share": 0.6}, "int8 weights or a faster accelerator"),
        ({"client.slow_streams": (SLOW,)}, "no flag of the server"),
    ],
)
def test_what_would_be_a_waste(changes: dict[str, Any], words: str) -> None:
    waste = diagnose(varied(HEALTHY, changes)).waste
    assert any(words in text for text in waste), waste


def test_a_waste_is_not_named_where_it_would_help() -> None:
    waste = " ".join(diagnose(varied(HEALTHY, CASES["kv-capacity"][0])).waste)
    assert "KV memory" not in waste and "--max-num-seqs" not in waste


def test_words() -> None:
    assert [duration(s) for s in (None, 0.0004, 0.0123, 0.25, 1.5, 90)] == [
        *("–", "0.40 ms", "12.3 ms", "250 ms", "1.5 s", "90 s")
    ]
    assert [dollars(5.555), dollars(0.000123)] == ["$5.55", "$0.00012"]
    assert [plural(1, "row"), plural(2.6, "row")] == ["1 row", "2.6 rows"]
    assert rate(17.2e9, "B/s") == "17.2 GB/s"


def test_the_page_has_the_table() -> None:
    """docs/doctor.md is written by `python -m headway.advise.reference`."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert page == reference.with_table(page)
