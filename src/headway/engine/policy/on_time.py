"""Which jobs can meet their deadlines: as many as possible (Moore 1968, Hodgson's algorithm).

One machine, a duration and a deadline each. In the order of deadlines, whenever one would be late
the longest so far is given up: no other choice saves more of them. Worked example from time 0:

    job         a    b    c    d
    duration    4    1    2    2
    deadline    4    5    6    7

    a ends at 4; b at 5; c would end at 7 > 6: a, the longest, is given up, c ends at 3; d at 5

All that are kept could begin 2 later: b has 4 to spare, c 3 and d 2.
"""

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, TypeVar

Job = TypeVar("Job")


class Due(NamedTuple):
    """`job` takes `duration_s` and is to end by `deadline_s`, which may be infinite."""

    deadline_s: float
    duration_s: float


def on_time(jobs: list[tuple[Due, Job]], now_s: float) -> tuple[list[Job], list[Job], float, float]:
    """(those that make it, by deadline; those given up, in their order here; when the last ends;
    how much later all could begin and still make it).

    O(n log n). Equal deadlines keep the order of `jobs`.
    """
    order = sorted(range(len(jobs)), key=lambda index: jobs[index][0].deadline_s)
    longest: list[tuple[float, int]] = []
    given_up: set[int] = set()
    end_s = now_s
    for index in order:
        due = jobs[index][0]
        end_s += due.duration_s
        heappush(longest, (-due.duration_s, index))
        if end_s > due.deadline_s:
            duration_s, worst = heappop(longest)
            end_s += duration_s
            given_up.add(worst)
    kept = [jobs[index] for index in order if index not in given_up]
    end_s, spare_s = now_s, inf
    for due, _ in kept:
        end_s += due.duration_s
        spare_s = min(spare_s, due.deadline_s - end_s)
    late = [jobs[index][1] for index in sorted(given_up)]
    return [job for _, job in kept], late, end_s, spare_s
