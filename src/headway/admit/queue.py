"""What an engine's policy and the forecast of its queue have to agree on.

A policy states its `QueueOrder`; the forecast derives from it whom a newcomer waits for.
"""

from enum import StrEnum


class QueueOrder(StrEnum):
    """Whom a newcomer waits for.

    arrival    everybody who came before
    shares     of each other user as many prompt tokens as its own, by weight
    deadline   so too, but only prompts that are due sooner and not late; long ones take a share of
               the time (`lane_share`) while others wait
    """

    ARRIVAL = "arrival"
    SHARES = "shares"
    DEADLINE = "deadline"


PATIENCE = 0.25
"""Share of (objective − own prefill) that a request waits for a slot to come free by itself: with
64 rows of 150 tokens at 50 ms one does every 120 ms, three within a quarter of 1.4 s."""
UNPROMISED_S = 6.0
"""The time to the first token that counts for a request without an objective."""
