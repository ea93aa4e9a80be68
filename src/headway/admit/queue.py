"""The order in which a policy serves its queue, shared by the engine's policies and the forecast.

A policy states its `QueueOrder`; from it the forecast derives which requests a new one waits for.
"""

from enum import StrEnum


class QueueOrder(StrEnum):
    """Which waiting requests are served before a new one.

    arrival    all that arrived before
    shares     of each other user as many prompt tokens as of its own, by weight
    deadline   as `shares`, but only requests that are due sooner and not late; long prompts take a
               share of the time (`lane_share`) while others wait
    """

    ARRIVAL = "arrival"
    SHARES = "shares"
    DEADLINE = "deadline"


RECLAIM_WAIT_SHARE = 0.25
"""Share of (objective − own prefill) that a request waits for a slot to come free before it
reclaims one: with 64 slots of 150 tokens at 50 ms one comes free every 120 ms, three within a
quarter of 1.4 s."""
DEFAULT_TTFT_S = 6.0
"""Time to the first token that is assumed for a request without an objective."""
