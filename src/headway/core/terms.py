"""Terms of a request: the scheduler's view of its service class.

The server creates them from the request's service class, key and `slo`; every request carries them
into the engine. Worked example, the built-in class `interactive`: the first token within 1.5 s and
2 ms for each uncached prompt token over 500, each further one within 120 ms in the mean:

    Terms(ttft_s=1.5, tpot_s=0.12, ttft_per_token_s=0.002).first_token_s(1500) = 1.5 + 2 = 3.5 s
"""

from math import inf

import msgspec


class Terms(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Objectives in seconds, None for none; the defaults promise nothing.

    `e2e_s` is for judging only: no policy schedules for it.

    `weight` is the share of its user relative to others under contention; a smaller `priority` goes
    first under the policy `priority`; `idle_only` takes only otherwise unused capacity (batch).
    """

    service_class: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_per_token_s: float = 0.0
    free_tokens: int = 500
    e2e_s: float | None = None
    weight: float = 1.0
    priority: int = 0
    idle_only: bool = False

    def first_token_s(self, uncached_tokens: int) -> float:
        """Return the time to first token that is allowed; infinite without an objective."""
        if self.ttft_s is None:
            return inf
        return self.ttft_s + self.ttft_per_token_s * max(0, uncached_tokens - self.free_tokens)
