"""Whether one request met its objectives.

Each request belongs to a class (`core.service`) and may bring objectives of its own. It is judged
when it ends, on its own timestamps: it met all, it missed some, or it says nothing of the server.
"""

import msgspec

from headway.core.slo import Slo

OK, FAILED, REFUSED, LEFT = "ok", "failed", "refused", "left"
INVALID, MOVED = "invalid", "moved"
"""How a request ended: complete, by our fault, refused for load, its client went away, it was not
one we can serve, or it was given up here and went to the fallback, or was refused if that failed.
"""


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request that is over: what is judged and what percentiles are made of.

    Latencies are None where the request did not get that far. `missed` is () when all objectives
    were met, names what was missed, and is None when the request is not judged. A busy server keeps
    100,000 of them, so the garbage collector does not visit them.
    """

    service_class: str
    outcome: str
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    missed: tuple[str, ...] | None = None

    @property
    def met(self) -> bool:
        return self.missed == ()


def judge(
    slo: Slo,
    outcome: str,
    *,
    ttft_s: float | None,
    tpot_s: float | None,
    itl_p99_s: float | None,
    e2e_s: float,
) -> tuple[str, ...] | None:
    """What the request missed. `e2e_s` is the time from arrival until it was over, however.

    A failed or refused request missed, whatever its latencies. One whose client left counts only
    when it was too late already: with TTFT 0.5 s, a client that leaves after 2 s without a token
    has seen a miss; one that leaves in the middle of a good answer says nothing.
    """
    if outcome in (FAILED, REFUSED):
        return (outcome,)
    if outcome in (INVALID, MOVED):
        return None
    if outcome == LEFT:
        late = slo.missed(e2e_s if ttft_s is None else ttft_s, None, None, e2e_s)
        return late or None
    return slo.missed(ttft_s, tpot_s, itl_p99_s, e2e_s)
