"""What a change gives by arithmetic on the doctor's reading: the figure beside the simulated one.

A mean request is its wait, its prefill and its decode steps. Each formula changes one of the three
and leaves the others as they are; None where arithmetic knows nothing, as of a policy.
"""

from collections.abc import Callable

from headway.advise.reading import Reading
from headway.advise.roofline import decode_step
from headway.advise.what_if.changes import Change

MOST = 0.999
"""A queue whose servers are busier than this grows as long as it is fed."""


def formula(change: Change, r: Reading) -> float | None:
    """The share of a mean request's time that `change` saves."""
    found = FORMULAS.get(change.name)
    return None if found is None else found(change, r)


def faster(change: Change, r: Reading) -> float | None:
    """A queue with one server, M/M/1: it grows as ρ / (1 − ρ); ρ is the busy share."""
    return None if change.times is None else busier(r, change.times)


def more_servers(change: Change, r: Reading) -> float | None:
    """Each gets its share of the arrivals."""
    count = change.times if change.times is not None else float(change.value)
    return busier(r, 1 / count)


def busier(r: Reading, times: float) -> float | None:
    """With so many times the arrivals: 30% busy and twice as much, 0.6 / 0.4 for 0.3 / 0.7."""
    if r.steps.idle_share is None or r.queue_s is None:
        return None
    now = 1 - r.steps.idle_share
    then = now * times
    if then >= MOST or now >= MOST:
        return None
    grows = (then / (1 - then)) / (now / (1 - now)) if now else 1.0
    return -r.share_of_request(r.queue_s) * (grows - 1)


def prompts(change: Change, r: Reading) -> float | None:
    """Prefill in proportion to the tokens."""
    if change.times is None or r.prefill_s is None:
        return None
    return r.share_of_request(r.prefill_s) * (1 - change.times)


def answers(change: Change, r: Reading) -> float | None:
    """Decode in proportion to the tokens."""
    return None if change.times is None else r.decode_share * (1 - change.times)


def prefix(change: Change, r: Reading) -> float | None:
    """What all begin with is not computed."""
    length = r.lengths.prompt.mean
    if change.value is None or not length or r.prefill_s is None:
        return None
    return r.share_of_request(r.prefill_s) * min(float(change.value) / length, 1.0)


def rows(change: Change, r: Reading) -> float | None:
    """The queue goes, and a decode step grows as the roofline says."""
    if not (r.load.waiting or 0.0) >= 1 or not r.limits.max_num_seqs:
        return None
    count = float(change.value or (change.times or 1.0) * r.limits.max_num_seqs)
    step, slower = decode_step(r), 0.0
    if step is not None and count > step.rows:
        slower = step.with_(rows=count) / step.seconds - 1
    gone = min((count - r.limits.max_num_seqs) / (r.load.waiting or 1.0), 1.0)
    return r.share_of_request(r.queue_s) * gone - r.decode_share * slower


def weights(change: Change, r: Reading) -> float | None:
    """A decode step reads other weights."""
    step = decode_step(r)
    size = r.weights.choices.get(f"--quantization {change.value}")
    if step is None or size is None:
        return None
    return r.decode_share * (1 - step.with_(weights=size / step.weight_bytes) / step.seconds)


def kv(change: Change, r: Reading) -> float | None:
    """A decode step reads other KV."""
    step = decode_step(r)
    size = r.kv.choices.get(f"--kv-cache-dtype {change.value}")
    if step is None or size is None or not r.kv.bytes_per_token:
        return None
    return r.decode_share * (1 - step.with_(kv=size / r.kv.bytes_per_token) / step.seconds)


FORMULAS: dict[str, Callable[[Change, Reading], float | None]] = {
    "rate": faster,
    "replicas": more_servers,
    "prompts": prompts,
    "answers": answers,
    "prefix": prefix,
    "max_num_seqs": rows,
    "quantization": weights,
    "kv_cache_dtype": kv,
}
"""Name of a change → its formula."""
