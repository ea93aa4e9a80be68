"""Of each rule: the upper bound of its fix, and the change that the simulator can try.

A share is a part of a mean request's time, or of the spend, that the symptom takes now. It is read
from observed times or, where a step reads too many bytes, from those bytes over the bandwidth. A
fix gives less than that; how much less is what a simulation (`advise.what_if`) finds.
"""

from headway.advise.reading import ServerReading, decode_step
from headway.advise.symptoms import (
    BFLOAT16,
    MAX_NUM_SEQS,
    MORE_ROWS,
    failing_share,
    narrower,
    queued,
    rounding,
)
from headway.config.alternatives import highest
from headway.perf.roofline import DecodeStep

TOKENS_PER_VERIFIED_STEP = 2.0
"""Tokens of a sequence in a step with draft tokens, of most texts."""
USUAL_ROOFLINE = 0.5
"""Share of the ceilings that kernels usually reach."""
TRIED_PROMPT_LENGTH = 0.5
"""Prompt length that is tried where prefill takes most of the time, as a share of the present one.
"""
MIN_KV_GROWTH = 1.5
"""Least factor of KV memory that is tried."""
CHUNK_DIVISOR, CHUNK_MULTIPLE = 4, 16
"""The smaller chunk that is tried: a quarter of the present one, in multiples of a block."""

# ── the most that a fix can give ────────────────────────────────────────────────────────────────


def everything(r: ServerReading) -> float:
    """Return 1: no figure of the window counts until this is mended."""
    return 1.0


def queue_share(r: ServerReading) -> float:
    return r.share_of_request(r.queue_s)


def load_share(r: ServerReading) -> float:
    """Return the queue's share; the whole TTFT's where the queue is not known."""
    return queue_share(r) or r.share_of_request(r.latency.ttft.mean)


def prefill_share(r: ServerReading) -> float:
    """Return the time that shorter prompts save of a request; of the steps where no request
    ended."""
    prefill = r.share_of_request(r.prefill_s) if r.prefill_s else r.steps.prefill_share
    return prefill * (1 - TRIED_PROMPT_LENGTH)


def shared_prefix_share(r: ServerReading) -> float:
    """Return the share of computing the part of the prompt that an earlier request has sent."""
    length, shared = r.lengths.prompt.mean or 1.0, r.prefix.shared_tokens or 0.0
    computing_s = r.prefill_s if r.prefill_s is not None else r.latency.ttft.mean
    return r.share_of_request((computing_s or 0.0) * min(shared / length, 1.0))


def long_prompt_share(r: ServerReading) -> float:
    """Return the share of their time that other requests wait for the longest prompt."""
    longest, short = r.lengths.longest_prompt or 1.0, r.lengths.short_prompt or 1.0
    waiting = max(r.steps.prefill_share, queue_share(r))
    itl = r.latency.itl
    if not waiting and itl.p99:
        waiting = 1 - (itl.p50 or 0.0) / itl.p99
    return waiting * (1 - short / longest)


def host_share(r: ServerReading) -> float:
    """Return the host's share of the spend that more rows in a step would not take."""
    roofline = r.steps.roofline if r.steps.roofline is not None else 1.0
    rows = max(r.steps.rows or 1.0, 1.0)
    most = max(min(rows * MORE_ROWS, r.limits.max_num_seqs or rows * MORE_ROWS), rows)
    if queued(r):
        most = rows  # a waiting request cannot run: the queue is another rule's
    return max(1 - roofline, r.steps.host_share or 0.0) * (1 - rows / most)


def slow_forward_share(r: ServerReading) -> float:
    """Return the share of the steps above the part of the ceilings that kernels usually reach."""
    return max(1 - (r.steps.roofline or 0.0) / USUAL_ROOFLINE, 0.0) * (1 - queue_share(r))


def known_step(r: ServerReading) -> DecodeStep:
    """Return the decode step of a reading whose symptom knows it."""
    step = decode_step(r)
    assert step is not None, "the symptom holds without a decode step"
    return step


def few_rows_share(r: ServerReading) -> float:
    """Return the share of the spend that a step with more rows would not take by the roofline."""
    step = known_step(r)
    return 1 - 1 / step.speedup(step.rows * MORE_ROWS)


def two_byte_share(r: ServerReading) -> float:
    step = known_step(r)
    weights = r.weights.choices[BFLOAT16] / step.weight_bytes
    return r.decode_share * step.saved_share(weights=weights)


def rounding_share(r: ServerReading) -> float:
    """Return the share of the bytes that the narrowest weights would not read."""
    step = known_step(r)
    weights = min(rounding(r).values()) / step.weight_bytes
    return r.decode_share * step.saved_share(weights=weights)


def kv_bytes_share(r: ServerReading) -> float:
    """Return the share of the bytes that the narrowest KV would not read."""
    now = r.kv.bytes_per_token or 1.0
    kv = min(narrower(r.kv.choices, now).values()) / now
    return r.decode_share * known_step(r).saved_share(kv=kv)


def draft_share(r: ServerReading) -> float:
    """Return the share of weights that are read once for the tokens of a verified step."""
    return r.decode_share * known_step(r).saved_share(weights=1 / TOKENS_PER_VERIFIED_STEP)


def vain_draft_share(r: ServerReading) -> float:
    """Return the share of decoding that draft tokens cost here, as observed."""
    return r.decode_share * max(1 - (r.drafts.speedup or 0.0), 0.0)


def contention_share(r: ServerReading) -> float:
    cores = r.machine.cores
    return min(cores.others_share + cores.steal_share, 1.0) if cores else 0.0


def slow_client_share(r: ServerReading) -> float:
    """Return the share of the slowest stream's age that its tokens waited for the client."""
    held_s = max(stream.seconds for stream in r.client.slow_streams)
    age_s = max(stream.age_s for stream in r.client.slow_streams)
    return min(held_s / max(age_s, 1e-9), 1.0)


def invalid_share(r: ServerReading) -> float:
    return failing_share(r, r.faults.validation_failures)


def refused_share(r: ServerReading) -> float:
    return failing_share(r, r.faults.refused)


def failed_share(r: ServerReading) -> float:
    return failing_share(r, r.faults.num_failed)


def retry_share(r: ServerReading) -> float:
    return r.faults.num_retries / max(r.load.num_ended + r.faults.num_retries, 1)


def idle_share(r: ServerReading) -> float:
    return r.steps.idle_share or 0.0


# ── the change that the simulator can try; "" where there is none ───────────────────────────────


def more_kv(r: ServerReading) -> str:
    """Return KV memory for the waiting sequences too."""
    rows, waiting = max(r.steps.rows or r.load.running or 1.0, 1.0), r.load.waiting or 0.0
    return f"kv_memory={max((rows + waiting) / rows, MIN_KV_GROWTH):.2f}x"


def more_rows(r: ServerReading) -> str:
    """Return enough rows for the waiting sequences too, up to the highest value of the option."""
    limit = r.limits.max_num_seqs or 1
    rows = min(limit + (r.load.waiting or 0.0), limit * MORE_ROWS, highest(MAX_NUM_SEQS))
    return f"max_num_seqs={round(rows)}"


def lower_rate(r: ServerReading) -> str:
    """Return the rate at which requests end now."""
    arriving, leaving = r.load.arrivals_per_s, r.load.finished_per_s
    if not arriving or not leaving or arriving <= leaving:
        return ""
    return f"rate={leaving / arriving:.2f}x"


def smaller_chunks(r: ServerReading) -> str:
    """Return a smaller token budget of a step, which holds one token of each row at least."""
    chunk = r.steps.prefill_tokens or r.limits.max_num_batched_tokens or 0.0
    least = round(chunk / CHUNK_DIVISOR / CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    least = max(least, r.limits.max_num_seqs or 1)
    return f"max_num_batched_tokens={least}" if chunk > least else ""


def shorter_prompts(r: ServerReading) -> str:
    return f"prompts={TRIED_PROMPT_LENGTH}x"


def stable_prefix(r: ServerReading) -> str:
    shared = round(r.prefix.shared_tokens or 0.0)
    return f"prefix={shared}" if shared else ""


def rounded_weights(r: ServerReading) -> str:
    return change_of(list(rounding(r))[-1])


def narrower_kv(r: ServerReading) -> str:
    return change_of(list(narrower(r.kv.choices, r.kv.bytes_per_token))[-1])


def change_of(option: str) -> str:
    """Return an option as a what-if: "--kv-cache-dtype int8" is "kv_cache_dtype=int8"."""
    return option.removeprefix("--").replace("-", "_").replace(" ", "=")
