"""What one request was promised, and what it may take of others: the scheduler's view of a class.

The server makes one from the request's service class, key and `slo`; every request carries it
into the engine. Worked example, the built-in class `interactive`: the first token within 1.5 s and
2 ms for each uncached prompt token over 500, each further one within 120 ms in the mean:

    Terms(ttft_s=1.5, tpot_s=0.12, ttft_per_token_s=0.002).first_token_s(1500) = 1.5 + 2 = 3.5 s
"""

from math import inf

import msgspec


class Terms(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Objectives in seconds, None where there is none; defaults promise nothing.

    `e2e_s` is for who judges: no policy schedules for it.

    `weight` is the share of its user beside others under contention; a smaller `priority` goes
    first where the policy is `priority`; `idle_only` takes only what nobody else wants (batch).
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
        """How long the first token may take; infinite without an objective."""
        if self.ttft_s is None:
            return inf
        return self.ttft_s + self.ttft_per_token_s * max(0, uncached_tokens - self.free_tokens)


PROMISES_NOTHING = Terms()
