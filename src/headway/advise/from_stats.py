"""A reading from a live Headway server: the snapshots of `/stats` over a window.

The last snapshot has the figures of the window; the earlier ones show changes: streams whose tokens
are not sent, a queue that grew, faults that were counted.
"""

from collections.abc import Sequence

from headway.advise.reading import (
    ClientReading,
    DraftReading,
    FaultReading,
    KVReading,
    LatencyReading,
    LengthReading,
    LimitReading,
    LoadReading,
    MachineReading,
    PrefixReading,
    ServerReading,
    SlowStream,
    SpendReading,
    StepReading,
    WeightReading,
)
from headway.telemetry.snapshot import (
    DraftStats,
    LiveRequest,
    Percentiles,
    Snapshot,
    StepStats,
    WindowStats,
)

SLOW_SHARE = 0.5
"""A stream that sends less than this share of the tokens that the engine generates is slow."""
MIN_GENERATED_TOKENS = 8
"""Fewer generated tokens between two polls say nothing about a stream."""
MIN_SILENT_S = 1.0
"""Seconds without a running sequence after which a stream that still decodes is slow."""
MIN_REQUESTS = 3
"""Fewer requests at the polls: the lengths of the requests that ended are used."""
LAST_PROMPTS = 32
"""Prompts among which the server searches shared prefixes."""


def reading_from_stats(
    subject: str,
    polls: Sequence[Snapshot],
    *,
    seconds: float,
    transfer_s: float | None = None,
    price_per_hour: float | None = None,
) -> ServerReading:
    """Return the reading of the polls, the oldest first, for the window of the last one that is
    nearest to `seconds`."""
    first, last = polls[0], polls[-1]
    window = min(last.windows, key=lambda w: abs(w.seconds - seconds))
    return ServerReading(
        source="stats",
        subject=subject,
        server=describe(last),
        seconds=window.covered_s,
        not_known=not_known(last, window, transfer_s),
        load=load(first, last, window),
        client=ClientReading(slow_streams=slow_streams(polls)),
        latency=latency(window, transfer_s),
        lengths=lengths(polls, window),
        steps=steps(window),
        limits=limits(last),
        machine=machine(last, window),
        weights=weights(last),
        kv=kv(last, window),
        prefix=prefix(last, window),
        drafts=drafts(window.drafts),
        faults=faults(first, last, window),
        spend=spend(window, last.price_per_hour, price_per_hour),
        verdict=window.verdict,
    )


def describe(snapshot: Snapshot) -> str:
    """Return a line such as "Headway 0.2.0, qwen (LlamaForCausalLM, bfloat16) on AMD EPYC"."""
    model, machine = snapshot.model, snapshot.machine
    where = machine.name or machine.device
    return (
        f"Headway {snapshot.version}, {model.names[0]} ({model.architecture}, {model.dtype}) on "
        f"{where}"
    )


def not_known(last: Snapshot, window: WindowStats, transfer_s: float | None) -> tuple[str, ...]:
    """Return what this window does not contain."""
    notes = []
    if not window.latency["e2e"].count:
        notes.append("latencies of whole requests: none ended (try a longer --seconds)")
    if last.machine.bandwidth_bytes_per_s is None:
        notes.append("the machine's ceilings were not measured: no floors, no MFU, no MBU")
    notes.append("superfluous parts of prompts: headway doctor --data FILE counts them")
    if transfer_s is None:
        notes.append("the round trip to the client")
    return tuple(notes)


def load(first: Snapshot, last: Snapshot, window: WindowStats) -> LoadReading:
    """Return arrivals, and running and waiting requests."""
    mean = window.steps.mean
    return LoadReading(
        num_ended=window.latency["e2e"].count,
        arrivals_per_s=window.arrivals_per_s,
        finished_per_s=window.finished_per_s,
        running=mean.running if mean else 0.0,
        waiting=mean.waiting if mean else 0.0,
        waiting_growth=last.now.num_waiting - first.now.num_waiting,
        waiting_ages_s=tuple(r.age_s for r in last.now.requests if r.state == "waiting"),
        in_slo=in_slo(window),
    )


def in_slo(window: WindowStats) -> float | None:
    """Return the share of judged requests of all classes that met their objectives."""
    judged = sum(row.num_judged for row in window.classes)
    return sum(row.num_met for row in window.classes) / judged if judged else None


def latency(window: WindowStats, transfer_s: float | None) -> LatencyReading:
    """Return the window's percentiles; the round trip is the doctor's own measurement."""
    names = ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
    by_name = {name: window.latency.get(name, Percentiles()) for name in names}
    return LatencyReading(**by_name, transfer_s=transfer_s)


def lengths(polls: Sequence[Snapshot], window: WindowStats) -> LengthReading:
    """Return the 25th percentile of the prompt lengths, and the longest.

    The requests in flight at the polls are used where they are several: of [16, 16, 2500, 2500]
    these are 16 and 2500, even if none of the short ones has ended.
    """
    prompt_tokens = {r.id: float(r.prompt_tokens) for poll in polls for r in poll.now.requests}
    under_way, ended = sorted(prompt_tokens.values()), window.lengths.get("prompt", Percentiles())
    short = under_way[len(under_way) // 4] if len(under_way) >= MIN_REQUESTS else ended.p50
    return LengthReading(
        prompt=ended,
        output=window.lengths.get("output", Percentiles()),
        short_prompt=short,
        longest_prompt=max([*under_way, ended.p99 or 0.0], default=0.0) or None,
    )


def steps(window: WindowStats) -> StepReading:
    """Return the times of the steps."""
    stats = window.steps
    return StepReading(
        idle_share=stats.idle_share,
        host_share=host_share(stats),
        decode=window.decode,
        prefill=window.prefill,
        rows=stats.mean.running if stats.mean else None,
        prefill_tokens=prefill_tokens(stats),
    )


def limits(last: Snapshot) -> LimitReading:
    """Return the limits of one step."""
    return LimitReading(
        max_num_seqs=last.limits.max_num_seqs or None,
        max_num_batched_tokens=last.limits.max_num_batched_tokens or None,
    )


def machine(last: Snapshot, window: WindowStats) -> MachineReading:
    """Return the measured ceilings."""
    return MachineReading(
        device=last.machine.device,
        bandwidth=last.machine.bandwidth_bytes_per_s,
        flops=last.machine.flops_per_s,
        cores=window.cores,
    )


def weights(last: Snapshot) -> WeightReading:
    """Return the bytes of the model that a step reads."""
    return WeightReading(
        step_bytes=last.model.step_weight_bytes,
        choices=last.model.weight_choices,
        cache_resident=last.machine.cache_resident,
    )


def kv(last: Snapshot, window: WindowStats) -> KVReading:
    """Return the KV blocks of the group with the smallest pool, which fills first."""
    groups = [group for group in last.now.kv_groups if group.kind != "open"]
    group = min(groups, key=lambda g: g.blocks_total, default=None)
    return KVReading(
        usage_max=window.steps.kv_usage_max,
        num_preemptions=window.steps.num_preemptions,
        num_tokens=group.blocks_total * last.limits.block_size if group else None,
        bytes_per_token=last.model.kv_bytes_per_token,
        choices=last.model.kv_choices,
    )


def prefix(last: Snapshot, window: WindowStats) -> PrefixReading:
    """Return the tokens of a mean prompt that an earlier prompt began with, among the last prompts.

    24 of 32 prompts share 200 tokens: all but the first sent them again, 23 · 200 / 32 = 144.
    """
    if not last.prefixes:
        return PrefixReading(hit_rate=window.cache_hit_rate)
    grouped = sum(each.requests for each in last.prefixes)
    total = max(grouped, min(LAST_PROMPTS, last.totals.requests))
    best = max(last.prefixes, key=lambda each: each.requests * each.shared_tokens)
    again = sum((each.requests - 1) * each.shared_tokens for each in last.prefixes)
    return PrefixReading(
        hit_rate=window.cache_hit_rate,
        shared_tokens=again / total,
        shared_text=best.text.rstrip("."),
    )


def drafts(stats: DraftStats | None) -> DraftReading:
    """Return draft tokens, acceptance rates and the cost of speculation."""
    if stats is None:
        return DraftReading()
    known = stats.draft_share is not None and stats.verify_share is not None
    return DraftReading(
        sources=tuple(stats.by_source),
        acceptance=stats.acceptance,
        per_step=stats.drafts_per_step,
        tokens_per_step=stats.tokens_per_step,
        cost_share=(stats.draft_share or 0.0) + (stats.verify_share or 0.0) if known else None,
        speedup=stats.speedup,
        forced=stats.jump_forward_tokens,
        failure=stats.failure,
        acceptance_by_source={
            name: each.accepted_tokens / each.draft_tokens
            for name, each in stats.by_source.items()
            if each.draft_tokens
        },
    )


def host_share(steps: StepStats) -> float | None:
    """Return the share of busy time outside the model: gaps between steps, and all of a step but
    forward and sampling."""
    mean, worked = steps.mean, steps.busy_share + steps.gap_share
    if mean is None or worked <= 0 or mean.duration_s <= 0:
        return None
    inside_s = (mean.forward_s or mean.duration_s) + mean.sample_s
    return 1 - steps.busy_share * min(inside_s / mean.duration_s, 1.0) / worked


def prefill_tokens(steps: StepStats) -> float | None:
    """Return the mean prompt tokens of a step that has any."""
    if steps.mean is None or not steps.num_prefill_steps:
        return None
    return steps.mean.prefill_tokens * steps.count / steps.num_prefill_steps


def faults(first: Snapshot, last: Snapshot, window: WindowStats) -> FaultReading:
    """Return the errors that were counted between the first poll and the last."""
    before, after = first.totals, last.totals
    invalid = counter_growth(before.validation_failures, after.validation_failures)
    refused = counter_growth(before.admission_rejections, after.admission_rejections)
    return FaultReading(
        num_failed=window.num_failed,
        validation_failures=sum(invalid.values()),
        refused=sum(refused.values()),
        num_retries=max(after.client_retries - before.client_retries, 0),
        num_restarts=max(after.engine_restarts - before.engine_restarts, 0),
        errors=counter_growth(before.errors, after.errors),
    )


def counter_growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the counters that grew: {"a": 1, "b": 2} and then {"a": 4, "b": 2} give {"a": 3}."""
    growth = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in growth.items() if count > 0}


def spend(window: WindowStats, own: float | None, given: float | None) -> SpendReading:
    """Return dollars per million tokens at the price `given`, else at the server's `own`."""
    price = own if given is None else given
    if price is None:
        return SpendReading()
    if window.cost is None or not own:
        return split_price(window, price)
    scale = price / own
    return SpendReading(
        price_per_hour=price,
        usd_per_million_input=scaled(window.cost.usd_per_million_input, scale),
        usd_per_million_output=scaled(window.cost.usd_per_million_output, scale),
    )


def scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def split_price(window: WindowStats, price: float) -> SpendReading:
    """Return the same for a server without a price: the spend is split by the time of the steps."""
    decode_s = window.decode.time_s if window.decode else 0.0
    prefill_s = window.prefill.time_s if window.prefill else 0.0
    usd, total_s = price * window.covered_s / 3600, decode_s + prefill_s

    def per_million(seconds: float, tokens_per_s: float | None) -> float | None:
        if not total_s or not tokens_per_s:
            return None
        return usd * seconds / total_s / (tokens_per_s * window.covered_s) * 1e6

    return SpendReading(
        price_per_hour=price,
        usd_per_million_input=per_million(prefill_s, window.input_tokens_per_s),
        usd_per_million_output=per_million(decode_s, window.output_tokens_per_s),
    )


# ── readers that are too slow ───────────────────────────────────────────────────────────────────


def slow_streams(polls: Sequence[Snapshot]) -> tuple[SlowStream, ...]:
    """Return the decoding requests whose tokens are sent at less than half of the engine's pace.

    Between two polls every decoding sequence gains at least one token a step, and a request has one
    sequence or more. Where no sequence is running, a request that still decodes waits for its
    client.
    """
    by_request: dict[str, list[tuple[Snapshot, LiveRequest]]] = {}
    for poll in polls:
        for request in poll.now.requests:
            by_request.setdefault(request.id, []).append((poll, request))
    streams = [judged for pairs in by_request.values() if (judged := judge_stream(pairs))]
    return tuple(streams)


def judge_stream(pairs: list[tuple[Snapshot, LiveRequest]]) -> SlowStream | None:
    """Return the slow stream of one request, by the polls at which it was decoding; else None."""
    decoding = [(poll, r) for poll, r in pairs if r.state == "decode"]
    if len(decoding) < 2:
        return None
    (before, old), (after, new) = decoding[0], decoding[-1]
    sent = new.generated_tokens - old.generated_tokens
    seconds = after.now_s - before.now_s
    stalled = [poll for poll, _ in decoding if poll.now.num_running == 0]
    generated = last_step(after) - last_step(before)
    silent = len(stalled) >= 2 and stalled[-1].now_s - stalled[0].now_s >= MIN_SILENT_S
    slower = generated >= MIN_GENERATED_TOKENS and sent < SLOW_SHARE * generated
    if new.num_preemptions > old.num_preemptions or not (silent or slower):
        return None
    return SlowStream(id=new.id, age_s=new.age_s, seconds=seconds, generated=generated, sent=sent)


def last_step(poll: Snapshot) -> int:
    """Return the number of the newest step."""
    return poll.steps[-1].step if poll.steps else 0
