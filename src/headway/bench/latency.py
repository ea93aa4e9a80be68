"""The latencies of one exchange, derived from its raw timestamps.

Worked example, scheduled at 0, chunks at 2, 3 and 5 s with 1, 1 and 2 tokens: TTFT 2, e2e 5,
TPOT (5 − 2) / 3 = 1, gaps 1, 2, 0. They add up to e2e − TTFT and there is one less than tokens.
"""

from operator import sub

import msgspec

from headway.measure.record import Exchange


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds; None where an answer is too short. `gaps_s` are ITLs where `exact`,
    else gaps between chunks of an unknown number of tokens."""

    ttft_s: float
    publish_s: float | None
    e2e_s: float
    tpot_s: float | None
    gaps_s: list[float] = []
    exact: bool = True

    @property
    def gap_p99_s(self) -> float | None:
        """Return the p99 of this request's own gaps."""
        if not self.gaps_s:
            return None
        ordered = sorted(self.gaps_s)
        position = 0.99 * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def latency(x: Exchange) -> Latency | None:
    """Return the latencies of a complete exchange; None for a failed one."""
    if not x.ok or not x.chunk_s:
        return None
    ttft_s = x.chunk_s[0] - x.scheduled_s
    e2e_s = x.chunk_s[-1] - x.scheduled_s
    n = x.num_output
    return Latency(
        ttft_s=ttft_s,
        publish_s=None if x.published_s is None else x.published_s - x.scheduled_s,
        e2e_s=e2e_s,
        tpot_s=(e2e_s - ttft_s) / (n - 1) if n > 1 else None,
        gaps_s=gaps(x),
        exact=x.chunk_tokens is not None,
    )


def gaps(x: Exchange) -> list[float]:
    """Return the gaps between consecutive tokens; inside a chunk they are 0."""
    between = [*map(sub, x.chunk_s[1:], x.chunk_s)]
    if x.chunk_tokens is None or max(x.chunk_tokens) == 1:
        return between
    token_gaps = [0.0] * (x.chunk_tokens[0] - 1)
    for gap, count in zip(between, x.chunk_tokens[1:]):
        token_gaps += [gap] + [0.0] * (count - 1)
    return token_gaps
