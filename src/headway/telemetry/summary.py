"""Figures of a window from its slots, ceilings and prices: pure functions.

Nothing here runs per token or per step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.service import ServiceClass
from headway.perf.roofline import ModelWork, Roof, Utilization, ratio
from headway.telemetry.contention import CoreUse, mean_core_use
from headway.telemetry.formulas import (
    error_budget,
    goodput_per_s,
    percentiles,
    split_spend,
    usd_per_million,
)
from headway.telemetry.gaps import GapCounts
from headway.telemetry.goodput import FAILED, REFUSED, EndedRequest
from headway.telemetry.snapshot import (
    ClassWindow,
    Cost,
    DraftStats,
    Percentiles,
    SourceDrafts,
    StepMeans,
    StepStats,
    Verdict,
    WindowStats,
)
from headway.telemetry.verdict import Facts, judge_window
from headway.telemetry.windows import Slot, StepSums, gaps_of, joined, steps_of

LATENCIES = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "e2e": "e2e_s",
    "queue": "queue_s",
    "prefill": "prefill_s",
}
MEANS = tuple(
    (name, name if hasattr(StepSums, name) else f"num_{name}")
    for name in StepMeans.__struct_fields__
)
"""(field of `StepMeans`, attribute of `StepSums`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowContext:
    """Inputs of a window besides its slots: model, machine, objectives and price."""

    work: ModelWork
    roof: Roof
    classes: dict[str, ServiceClass]
    slo_target: float
    price_per_hour: float | None
    cached_price: float
    max_num_seqs: int
    proposers: tuple[str, ...] = ()
    """Proposers of draft tokens."""
    draft_failure: str = ""
    """Reason why the draft model is disabled, or ""."""
    num_engines: int = 1
    """Engines run in parallel: two that are busy for a second make two seconds of steps."""


def window(
    seconds: int, slots: list[Slot], covered_s: float, context: WindowContext
) -> WindowStats:
    """Return all figures of one window."""
    ended = [request for slot in slots for request in slot.ended]
    gaps = gaps_of(slots)
    all_gaps = GapCounts()
    for counts in gaps.values():
        all_gaps.merge(counts)
    latency = latencies(ended) | {"itl": all_gaps.percentiles()}
    first_tokens = sum(slot.first_tokens for slot in slots)
    sums = steps_of(slots, len(context.work.kv_bytes))
    places = utilizations(context, *sums)
    stats = step_stats(slots, *sums, covered_s * context.num_engines)
    cores = mean_core_use([use for slot in slots for use in slot.cores])
    num_met = sum(request.met for request in ended)
    output_tokens_per_s = (all_gaps.count + first_tokens) / covered_s
    return WindowStats(
        seconds=seconds,
        covered_s=covered_s,
        arrivals_per_s=sum(slot.arrivals for slot in slots) / covered_s,
        finished_per_s=len(ended) / covered_s,
        num_failed=sum(request.outcome in (FAILED, REFUSED) for request in ended),
        input_tokens_per_s=sum(slot.prompt_tokens for slot in slots) / covered_s,
        output_tokens_per_s=output_tokens_per_s,
        cache_hit_rate=ratio(
            sum(slot.cached_tokens for slot in slots), sum(slot.queried_tokens for slot in slots)
        ),
        cache_saved_s=sum(slot.saved_s for slot in slots),
        goodput_per_s=goodput_per_s(num_met, covered_s),
        latency=latency,
        lengths={
            "prompt": percentiles([r.prompt_tokens for r in ended if r.outcome != REFUSED]),
            "output": percentiles([r.output_tokens for r in ended if r.outcome != REFUSED]),
        },
        classes=class_windows(ended, gaps, latency, covered_s, context),
        steps=stats,
        decode=places[0],
        prefill=places[1],
        all_steps=places[2],
        verdict=verdict(stats, *places[:2], context, cores, probe_share(slots)),
        cores=cores,
        cost=cost(ended, slots, *sums, covered_s, output_tokens_per_s, context),
        drafts=draft_stats(context, slots, *sums) if context.proposers else None,
    )


def draft_stats(
    context: WindowContext, slots: list[Slot], decode: StepSums, prefill: StepSums
) -> DraftStats:
    """Return the figures of speculation: drafts, acceptance and their cost.

    100 decodes with 300 draft tokens, 150 of them accepted: 2.5 tokens per step. If drafting and
    verifying took 40% of the time of those steps, the speedup is 2.5 · 0.6 = 1.5. Forced tokens
    count as gained tokens, and the time to compute them as verifying.
    """
    sums = StepSums.over(len(decode.kv_tokens_read), decode, prefill)
    by_source = {}
    for source in context.proposers:
        counts = [slot.verified[source] for slot in slots if source in slot.verified]
        drafts, tokens, accepted = map(sum, zip(*counts, strict=True)) if counts else (0, 0, 0)
        by_source[source] = SourceDrafts(
            drafts=drafts, draft_tokens=tokens, accepted_tokens=accepted
        )
    worked_s, decode_s = sums.duration_s + sums.gap_s, decode.duration_s + decode.gap_s
    spent, tokens_per_step = (
        ratio(decode.draft_s + decode.verify_s, decode_s),
        tokens_per_decode(decode),
    )
    known = spent is not None and tokens_per_step is not None
    return DraftStats(
        drafts=sum(each.drafts for each in by_source.values()),
        draft_tokens=sums.num_drafts,
        accepted_tokens=sums.num_kept_drafts,
        acceptance=ratio(sums.num_kept_drafts, sums.num_drafts),
        jump_forward_tokens=sums.num_forced,
        drafts_per_step=ratio(sums.num_drafts, sums.num_decodes),
        tokens_per_step=tokens_per_decode(sums),
        draft_share=ratio(sums.draft_s, worked_s),
        verify_share=ratio(sums.verify_s, worked_s),
        speedup=(tokens_per_step or 0.0) * (1 - (spent or 0.0)) if known else None,
        by_source=by_source,
        failure=context.draft_failure,
    )


def tokens_per_decode(sums: StepSums) -> float | None:
    """Return the tokens that a decoding sequence gains in a mean step; None without decodes."""
    return ratio(sums.num_decodes + sums.num_kept_drafts + sums.num_forced, sums.num_decodes)


def latencies(ended: Sequence[EndedRequest]) -> dict[str, Percentiles]:
    """Return the percentiles of each latency; refused requests are excluded."""
    result = {}
    for name, attribute in LATENCIES.items():
        values = [getattr(request, attribute) for request in ended if request.outcome != REFUSED]
        result[name] = percentiles([value for value in values if value is not None])
    return result


def class_windows(
    ended: list[EndedRequest],
    gaps: dict[str, GapCounts],
    latency: dict[str, Percentiles],
    covered_s: float,
    context: WindowContext,
) -> list[ClassWindow]:
    """Return one entry per class with requests in the window; `latency` is of all requests."""
    by_class: dict[str, list[EndedRequest]] = {name: [] for name in gaps}
    for request in ended:
        by_class.setdefault(request.service_class, []).append(request)
    windows = []
    for name in sorted(by_class):
        own = latency
        if len(by_class) > 1:
            counts = gaps.get(name, GapCounts())
            own = latencies(by_class[name]) | {"itl": counts.percentiles()}
        windows.append(class_window(context, name, by_class[name], own, covered_s))
    return windows


def class_window(
    context: WindowContext,
    name: str,
    ended: list[EndedRequest],
    latency: dict[str, Percentiles],
    covered_s: float,
) -> ClassWindow:
    """Return attainment and budget of one class."""
    judged = [request for request in ended if request.missed is not None]
    met = [request for request in judged if request.met]
    attainment, remaining, burn = error_budget(len(met), len(judged), context.slo_target)
    return ClassWindow(
        name=name,
        objectives=str(context.classes[name]),
        why=context.classes[name].why,
        num_judged=len(judged),
        num_met=len(met),
        missed=dict(Counter(which for request in judged for which in request.missed or ())),
        goodput_per_s=goodput_per_s(len(met), covered_s),
        token_goodput_per_s=sum(request.output_tokens for request in met) / covered_s,
        attainment=attainment,
        remaining_budget=remaining,
        burn_rate=burn,
        latency=latency,
    )


def step_stats(
    slots: list[Slot], decode: StepSums, prefill: StepSums, covered_s: float
) -> StepStats:
    """Return shares and means; a step longer than the window does not make a share exceed 1."""
    sums = StepSums.over(len(decode.kv_tokens_read), decode, prefill)
    worked_s = sums.duration_s + sums.gap_s
    wall_s = max(covered_s, worked_s)
    count = sums.count
    return StepStats(
        count=count,
        busy_share=sums.duration_s / wall_s,
        gap_share=sums.gap_s / wall_s,
        idle_share=1 - worked_s / wall_s,
        kv_usage_mean=sums.kv_usage / count if count else 0.0,
        kv_usage_max=sums.kv_usage_max,
        num_preemptions=sum(slot.num_preemptions for slot in slots),
        num_prefill_steps=prefill.count,
        duration=percentiles(joined(slot.durations for slot in slots)),
        mean=step_means(sums) if count else None,
        cost_error=percentiles(joined(slot.prediction_errors for slot in slots)),
    )


def step_means(sums: StepSums) -> StepMeans:
    """Return each sum divided by the number of steps: `tokens` from num_tokens."""
    return StepMeans(**{name: getattr(sums, of) / sums.count for name, of in MEANS})


def utilizations(
    context: WindowContext, decode: StepSums, prefill: StepSums
) -> tuple[Utilization | None, Utilization | None, Utilization | None]:
    """Return the utilization of steps without prefill, with prefill, and of all.

    The least time of all steps by the roofline is the sum of that of the two parts.
    """
    roof, work = context.roof, context.work
    both = StepSums.over(len(decode.kv_tokens_read), decode, prefill)
    without, with_, all_steps = (roof.place(work, sums) for sums in (decode, prefill, both))
    if all_steps is not None and all_steps.roofline is not None:
        parts = [part for part in (without, with_) if part is not None]
        floor_s = sum((part.roofline or 0.0) * part.time_s for part in parts)
        all_steps.roofline = floor_s / all_steps.time_s
    return without, with_, all_steps


def verdict(
    stats: StepStats,
    decode: Utilization | None,
    prefill: Utilization | None,
    context: WindowContext,
    cores: CoreUse | None,
    probe_share: float | None,
) -> Verdict:
    """Return the verdict on the window, from the part that took most of the time."""
    parts = [part for part in (decode, prefill) if part is not None]
    main = max(parts, key=lambda part: part.time_s, default=None)
    mean, worked = stats.mean, stats.busy_share + stats.gap_share
    model_share = 0.0
    if mean is not None:
        inside_s = (mean.forward_s or mean.duration_s) + mean.sample_s
        model_share = stats.busy_share * min(inside_s / mean.duration_s, 1.0)
    ceilings = context.roof.ceilings
    memory = 0.0 if context.roof.cache_resident else ceilings.bandwidth_bytes_per_s
    compute_side = main is None or not memory
    if main is not None and memory and ceilings.flops_per_s:
        compute_side = main.flops_per_s / ceilings.flops_per_s > main.bytes_per_s / memory
    return judge_window(
        Facts(
            num_steps=stats.count,
            idle_share=stats.idle_share,
            gap_share=stats.gap_share,
            host_share=1 - model_share / worked if worked else 0.0,
            mfu=main.mfu if main else None,
            mbu=main.mbu if main else None,
            roofline=main.roofline if main else None,
            compute_side=compute_side,
            cache_resident=context.roof.cache_resident,
            running=mean.running if mean else 0.0,
            max_num_seqs=context.max_num_seqs,
            waiting=mean.waiting if mean else 0.0,
            kv_usage_max=stats.kv_usage_max,
            num_preemptions=stats.num_preemptions,
            step_s=mean.duration_s if mean else 0.0,
            cores=cores,
            probe_share=probe_share,
        )
    )


def probe_share(slots: list[Slot]) -> float | None:
    """Return the median share of the best probe that idle probes reached; None without one."""
    shares = sorted(each for slot in slots for each in slot.probe_shares)
    return shares[len(shares) // 2] if shares else None


def cost(
    ended: list[EndedRequest],
    slots: list[Slot],
    decode: StepSums,
    prefill: StepSums,
    covered_s: float,
    output_tokens_per_s: float,
    context: WindowContext,
) -> Cost | None:
    """Return the cost of the window, by token and by request; None without a price.

    A cached prompt token costs the share `cached_price` of a computed one: $1 for 900 computed and
    1,000 cached tokens at 0.1 is $1,000 and $100 per million.
    """
    price_per_hour = context.price_per_hour
    if price_per_hour is None:
        return None
    usd = price_per_hour * covered_s / 3600
    for_input, for_output = split_spend(
        usd,
        decode.duration_s,
        prefill.duration_s,
        prefill.num_prefill_tokens,
        prefill.num_decode_tokens,
    )
    cached = sum(slot.cached_tokens for slot in slots)
    charged_tokens = prefill.num_prefill_tokens + context.cached_price * cached
    for_one = ratio(for_input * 1e6, charged_tokens)
    good = sum(request.met for request in ended)
    return Cost(
        usd=usd,
        usd_per_million_input=for_one,
        usd_per_million_cached=None if for_one is None else for_one * context.cached_price,
        usd_per_million_output=ratio(for_output * 1e6, output_tokens_per_s * covered_s),
        usd_per_million_tokens=usd_per_million(price_per_hour, output_tokens_per_s),
        usd_per_request=ratio(usd, len(ended)),
        usd_per_met_request=ratio(usd, good),
    )
