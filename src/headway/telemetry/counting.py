"""Counting of steps and requests into the metrics, and the series that exist from the start.

`live` calls these functions; each row of the registry is counted here or in `live`.
"""

from collections.abc import Iterable

from headway.core.records import StepRecord
from headway.core.service import ServiceClass
from headway.core.slo import OBJECTIVES
from headway.telemetry.goodput import FAILED, REFUSED, EndedRequest
from headway.telemetry.registry import Registry
from headway.telemetry.snapshot import WindowStats
from headway.telemetry.timeline import RequestTimeline
from headway.telemetry.verdict import KINDS

PARTS = ("decode", "prefill", "all_steps")


def expect_classes(registry: Registry, classes: Iterable[ServiceClass]) -> None:
    """Create the series of every class, so that attainment is defined before the first miss."""
    for row in classes:
        for name in ("slo_requests", "slo_met", "priced_tokens"):
            registry.expect(name, row.name)
        bounds = zip(OBJECTIVES, row.slo.bounds(), strict=True)
        objectives = [name for name, bound in bounds if bound is not None]
        for which in (*objectives, FAILED, REFUSED):
            registry.expect("slo_missed", row.name, which)


def expect_tasks(registry: Registry) -> None:
    """Create the series of all tasks together."""
    registry.expect("task_cost_usd", "all", "")
    for outcome in ("success", "failure"):
        registry.expect("tasks_judged", "all", "", outcome)


def tier_label(tier: str) -> str:
    """Return the label of a KV tier: `engine` for every other engine, else the tier's name."""
    return "engine" if tier.startswith("engine:") else tier


def count_step(registry: Registry, record: StepRecord) -> None:
    """Count one step. A cached token saves the seconds that the step model predicts for it."""
    token_s = record.alone_s_per_token
    registry.histograms["iteration_tokens"].observe(record.num_tokens)
    if record.mask_s:
        registry.observe("grammar_mask_seconds", record.mask_s)
        registry.observe("grammar_mask_wait_seconds", record.mask_wait_s)
    for seconds in record.compiles_s:
        registry.observe("grammar_compile_seconds", seconds)
    if record.num_queried_tokens:
        cached = record.num_cached_tokens
        registry.add("prefix_cache_queries", record.num_queried_tokens)
        registry.add("prefix_cache_hits", cached)
        registry.add("prefix_cache_saved_seconds", cached * token_s)
        registry.add("prompt_tokens_cached", cached)
        here = cached - sum(record.restored_tokens.values())
        registry.add("prompt_tokens_cached_by_source", here, "device")
        for tier, count in record.restored_tokens.items():
            registry.add("prompt_tokens_cached_by_source", count, tier_label(tier))
            registry.add("kv_tier_seconds_saved", count * token_s, tier_label(tier))
        registry.add("prompt_tokens_by_source", cached, "local_cache_hit")
        computed = record.num_queried_tokens - cached
        registry.add("prompt_tokens_by_source", computed, "local_compute")
    for tier, seconds in record.restore_s.items():
        registry.add("kv_tier_read_seconds", seconds, tier_label(tier))
    if record.num_bad_blocks or record.num_failed_reads:
        registry.add("kv_disk_failures", record.num_bad_blocks, "damaged")
        registry.add("kv_disk_failures", record.num_failed_reads, "read")
    if record.num_lost_tokens:
        registry.add("preempted_tokens", record.num_lost_tokens, "lost")
    if record.has_more:
        count_drafts(registry, record)


def expect_drafts(registry: Registry, sources: Iterable[str], max_drafts: int) -> None:
    """Create the series of every proposer and draft position, where there is speculation."""
    for source in sources:
        registry.expect("spec_decode_num_draft_tokens_by_source", source)
        registry.expect("spec_decode_num_accepted_tokens_by_source", source)
    for position in range(max_drafts):
        registry.expect("spec_decode_num_accepted_tokens_per_pos", str(position))


def count_drafts(registry: Registry, record: StepRecord) -> None:
    """Count the drafts that a step verified.

    Two drafts of 3 tokens with 2 and 0 accepted: 2 drafts, 6 draft tokens, 2 accepted tokens, one
    at position 0 and one at position 1.
    """
    add, by_source = registry.add, "spec_decode_num_{}_tokens_by_source".format
    add("spec_decode_num_drafts", len(record.verified))
    add("jump_forward_tokens", record.num_forced)
    add("spec_decode_draft_seconds", record.draft_s)
    add("spec_decode_verify_seconds", record.verify_s)
    for source, count, num_accepted in record.verified:
        add("spec_decode_num_draft_tokens", count)
        add("spec_decode_num_accepted_tokens", num_accepted)
        add(by_source("draft"), count, source)
        add(by_source("accepted"), num_accepted, source)
        for position in range(num_accepted):
            add("spec_decode_num_accepted_tokens_per_pos", 1, str(position))


def count_preemptions(registry: Registry, record: StepRecord, num_new: int) -> None:
    """Count `num_new` sequences preempted since the previous step."""
    registry.add("num_preemptions", num_new)
    registry.add("preemptions", num_new - record.num_swapped, "lost")
    registry.add("preemptions", record.num_swapped, "copied")
    registry.add("preempted_tokens", record.num_swapped_tokens, "copied")


def count_request(registry: Registry, timeline: RequestTimeline, ended: EndedRequest) -> None:
    """Count a completed request: its latencies, lengths and parameters."""
    observe, first_s, scheduled_s = registry.observe, timeline.first_s, timeline.scheduled_s
    last_s = timeline.arrived_s + (ended.e2e_s or 0.0)
    observe("e2e_request_latency_seconds", ended.e2e_s)
    observe("request_queue_time_seconds", ended.queue_s)
    observe("time_to_publish_seconds", timeline.publish_s)
    observe("request_prefill_time_seconds", ended.prefill_s)
    observe("request_time_per_output_token_seconds", ended.tpot_s)
    if scheduled_s is not None:
        observe("request_inference_time_seconds", max(last_s - scheduled_s, 0.0))
    if first_s is not None:
        observe("request_decode_time_seconds", max(last_s - first_s, 0.0))
    observe("request_prompt_tokens", ended.prompt_tokens)
    observe("request_prefill_kv_computed_tokens", ended.prompt_tokens - timeline.cached_tokens)
    observe("request_generation_tokens", ended.output_tokens)
    observe("request_max_num_generation_tokens", max(map(len, timeline.times)))
    observe("request_num_preemptions", timeline.num_preemptions)
    observe("request_params_n", timeline.n)
    observe("request_params_max_tokens", timeline.max_tokens)


def count_price(
    registry: Registry, timeline: RequestTimeline, ended: EndedRequest, cached_price: float
) -> None:
    """Count the tokens of a request at the price of its class; cached ones at `cached_price`."""
    if ended.output_tokens:
        discount = timeline.cached_tokens * (1 - cached_price)
        tokens = ended.prompt_tokens - discount + ended.output_tokens
        priced = tokens * timeline.service_class.price
        registry.add("priced_tokens", priced, ended.service_class)


def count_slo(registry: Registry, ended: EndedRequest) -> None:
    """Count whether a request met its objectives, if it is judged."""
    if ended.missed is None:
        return
    registry.add("slo_requests", 1, ended.service_class)
    if ended.met:
        registry.add("goodput_requests")
        registry.add("slo_met", 1, ended.service_class)
    for which in ended.missed:
        registry.add("slo_missed", 1, ended.service_class, which)


def show_window(registry: Registry, recent: WindowStats) -> None:
    """Set the gauges of the newest window: utilization, error of the step model, verdict."""
    for part in PARTS:
        place = getattr(recent, part)
        registry.set("mfu_ratio", place and place.mfu, part)
        registry.set("mbu_ratio", place and place.mbu, part)
    for quantile, error in recent.steps.cost_error.quantiles:
        registry.set("step_cost_error_ratio", error, quantile)
    for kind in KINDS:
        registry.set("bottleneck", float(recent.verdict.kind == kind), kind)


def count_handover(registry: Registry, outcome: str, seconds: float | None) -> None:
    """Count a handover between engines by outcome; `seconds` if another engine continued it."""
    registry.add("kv_handovers", 1, outcome)
    registry.observe("kv_handover_seconds", seconds)


def show_engines(
    registry: Registry, num_by_role: dict[str, int], demand: tuple[float, float]
) -> None:
    """Set the gauges of ready engines by role and of engines that the traffic needs."""
    registry.values["engines"] = {(role,): float(num) for role, num in num_by_role.items()}
    for kind, value in zip(("prefill", "decode"), demand, strict=True):
        registry.set("engines_asked", value, kind)
