"""A reading from a live Headway: the snapshots of `/stats` over a window.

The last snapshot has the figures of the window; the ones before it show what moved: tokens that did
not leave, a queue that grew, faults that were counted.
"""

from collections.abc import Sequence
from typing import Any

from headway.advise.reading import Reading, SlowStream
from headway.telemetry.snapshot import LiveRequest, Percentiles, Snapshot, StepStats, Window

SLOW_SHARE = 0.5
MIN_MADE = 8
MIN_SILENT_S = 1.0
MIN_SEEN = 3
LAST_PROMPTS = 32


def reading_from_stats(
    subject: str,
    polls: Sequence[Snapshot],
    *,
    seconds: float,
    transfer_s: float | None = None,
    price_per_hour: float | None = None,
) -> Reading:
    """What the polls say, the oldest first; the window of the last that is nearest `seconds`."""
    first, last = polls[0], polls[-1]
    window = min(last.windows, key=lambda w: abs(w.seconds - seconds))
    steps, mean = window.steps, window.steps.mean
    price = price_per_hour if price_per_hour is not None else last.price_per_hour
    group = min(last.now.kv_groups, key=lambda g: g.blocks_total, default=None)
    return Reading(
        source="stats",
        subject=subject,
        server=describe(last),
        seconds=window.covered_s,
        not_known=not_known(last, window, transfer_s),
        num_ended=window.latency["e2e"].count,
        num_failed=window.num_failed,
        arrivals_per_s=window.arrivals_per_s,
        finished_per_s=window.finished_per_s,
        running=mean.running if mean else 0.0,
        waiting=mean.waiting if mean else 0.0,
        waiting_growth=last.now.num_waiting - first.now.num_waiting,
        waiting_ages_s=tuple(r.age_s for r in last.now.requests if r.state == "waiting"),
        slow_streams=slow_streams(polls),
        **latencies(window),
        transfer_s=transfer_s,
        **prompt_lengths(polls, window),
        idle_share=steps.idle_share,
        host_share=host_share(steps),
        decode_steps=window.decode,
        prefill_steps=window.prefill,
        cores=window.cores,
        rows=mean.running if mean else None,
        prefill_tokens_per_step=prefill_tokens(steps),
        verdict=window.verdict,
        kv_usage_max=steps.kv_usage_max,
        num_preemptions=steps.num_preemptions,
        kv_tokens=group.blocks_total * last.limits.block_size if group else None,
        cache_hit_rate=window.cache_hit_rate,
        **shared(last),
        max_num_seqs=last.limits.max_num_seqs or None,
        max_num_batched_tokens=last.limits.max_num_batched_tokens or None,
        bandwidth=last.machine.bandwidth_bytes_per_s,
        flops=last.machine.flops_per_s,
        cache_resident=last.machine.cache_resident,
        dtype=last.model.dtype,
        step_weight_bytes=last.model.step_weight_bytes,
        weight_choices=last.model.weight_choices,
        kv_choices=last.model.kv_choices,
        kv_bytes_per_token=last.model.kv_bytes_per_token,
        flops_per_token=last.model.flops_per_token,
        **faults(first, last),
        price_per_hour=price,
        **prices(window, last.price_per_hour, price),
    )


def describe(snapshot: Snapshot) -> str:
    """Headway 0.2.0, qwen (LlamaForCausalLM, bfloat16) on AMD EPYC."""
    model, machine = snapshot.model, snapshot.machine
    where = machine.name or machine.device
    return (
        f"Headway {snapshot.version}, {model.names[0]} ({model.architecture}, {model.dtype}) on "
        f"{where}"
    )


def not_known(last: Snapshot, window: Window, transfer_s: float | None) -> tuple[str, ...]:
    """What this window cannot say."""
    found = []
    if not window.latency["e2e"].count:
        found.append("latencies of whole requests: none ended (try a longer --seconds)")
    if last.machine.bandwidth_bytes_per_s is None:
        found.append("the machine's ceilings were not measured: no floors, no MFU, no MBU")
    if transfer_s is None:
        found.append("how long the way to the client takes")
    return tuple(found)


def latencies(window: Window) -> dict[str, Any]:
    """The window's percentiles under the reading's names."""
    found: dict[str, Any] = {
        name: window.latency.get(name, Percentiles())
        for name in ("ttft", "tpot", "itl", "e2e", "queue", "prefill")
    }
    return found | {name: window.lengths.get(name, Percentiles()) for name in ("prompt", "output")}


def prompt_lengths(polls: Sequence[Snapshot], window: Window) -> dict[str, Any]:
    """What a quarter of the prompts stays below, and the longest.

    Of the requests under way at the polls where they are several: [16, 16, 2500, 2500] → 16 and
    2500, though none of the short ones may have ended.
    """
    seen = {r.id: float(r.prompt_tokens) for poll in polls for r in poll.now.requests}
    lengths, ended = sorted(seen.values()), window.lengths["prompt"]
    short = lengths[len(lengths) // 4] if len(lengths) >= MIN_SEEN else ended.p50
    return {
        "short_prompt": short,
        "longest_prompt": max([*lengths, ended.p99 or 0.0], default=0.0) or None,
    }


def shared(last: Snapshot) -> dict[str, Any]:
    """Tokens of a mean prompt that others began with, among the last prompts.

    24 of 32 prompts share 200 tokens: all but the first of them sent them again, 23 · 200 / 32.
    """
    if not last.prefixes:
        return {}
    grouped = sum(each.requests for each in last.prefixes)
    total = max(grouped, min(LAST_PROMPTS, last.totals.requests))
    best = max(last.prefixes, key=lambda each: each.requests * each.shared_tokens)
    again = sum((each.requests - 1) * each.shared_tokens for each in last.prefixes)
    return {"shared_tokens": again / total, "shared_said": best.text.rstrip(".")}


def host_share(steps: StepStats) -> float | None:
    """Of the time with work: gaps between steps, and all in a step but forward and sampling."""
    mean, worked = steps.mean, steps.busy_share + steps.gap_share
    if mean is None or worked <= 0 or mean.duration_s <= 0:
        return None
    inside_s = (mean.forward_s or mean.duration_s) + mean.sample_s
    return 1 - steps.busy_share * min(inside_s / mean.duration_s, 1.0) / worked


def prefill_tokens(steps: StepStats) -> float | None:
    """Prompt tokens in a step that has any."""
    if steps.mean is None or not steps.num_prefill_steps:
        return None
    return steps.mean.prefill_tokens * steps.count / steps.num_prefill_steps


def faults(first: Snapshot, last: Snapshot) -> dict[str, Any]:
    """What was counted between the first poll and the last."""
    before, after = first.totals, last.totals

    def more(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
        found = {name: count - old.get(name, 0) for name, count in new.items()}
        return {name: count for name, count in found.items() if count > 0}

    return {
        "validation_failures": sum(
            more(before.validation_failures, after.validation_failures).values()
        ),
        "refused": sum(more(before.admission_rejections, after.admission_rejections).values()),
        "errors": more(before.errors, after.errors),
        "num_retries": max(after.client_retries - before.client_retries, 0),
        "num_restarts": max(after.engine_restarts - before.engine_restarts, 0),
    }


def prices(window: Window, own: float | None, price: float | None) -> dict[str, Any]:
    """Dollars per million tokens at `price`: the server's own, scaled, where it has one."""
    if price is None:
        return {}
    if window.cost is not None and own:
        scale = price / own
        return {
            "usd_per_million_input": scaled(window.cost.usd_per_million_input, scale),
            "usd_per_million_output": scaled(window.cost.usd_per_million_output, scale),
        }
    return split_price(window, price)


def scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def split_price(window: Window, price: float) -> dict[str, Any]:
    """The same split for a server that was given no price: by the time of its steps."""
    decode_s = window.decode.time_s if window.decode else 0.0
    prefill_s = window.prefill.time_s if window.prefill else 0.0
    usd = price * window.covered_s / 3600
    total_s = decode_s + prefill_s
    found: dict[str, Any] = {}
    for name, seconds, rate in (
        ("usd_per_million_input", prefill_s, window.input_tokens_per_s),
        ("usd_per_million_output", decode_s, window.output_tokens_per_s),
    ):
        if total_s and rate:
            found[name] = usd * seconds / total_s / (rate * window.covered_s) * 1e6
    return found


# ── readers that are too slow ───────────────────────────────────────────────────────────────────


def slow_streams(polls: Sequence[Snapshot]) -> tuple[SlowStream, ...]:
    """Requests that decode and whose tokens leave at less than half of the engine's pace.

    Between two polls every decoding sequence gains a token a step, and a request has at least one
    such sequence. Where nothing runs at all, what still decodes waits for its reader.
    """
    seen: dict[str, list[tuple[Snapshot, LiveRequest]]] = {}
    for poll in polls:
        for request in poll.now.requests:
            seen.setdefault(request.id, []).append((poll, request))
    found = [judged for pairs in seen.values() if (judged := judge_stream(pairs))]
    return tuple(found)


def judge_stream(pairs: list[tuple[Snapshot, LiveRequest]]) -> SlowStream | None:
    """One request at the polls that saw it decode."""
    decoding = [(poll, r) for poll, r in pairs if r.state == "decode"]
    if len(decoding) < 2:
        return None
    (before, old), (after, new) = decoding[0], decoding[-1]
    left = new.generated_tokens - old.generated_tokens
    seconds = after.now_s - before.now_s
    stalled = [poll for poll, _ in decoding if poll.now.num_running == 0]
    made = last_step(after) - last_step(before)
    silent = len(stalled) >= 2 and stalled[-1].now_s - stalled[0].now_s >= MIN_SILENT_S
    slower = made >= MIN_MADE and left < SLOW_SHARE * made
    if new.num_preemptions > old.num_preemptions or not (silent or slower):
        return None
    return SlowStream(id=new.id, age_s=new.age_s, seconds=seconds, made=made, left=left)


def last_step(poll: Snapshot) -> int:
    """The number of the newest step."""
    return poll.steps[-1].step if poll.steps else 0
