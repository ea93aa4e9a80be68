"""Formulas of the reported figures, shared by server, load generator, doctor and tests.

Pure functions of plain numbers: seconds, bytes, tokens, FLOPs, dollars. The terms are defined in
docs/telemetry.md; None means "not defined" (a rate over no time, the TPOT of one token).
"""

from collections.abc import Sequence

import numpy as np

from headway.perf.roofline import ratio
from headway.telemetry.snapshot import Percentiles

HOUR_S = 3600.0
MILLION = 1e6


def tpot_s(ttft_s: float, e2e_s: float, num_tokens: int) -> float | None:
    """Return the time per output token after the first: (e2e − TTFT) / (n − 1).

    >>> tpot_s(2.0, 5.0, 4)
    1.0
    """
    return (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None


def kv_bytes(tokens: int, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of K and V: 2 · tokens · layers · kv_heads · head_dim · bytes.

    Llama-2-13B, batch 32 of 2048 tokens in FP16: 2 · 65,536 · 40 · 40 · 128 · 2 = 53.7 GB.
    """
    return 2 * tokens * layers * kv_heads * head_dim * dtype_bytes


def usd_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Return the price of a million tokens: $2 an hour at 100 tokens/s is $5.56."""
    return ratio(price_per_hour * MILLION, tokens_per_s * HOUR_S)


def split_spend(
    usd: float, decode_s: float, mixed_s: float, mixed_prefill: int, mixed_decode: int
) -> tuple[float, float]:
    """Return (input share, output share) of `usd`, split by the time that each took.

    Steps without prefill count as output; the time of a mixed step is divided by tokens. Example:
    1 s of decode steps and 1 s of steps with 300 prompt and 100 output tokens: input gets 0.75 of
    2 s.
    """
    tokens = mixed_prefill + mixed_decode
    input_s = mixed_s * mixed_prefill / tokens if tokens else 0.0
    share = ratio(input_s, decode_s + mixed_s) or 0.0
    return usd * share, usd * (1 - share)


def goodput_per_s(num_met: int, seconds: float) -> float:
    """Return the requests per second that met all their objectives; 0 over no time."""
    return num_met / seconds if seconds > 0 else 0.0


def error_budget(
    num_met: int, num_judged: int, target: float
) -> tuple[float | None, float | None, float | None]:
    """Return (attainment, remaining budget, burn rate) for the target share of met requests.

    95 of 100 met with a target of 0.9: attainment 0.95, half of the ten allowed misses remains,
    and the burn rate is 0.5 (1 spends the budget exactly). All None where no request was judged.
    """
    if not num_judged:
        return None, None, None
    missed = (num_judged - num_met) / num_judged
    if target >= 1:
        return 1 - missed, 1.0 if missed == 0 else 0.0, None
    burn = missed / (1 - target)
    return 1 - missed, 1 - burn, burn


def percentiles(values: Sequence[float] | np.ndarray) -> Percentiles:
    """Return mean and percentiles of `values`, with linear interpolation."""
    if len(values) == 0:
        return Percentiles()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
    mean = float(array.mean())
    return Percentiles(count=len(array), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99)


def p99(values: np.ndarray) -> float | None:
    """Return the 99th percentile as in `percentiles`, ten times faster; None without values."""
    if len(values) == 0:
        return None
    ranked = np.sort(values)
    place = 0.99 * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return float(ranked[below] + (ranked[above] - ranked[below]) * (place - below))
