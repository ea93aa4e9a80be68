"""Judgement of one ended request: met all objectives, missed some, or not judged.

Each request belongs to a service class (`core.service`) and may have objectives of its own. It is
judged when it ends, on its own timestamps.
"""

import msgspec

from headway.core.slo import Slo

OK, FAILED, REFUSED, DISCONNECTED = "ok", "failed", "refused", "left"
INVALID, MOVED = "invalid", "moved"
"""Outcomes of a request: complete; failed by a fault of the server; refused for load or state; its
client disconnected; invalid; moved to the fallback model.
"""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Figures of one ended request, for goodput and percentiles.

    Latencies are None where the request did not get that far. `missed` is () when all objectives
    were met, the names of the missed ones, or None when the request is not judged. A busy server
    stores 100,000 of these, so the garbage collector does not track them (`gc=False`).
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
    """Return the missed objectives, or None if the request is not judged.

    `e2e_s` is the time from arrival to the end, whatever the outcome. A failed or refused request
    is a miss. A request whose client disconnected is judged only if it was late already: with a
    TTFT of 0.5 s, a disconnect after 2 s without a token is a miss; a disconnect in the middle of
    an answer on time is not judged.
    """
    if outcome in (FAILED, REFUSED):
        return (outcome,)
    if outcome in (INVALID, MOVED):
        return None
    if outcome == DISCONNECTED:
        late = slo.missed(e2e_s if ttft_s is None else ttft_s, None, None, e2e_s)
        return late or None
    return slo.missed(ttft_s, tpot_s, itl_p99_s, e2e_s)
