"""Fixes that people often try and that would not help here.

A remark is made only where the figures exclude the fix; each names the figure.
"""

from collections.abc import Callable

from headway.advise import symptoms
from headway.advise.reading import ServerReading
from headway.advise.words import duration, percent

LARGE_SHARE, SMALL_SHARE = 0.6, 0.1
Remark = Callable[[ServerReading], str]


def queueing(r: ServerReading) -> str:
    share = r.share_of_ttft(r.queue_s)
    if share <= LARGE_SHARE or not symptoms.queued(r):
        return ""
    return f"TTFT is {percent(share)} queueing: quantization or faster kernels will not help it"


def no_queue(r: ServerReading) -> str:
    if (
        r.queue_s is None
        or r.share_of_ttft(r.queue_s) > SMALL_SHARE
        or (r.load.waiting or 0) > SMALL_SHARE
    ):
        return ""
    rows, limit = r.steps.rows, r.limits.max_num_seqs
    running = f", {rows:.1f} of {limit} rows run" if rows and limit else ""
    return f"the queue is {duration(r.queue_s)}{running}: a higher --max-num-seqs buys nothing"


def kv_empty(r: ServerReading) -> str:
    if r.kv.usage_max is None or r.kv.usage_max > 0.5 or symptoms.kv_full(r):
        return ""
    return f"KV blocks are at most {percent(r.kv.usage_max)} full: more KV memory buys nothing"


def decode_dominates(r: ServerReading) -> str:
    share = r.decode_share
    if share < 0.9:
        return ""
    return f"a request is {percent(share)} decode: shorter prompts or a prefix cache save little"


def prefill_dominates(r: ServerReading) -> str:
    share = r.share_of_request(r.prefill_s)
    if share < LARGE_SHARE or symptoms.queued(r):
        return ""
    return (
        f"a request is {percent(share)} prefill: speculative decoding and narrower weights, which "
        "speed up decode, save little"
    )


def idle(r: ServerReading) -> str:
    if not symptoms.under_loaded(r):
        return ""
    return f"idle {percent(r.steps.idle_share)}: more replicas or a larger machine buy nothing"


def reading(r: ServerReading) -> str:
    steps = r.steps.decode
    if steps is None or steps.mfu is None or not symptoms.reads_weights(r) or steps.mfu > 0.3:
        return ""
    return f"decode uses {percent(steps.mfu)} of the FLOP/s: a machine with more of them is wasted"


def host(r: ServerReading) -> str:
    if not symptoms.host_bound(r):
        return ""
    return "steps wait for the host: int8 weights or a faster accelerator save next to nothing"


def client(r: ServerReading) -> str:
    if not symptoms.slow_client(r):
        return ""
    return "the engine has done its part: no flag of the server makes a slow reader faster"


WASTE: tuple[Remark, ...] = (
    queueing,
    host,
    client,
    idle,
    decode_dominates,
    prefill_dominates,
    reading,
    kv_empty,
    no_queue,
)
