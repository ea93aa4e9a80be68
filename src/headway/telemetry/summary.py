"""From the slots of a window to what `/stats` says of it. Pure: slots, ceilings and prices in.

Nothing here is called per token or per step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.service import ServiceClass
from headway.perf.roofline import ModelWork, Roof, Utilization, ratio
from headway.telemetry.contention import CoreUse, over
from headway.telemetry.formulas import (
    error_budget,
    goodput_per_s,
    percentiles,
    split_spend,
    usd_per_million,
)
from headway.telemetry.gaps import GapCounts
from headway.telemetry.goodput import FAILED, REFUSED, Ended
from headway.telemetry.snapshot import (
    ClassWindow,
    Cost,
    DraftStats,
    Percentiles,
    SourceDrafts,
    StepMeans,
    StepStats,
    Verdict,
    Window,
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
"""Each mean and the sum that it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a window is judged by: the model, the machine, the promises and the price."""

    work: ModelWork
    roof: Roof
    classes: dict[str, ServiceClass]
    slo_target: float
    price_per_hour: float | None
    cached_price: float
    max_num_seqs: int
    sources: tuple[str, ...] = ()
    """Who guesses tokens."""
    draft_failure: str = ""
    """Why the drafter is not asked now."""
    num_engines: int = 1
    """They work at once: two that are busy for a second each have made two seconds of steps."""


def window(seconds: int, slots: list[Slot], covered_s: float, setting: Setting) -> Window:
    """All figures of one window."""
    ended = [request for slot in slots for request in slot.ended]
    gaps = gaps_of(slots)
    all_gaps = GapCounts()
    for counts in gaps.values():
        all_gaps.merge(counts)
    latency = latencies(ended) | {"itl": all_gaps.percentiles()}
    first_tokens = sum(slot.first_tokens for slot in slots)
    sums = steps_of(slots, len(setting.work.kv_bytes))
    places = place(setting, *sums)
    stats = step_stats(slots, *sums, covered_s * setting.num_engines)
    cores = over([use for slot in slots for use in slot.cores])
    num_met = sum(request.met for request in ended)
    output_tokens_per_s = (all_gaps.count + first_tokens) / covered_s
    return Window(
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
        classes=class_windows(ended, gaps, latency, covered_s, setting),
        steps=stats,
        decode=places[0],
        prefill=places[1],
        all_steps=places[2],
        verdict=verdict(stats, *places[:2], setting, cores, probe_share(slots)),
        cores=cores,
        cost=cost(ended, slots, *sums, covered_s, output_tokens_per_s, setting),
        drafts=draft_stats(setting, slots, *sums) if setting.sources else None,
    )


def draft_stats(
    setting: Setting, slots: list[Slot], decode: StepSums, prefill: StepSums
) -> DraftStats:
    """What was guessed and accepted, and what it took.

    100 decodes with 300 guesses, of which 150 came: 2.5 tokens a step. Where drafting and verifying
    took 40% of the time of those steps, 1.5 times the tokens came that would have come without.
    Tokens that a grammar forced come beside them, and what computing them took counts as verifying.
    """
    sums = StepSums.over(len(decode.kv_tokens_read), decode, prefill)
    by_source = {}
    for source in setting.sources:
        counts = [slot.verified[source] for slot in slots if source in slot.verified]
        drafts, tokens, kept = map(sum, zip(*counts, strict=True)) if counts else (0, 0, 0)
        by_source[source] = SourceDrafts(drafts=drafts, draft_tokens=tokens, accepted_tokens=kept)
    worked_s, decode_s = sums.duration_s + sums.gap_s, decode.duration_s + decode.gap_s
    spent, tokens_per_step = ratio(decode.draft_s + decode.verify_s, decode_s), gained(decode)
    known = spent is not None and tokens_per_step is not None
    return DraftStats(
        drafts=sum(each.drafts for each in by_source.values()),
        draft_tokens=sums.num_drafts,
        accepted_tokens=sums.num_kept_drafts,
        acceptance=ratio(sums.num_kept_drafts, sums.num_drafts),
        jump_forward_tokens=sums.num_forced,
        drafts_per_step=ratio(sums.num_drafts, sums.num_decodes),
        tokens_per_step=gained(sums),
        draft_share=ratio(sums.draft_s, worked_s),
        verify_share=ratio(sums.verify_s, worked_s),
        speedup=(tokens_per_step or 0.0) * (1 - (spent or 0.0)) if known else None,
        by_source=by_source,
        failure=setting.draft_failure,
    )


def gained(sums: StepSums) -> float | None:
    """Tokens that a sequence gained in a step in which it decoded."""
    return ratio(sums.num_decodes + sums.num_kept_drafts + sums.num_forced, sums.num_decodes)


def latencies(ended: Sequence[Ended]) -> dict[str, Percentiles]:
    """Percentiles of each latency over the requests that have it; refused ones have none."""
    found = {}
    for name, attribute in LATENCIES.items():
        values = [getattr(request, attribute) for request in ended if request.outcome != REFUSED]
        found[name] = percentiles([value for value in values if value is not None])
    return found


def class_windows(
    ended: list[Ended],
    gaps: dict[str, GapCounts],
    latency: dict[str, Percentiles],
    covered_s: float,
    setting: Setting,
) -> list[ClassWindow]:
    """One entry for each class that a request named in the window; `latency` is of all of them."""
    by_class: dict[str, list[Ended]] = {name: [] for name in gaps}
    for request in ended:
        by_class.setdefault(request.service_class, []).append(request)
    found = []
    for name in sorted(by_class):
        own = latency
        if len(by_class) > 1:
            counts = gaps.get(name, GapCounts())
            own = latencies(by_class[name]) | {"itl": counts.percentiles()}
        found.append(class_window(setting, name, by_class[name], own, covered_s))
    return found


def class_window(
    setting: Setting,
    name: str,
    ended: list[Ended],
    latency: dict[str, Percentiles],
    covered_s: float,
) -> ClassWindow:
    """Attainment and budget of one class."""
    judged = [request for request in ended if request.missed is not None]
    met = [request for request in judged if request.met]
    attainment, left, burn = error_budget(len(met), len(judged), setting.slo_target)
    return ClassWindow(
        name=name,
        objectives=str(setting.classes[name]),
        why=setting.classes[name].why,
        num_judged=len(judged),
        num_met=len(met),
        missed=dict(Counter(which for request in judged for which in request.missed or ())),
        goodput_per_s=goodput_per_s(len(met), covered_s),
        token_goodput_per_s=sum(request.output_tokens for request in met) / covered_s,
        attainment=attainment,
        budget_left=left,
        burn_rate=burn,
        latency=latency,
    )


def step_stats(
    slots: list[Slot], decode: StepSums, prefill: StepSums, covered_s: float
) -> StepStats:
    """Shares and means; a step longer than the window cannot make the shares exceed 1."""
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
    """Each sum over the number of steps: `forward_s` of forward_s, `tokens` of num_tokens."""
    return StepMeans(**{name: getattr(sums, of) / sums.count for name, of in MEANS})


def place(
    setting: Setting, decode: StepSums, prefill: StepSums
) -> tuple[Utilization | None, Utilization | None, Utilization | None]:
    """Steps without prefill, with, and both; the roofline of both adds up the parts' floors."""
    roof, work = setting.roof, setting.work
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
    setting: Setting,
    cores: CoreUse | None,
    probe_share: float | None,
) -> Verdict:
    """The verdict on the window."""
    places = [found for found in (decode, prefill) if found is not None]
    main = max(places, key=lambda found: found.time_s, default=None)
    mean, worked = stats.mean, stats.busy_share + stats.gap_share
    model_share = 0.0
    if mean is not None:
        inside_s = (mean.forward_s or mean.duration_s) + mean.sample_s
        model_share = stats.busy_share * min(inside_s / mean.duration_s, 1.0)
    ceilings = setting.roof.ceilings
    memory = 0.0 if setting.roof.cache_resident else ceilings.bandwidth_bytes_per_s
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
            cache_resident=setting.roof.cache_resident,
            running=mean.running if mean else 0.0,
            max_num_seqs=setting.max_num_seqs,
            waiting=mean.waiting if mean else 0.0,
            kv_usage_max=stats.kv_usage_max,
            num_preemptions=stats.num_preemptions,
            step_s=mean.duration_s if mean else 0.0,
            cores=cores,
            probe_share=probe_share,
        )
    )


def probe_share(slots: list[Slot]) -> float | None:
    """What the probes of idle moments reached of the best, in the middle; None without one."""
    found = sorted(each for slot in slots for each in slot.probe_shares)
    return found[len(found) // 2] if found else None


def cost(
    ended: list[Ended],
    slots: list[Slot],
    decode: StepSums,
    prefill: StepSums,
    covered_s: float,
    output_tokens_per_s: float,
    setting: Setting,
) -> Cost | None:
    """What the window cost, by token and by request; None without a price.

    A cached token of a prompt takes a share `cached_price` of another's part: $1 for 900 computed
    and 1,000 cached ones at 0.1 is $1,000 and $100 a million.
    """
    price_per_hour = setting.price_per_hour
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
    worth = prefill.num_prefill_tokens + setting.cached_price * cached
    for_one = ratio(for_input * 1e6, worth)
    good = sum(request.met for request in ended)
    return Cost(
        usd=usd,
        usd_per_million_input=for_one,
        usd_per_million_cached=None if for_one is None else for_one * setting.cached_price,
        usd_per_million_output=ratio(for_output * 1e6, output_tokens_per_s * covered_s),
        usd_per_million_tokens=usd_per_million(price_per_hour, output_tokens_per_s),
        usd_per_request=ratio(usd, len(ended)),
        usd_per_met_request=ratio(usd, good),
    )
