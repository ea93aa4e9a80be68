"""Which of several engines answers a request: the one where its first token comes soonest.

What each has computed counts in the wait: a conversation goes on where its beginning is. So that
one popular beginning does not draw everybody to one engine, none is chosen that holds more than
`SPREAD` times its share (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam,
2018). Worked example, three engines with 4, 4 and 8 requests, mean 5.3 and 5.7 with the newcomer:

    waits 0.30, 0.30 and 0.05 s   the third has the prefix, but 8 > 1.25 x 5.7: the first
    with 4, 4 and 6 requests      6 < 1.25 x 5: the third
"""

from collections.abc import Sequence
from dataclasses import dataclass

SPREAD = 1.25
ALIKE, ALIKE_S = 1.1, 0.005
"""Waits so close to the shortest are as good as it: forecasts err by more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests: seconds until this one's first token, requests it holds."""

    wait_s: float
    num_requests: int


def choose_engine(candidates: Sequence[Candidate]) -> int:
    """The index of the one to ask; of those that are as good the one with the fewest requests."""
    fair = SPREAD * (1 + sum(each.num_requests for each in candidates)) / len(candidates)
    allowed = [n for n, each in enumerate(candidates) if each.num_requests <= fair]
    shortest_s = min(candidates[n].wait_s for n in allowed)
    near = [n for n in allowed if candidates[n].wait_s <= ALIKE * shortest_s + ALIKE_S]
    return min(near, key=lambda n: candidates[n].num_requests)
