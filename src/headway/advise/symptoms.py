"""Predicates over a reading, one for each symptom, and the figures that show it.

A predicate is true only where the reading has the figures it needs. Thresholds are in one table.
"""

from headway.advise.reading import ServerReading, decode_step
from headway.advise.words import duration, percent, plural, tokens
from headway.config.alternatives import highest
from headway.config.memory_plan import gib

THRESHOLDS = {
    "waiting": 0.5,  # sequences that wait in a mean step: more is a queue
    "queue_share": 0.3,  # of the time to the first token
    "in_slo": 0.95,  # of requests: as many or more keep their objectives
    "full": 0.9,  # of KV blocks or rows: more is full
    "preempted": 0.05,  # preemptions a request
    "uneven": 8.0,  # longest prompt over a short one
    "stall": 3.0,  # a step with prefill over one without
    "prefill_share": 0.25,  # of the time of a request, or of that in steps
    "slow_ttft_s": 0.1,
    "host_share": 0.4,  # of the time with work
    "roofline": 0.2,  # of what the ceilings allow: less is far from them
    "launching_s": 0.03,  # longest step that launching alone may explain
    "few_rows": 0.25,  # of max_num_seqs
    "min_rows_speedup": 1.5,  # times the tokens per second, at eight times the rows
    "bad_share": 0.05,  # of requests: failures, retries
    "shared": 0.3,  # of a prompt
    "speedup": 1.02,  # of drafts: less is nothing
    "min_decode_steps": 50,  # without prefill: fewer say little of drafts
}
MORE_ROWS = 8
BFLOAT16 = "--dtype bfloat16"
MAX_NUM_SEQS = "--max-num-seqs"
T = THRESHOLDS


def queued(r: ServerReading) -> bool:
    """Return whether sequences wait, and waiting is a good part of the time to the first token."""
    if r.load.waiting is None:
        return bool(r.load.over_saturated)
    return r.load.waiting > T["waiting"] and r.share_of_ttft(r.queue_s) > T["queue_share"]


def kv_full(r: ServerReading) -> bool:
    """Return whether the queue waits for KV blocks: they are used up, or too few for one more
    prompt."""
    if r.kv.usage_max is None:
        return False
    preempted = (r.kv.num_preemptions or 0) > max(T["preempted"] * r.load.num_ended, 1)
    one_more = (r.lengths.prompt.p50 or 0.0) / r.kv.num_tokens if r.kv.num_tokens else 0.0
    full = r.kv.usage_max + min(one_more, 0.5) >= T["full"]
    return full and (preempted or (queued(r) and not all_rows_busy(r)))


def all_rows_busy(r: ServerReading) -> bool:
    """Return whether every row of a step is in use."""
    if r.steps.rows is None or not r.limits.max_num_seqs:
        return False
    return r.steps.rows >= T["full"] * r.limits.max_num_seqs


def hogging(r: ServerReading) -> bool:
    """Return whether one prompt is far longer than the others, and its chunks delay all other
    requests."""
    longest, short = r.lengths.longest_prompt, r.lengths.short_prompt
    if not longest or not short or longest < T["uneven"] * short:
        return False
    if r.steps.prefill is None:
        p50, p99 = r.latency.itl.p50 or 0.0, r.latency.itl.p99 or 0.0
        return p50 > 0 and p99 > T["stall"] * p50
    plain_s, mixed_s = r.steps.decode_step_s or 0.0, r.steps.prefill_step_s or 0.0
    return r.steps.prefill_share > T["prefill_share"] and mixed_s > T["stall"] * plain_s


def more_rows_pay(r: ServerReading) -> bool:
    """Return whether, by the roofline, more rows give more tokens, enough for the arrival rate."""
    step = decode_step(r)
    if step is None:
        return False
    gain = step.speedup(step.rows * 2)
    arriving, leaving = r.load.arrivals_per_s or 0.0, r.load.finished_per_s or 0.0
    return gain > 1.2 and arriving <= leaving * step.speedup(step.rows * MORE_ROWS)


def rows_full(r: ServerReading) -> bool:
    """Return whether the queue waits for rows, the option allows more of them, and more would
    pay."""
    more = (r.limits.max_num_seqs or 0) < highest(MAX_NUM_SEQS)
    return queued(r) and all_rows_busy(r) and more and more_rows_pay(r) and not kv_full(r)


def over_saturated(r: ServerReading) -> bool:
    """Return whether more requests arrive than this machine can serve, and objectives are
    missed."""
    return plain_queue(r) and not within_objectives(r)


def queueing(r: ServerReading) -> bool:
    """Return whether requests wait, but briefly enough to meet their objectives."""
    return plain_queue(r) and within_objectives(r)


def plain_queue(r: ServerReading) -> bool:
    """Return whether there is a queue without a cause that a setting would remove."""
    return queued(r) and not kv_full(r) and not hogging(r) and not rows_full(r)


def within_objectives(r: ServerReading) -> bool:
    """Return whether requests meet their objectives, and the queue does not grow until they
    cannot."""
    growing = (r.load.waiting_growth or 0.0) > max(1.0, 0.5 * (r.load.waiting or 0.0))
    met = r.load.in_slo is not None and r.load.in_slo >= T["in_slo"]
    return met and not growing and not r.load.over_saturated


def long_prefill(r: ServerReading) -> bool:
    """Return whether the first token waits for the prompt's computation."""
    if hogging(r) or host_bound(r):
        return False
    if not r.latency.ttft.count:
        return r.steps.loaded and r.steps.prefill_share > 0.5
    return (
        (r.latency.ttft.mean or 0.0) > T["slow_ttft_s"]
        and r.share_of_ttft(r.prefill_s) > 0.5
        and r.share_of_request(r.prefill_s) > T["prefill_share"]
    )


def host_bound(r: ServerReading) -> bool:
    """Return whether gaps and book-keeping take a good part, or short steps are mostly launches."""
    if not r.steps.loaded:
        return False
    launching = far_from_roofline(r) and (r.steps.main_step_s or 0.0) < T["launching_s"]
    return (r.steps.host_share or 0.0) > T["host_share"] or launching


def slow_forward(r: ServerReading) -> bool:
    """Return whether the model takes many times what the ceilings allow, in long steps, and no
    other process on its cores is known."""
    return r.steps.loaded and far_from_roofline(r) and not host_bound(r) and not r.contended


def contended(r: ServerReading) -> bool:
    """Return whether other processes or virtual machines use the cores."""
    return r.contended


def far_from_roofline(r: ServerReading) -> bool:
    return r.steps.roofline is not None and r.steps.roofline < T["roofline"]


def decoding(r: ServerReading) -> bool:
    """Return whether the engine is busy with decode steps that the roofline explains."""
    return r.steps.loaded and r.steps.prefill_share < 0.5 and not host_bound(r)


def small_batch(r: ServerReading) -> bool:
    """Return whether weights are read for a few rows, though many more would fit into the same
    step."""
    step = decode_step(r)
    if step is None or not decoding(r) or queued(r) or not r.limits.max_num_seqs:
        return False
    few = step.rows <= max(T["few_rows"] * r.limits.max_num_seqs, 1.0)
    return few and step.speedup(step.rows * MORE_ROWS) > T["min_rows_speedup"]


def reads_weights(r: ServerReading) -> bool:
    """Return whether most bytes of a decode step are weights."""
    step = decode_step(r)
    if step is None or not decoding(r):
        return False
    return step.weight_bytes > 0.5 * step.num_bytes and r.decode_share > 0.3


def reads_kv(r: ServerReading) -> bool:
    """Return whether most bytes of a decode step are KV."""
    step = decode_step(r)
    if step is None or not decoding(r):
        return False
    return step.weight_bytes <= 0.5 * step.num_bytes and r.decode_share > 0.3


def wide_weights(r: ServerReading) -> bool:
    """Return whether weights of four bytes are read where two would do."""
    return reads_weights(r) and BFLOAT16 in narrower(r.weights.choices, r.weights.step_bytes)


def narrowable_weights(r: ServerReading) -> bool:
    """Return whether weights could take fewer bytes, by an option that this server has and does not
    use."""
    return reads_weights(r) and bool(rounding(r))


def rounding(r: ServerReading) -> dict[str, int]:
    """Return the options of `weight_choices` that quantize weights to fewer bytes than now."""
    options = narrower(r.weights.choices, r.weights.step_bytes)
    return {option: size for option, size in options.items() if option != BFLOAT16}


def narrowable_kv(r: ServerReading) -> bool:
    """Return whether KV could take fewer bytes, by an option that this server has and does not
    use."""
    return reads_kv(r) and bool(narrower(r.kv.choices, r.kv.bytes_per_token))


def narrower(choices: dict[str, int], now: float | None) -> dict[str, int]:
    """Return the options that take at least 5% less than `now`, the narrowest last."""
    candidates = [(size, option) for option, size in choices.items() if now and size < 0.95 * now]
    return {option: size for size, option in sorted(candidates, reverse=True)}


def drafts_pay(r: ServerReading) -> bool:
    """Return whether few rows leave arithmetic unused that could verify draft tokens, and
    speculation is off."""
    step = decode_step(r)
    return step is not None and reads_weights(r) and step.rows <= 4 and not r.drafts.sources


def drafts_in_vain(r: ServerReading) -> bool:
    """Return whether speculation is on and tokens come no faster."""
    steps, speedup = r.steps.decode, r.drafts.speedup
    has_enough_steps = steps is not None and steps.num_steps >= T["min_decode_steps"]
    return has_enough_steps and speedup is not None and speedup < T["speedup"]


def cold_cache(r: ServerReading) -> bool:
    """Return whether prompts begin alike, and yet every token of them is computed."""
    length, shared = r.lengths.prompt.mean, r.prefix.shared_tokens
    if not length or not shared or shared < T["shared"] * length:
        return False
    return (r.prefix.hit_rate or 0.0) < 0.5 * shared / length


def slow_client(r: ServerReading) -> bool:
    """Return whether generated tokens are not sent, since a client does not read them."""
    return bool(r.client.slow_streams)


def client_bound(r: ServerReading) -> bool:
    """Return whether the load generator set the pace."""
    return bool(r.client.bottleneck)


def invalid(r: ServerReading) -> bool:
    """Return whether many bodies or answers do not validate."""
    count = r.faults.validation_failures
    return count >= 3 and failing_share(r, count) > T["bad_share"]


def turned_away(r: ServerReading) -> bool:
    """Return whether requests are refused for load or state."""
    count = r.faults.refused
    return count >= 1 and failing_share(r, count) > T["bad_share"]


def failing(r: ServerReading) -> bool:
    """Return whether requests end with an error."""
    count = r.faults.num_failed
    return count > r.faults.refused and failing_share(r, count) > T["bad_share"]


def retried(r: ServerReading) -> bool:
    """Return whether clients send requests again that are still in progress."""
    count = r.faults.num_retries
    return count >= 3 and count > T["bad_share"] * max(r.load.num_ended, 1)


def restarted(r: ServerReading) -> bool:
    """Return whether the engine ended and was started again."""
    return r.faults.num_restarts > 0


def under_loaded(r: ServerReading) -> bool:
    """Return whether the engine is idle for the larger part of the time."""
    return not r.steps.loaded and not queued(r) and not slow_client(r)


def failing_share(r: ServerReading, count: int) -> float:
    """Return `count` as a share of all requests that ended or were refused."""
    return count / max(r.load.num_ended, r.load.num_ended - r.faults.num_failed + count, 1)


# ── the figures that show them ──────────────────────────────────────────────────────────────────


def see_queue(r: ServerReading) -> list[str]:
    lines, load = [], r.load
    if load.waiting is not None:
        lines.append(f"{plural(load.waiting, 'sequence')} waiting, {load.running or 0:.1f} running")
    if r.queue_s is not None:
        share = percent(r.share_of_ttft(r.queue_s))
        lines.append(f"{duration(r.queue_s)} in the queue, {share} of the time to the first token")
    if load.arrivals_per_s is not None and load.finished_per_s is not None:
        lines.append(f"{load.arrivals_per_s:.1f} requests/s arrive, {load.finished_per_s:.1f} end")
    if load.waiting_growth is not None and load.waiting_growth > 1:
        lines.append(f"the queue grew by {load.waiting_growth:.0f} in {r.seconds:.0f} s")
    if load.in_slo is not None:
        lines.append(f"{percent(load.in_slo)} of the requests met their objectives")
    if load.over_saturated:
        lines.append("concurrency and TTFT kept growing during the run")
    return lines


def see_kv(r: ServerReading) -> list[str]:
    lines = [f"KV blocks {percent(r.kv.usage_max)} full"]
    if r.kv.num_tokens:
        lines[0] += f" of {tokens(r.kv.num_tokens)} tokens"
    if r.kv.num_preemptions:
        lines.append(f"{plural(r.kv.num_preemptions, 'sequence')} preempted")
    if r.steps.rows is not None and r.limits.max_num_seqs:
        lines.append(f"{r.steps.rows:.1f} of {r.limits.max_num_seqs} rows in use")
    return lines + see_narrower_kv(r) + see_queue(r)


def see_rows(r: ServerReading) -> list[str]:
    return [f"{r.steps.rows or 0:.1f} of {r.limits.max_num_seqs} rows in use", *see_queue(r)]


def see_hog(r: ServerReading) -> list[str]:
    longest, short = tokens(r.lengths.longest_prompt), tokens(r.lengths.short_prompt)
    lines = [f"longest prompt {longest} tokens, others {short}"]
    if r.steps.prefill_step_s is not None:
        lines.append(
            f"a step with prefill takes {duration(r.steps.prefill_step_s)}, "
            f"one without {duration(r.steps.decode_step_s)}"
        )
        lines.append(f"{percent(r.steps.prefill_share)} of the time in steps is prefill")
    itl = r.latency.itl
    if itl.p99 is not None:
        lines.append(f"gap between tokens p50 {duration(itl.p50)}, p99 {duration(itl.p99)}")
    return lines


def see_prefill(r: ServerReading) -> list[str]:
    lines = [
        f"prefill {duration(r.prefill_s)}, {percent(r.share_of_ttft(r.prefill_s))} of the time to "
        f"the first token and {percent(r.share_of_request(r.prefill_s))} of a request",
        f"prompts of {tokens(r.lengths.prompt.mean)} tokens",
    ]
    if r.steps.prefill is not None and r.steps.prefill.mfu is not None:
        lines.append(f"MFU {percent(r.steps.prefill.mfu)} in steps with prefill")
    return lines


def see_contention(r: ServerReading) -> list[str]:
    evidence = r.verdict.evidence if r.verdict else []
    return [each.text for each in evidence]


def see_host(r: ServerReading) -> list[str]:
    lines = []
    if r.steps.roofline:
        lines.append(f"steps take {1 / r.steps.roofline:.0f} times what the ceilings allow")
    if r.steps.host_share is not None:
        lines.append(f"{percent(r.steps.host_share)} of the time with work is not the model")
    seconds = r.steps.main_step_s
    if seconds is not None:
        lines.append(f"a step takes {duration(seconds)} at {r.steps.rows or 0:.1f} rows")
    return lines


def see_decode(r: ServerReading) -> list[str]:
    step = decode_step(r)
    if step is None:
        return []
    lines = [
        f"a decode step takes {duration(step.seconds)} at {step.rows:.1f} rows; its floor is "
        f"{duration(step.floor_s())}",
        f"{percent(step.weight_bytes / step.num_bytes)} of the bytes it reads are weights",
    ]
    if r.steps.decode is not None and r.steps.decode.mbu is not None:
        lines.append(f"MBU {percent(r.steps.decode.mbu)}")
    return lines


def see_drafts(r: ServerReading) -> list[str]:
    """Return the measured results of draft and forced tokens; empty where speculation is off or no
    token was decoded."""
    d = r.drafts
    lines = [f"the drafter failed: {d.failure}"] if d.failure else []
    if d.tokens_per_step is None:
        return lines
    if d.forced:
        lines.append(f"grammars forced {d.forced} tokens, neither drafted nor sampled")
    if not d.acceptance:
        reason = "no draft token was accepted" if d.per_step else "no draft token pays its cost"
        lines.append(f"{', '.join(d.sources)}: {reason}")
    else:
        by_source = ", ".join(
            f"{name} {percent(share)}" for name, share in d.acceptance_by_source.items()
        )
        lines.append(
            f"{percent(d.acceptance)} of {d.per_step or 0:.2g} draft tokens a step accepted "
            f"({by_source}): {d.tokens_per_step:.2f} tokens a step"
        )
    if d.cost_share is not None and d.speedup is not None:
        lines.append(
            f"drafting and verifying take {percent(d.cost_share)} of the time in steps: "
            f"{d.speedup:.2f} times the tokens/s of steps without"
        )
    return lines


def see_weights(r: ServerReading) -> list[str]:
    """Return the decode step's figures, and the weights of each option that would narrow them."""
    now = r.weights.step_bytes or 0.0
    options = narrower(r.weights.choices, now)
    return see_decode(r) + [
        f"{option}: a step reads {gib(size)} of weights in place of {gib(now)}"
        for option, size in options.items()
    ]


def see_narrower_kv(r: ServerReading) -> list[str]:
    """Return how many times the tokens each option with narrower KV holds."""
    now = r.kv.bytes_per_token or 0.0
    options = narrower(r.kv.choices, now)
    return [f"{option}: {now / size:.1f} times the tokens" for option, size in options.items()]


def see_kv_bytes(r: ServerReading) -> list[str]:
    return see_decode(r) + see_narrower_kv(r)


def see_cache(r: ServerReading) -> list[str]:
    lines = [r.prefix.shared_text] if r.prefix.shared_text else []
    share = percent((r.prefix.shared_tokens or 0.0) / (r.lengths.prompt.mean or 1.0))
    lines.append(f"{tokens(r.prefix.shared_tokens)} tokens of a prompt ({share}) were sent before")
    return [*lines, f"{percent(r.prefix.hit_rate or 0.0)} of prompt tokens came from the cache"]


def see_slow(r: ServerReading) -> list[str]:
    worst = max(r.client.slow_streams, key=lambda s: s.seconds)
    lines = [f"{plural(len(r.client.slow_streams), 'request')} read too slowly"]
    generated = f"{worst.generated} generated" if worst.generated else "none left to generate"
    seconds = duration(worst.seconds)
    lines.append(f"request {worst.id[:20]}: {worst.sent} tokens sent in {seconds}, {generated}")
    if r.load.running is not None:
        lines.append(f"{plural(r.load.running, 'sequence')} running in the engine")
    return lines


def see_client(r: ServerReading) -> list[str]:
    return [r.client.bottleneck]


def see_faults(r: ServerReading) -> list[str]:
    faults = r.faults
    counts = sorted(faults.errors.items(), key=lambda item: -item[1])[:4]
    named = ", ".join(f"{code} {count}" for code, count in counts)
    lines = [f"{plural(r.load.num_ended, 'request')} ended"]
    for count, what in (
        (faults.validation_failures, "did not validate"),
        (faults.refused, "refused for load or state"),
        (faults.num_failed, "failed"),
        (faults.num_retries, "sent again by clients"),
        (faults.num_restarts, "restarts of the engine"),
    ):
        if count:
            lines.append(f"{count} {what}")
    return lines + ([named] if named else [])


def see_idle(r: ServerReading) -> list[str]:
    lines = [f"idle {percent(r.steps.idle_share)} of {r.seconds:.0f} s"]
    if r.load.arrivals_per_s is not None:
        lines.append(f"{r.load.arrivals_per_s:.2g} requests/s arrive, none waits")
    if price := r.spend.price_per_hour:
        lines.append(f"${price * (r.steps.idle_share or 0.0):.2f} of ${price:.2f} an hour is idle")
    return lines
