"""Which jobs can meet their deadlines: as many as possible (Moore 1968, Hodgson's algorithm).

One machine; each job has a duration and a deadline. Jobs are taken by deadline, and whenever one
would be late the longest so far is given up: no other choice saves more of them. Worked example
from time 0:

    job         a    b    c    d
    duration    4    1    2    2
    deadline    4    5    6    7

    a ends at 4; b at 5; c would end at 7 > 6: a, the longest, is given up, c ends at 3; d at 5

The slack is 2: all jobs on time could begin 2 later, for b has 4 to spare, c 3 and d 2.
"""

from heapq import heappop, heappush
from math import inf
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")


class Due(NamedTuple):
    """A job's deadline, which may be infinite, and its duration."""

    deadline_s: float
    duration_s: float


class OnTime(NamedTuple, Generic[Job]):
    """Jobs on time by deadline, late ones in their order, the end of the last one on time, and how
    much later all on time could begin."""

    on_time: list[Job]
    late: list[Job]
    end_s: float
    slack_s: float


def choose_on_time(jobs: list[tuple[Due, Job]], now_s: float) -> OnTime[Job]:
    """Return the most jobs that can be on time, and the others; O(n log n).

    Equal deadlines keep the order of `jobs`.
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
    on_time = [jobs[index] for index in order if index not in given_up]
    end_s, slack_s = now_s, inf
    for due, _ in on_time:
        end_s += due.duration_s
        slack_s = min(slack_s, due.deadline_s - end_s)
    late = [jobs[index][1] for index in sorted(given_up)]
    return OnTime([job for _, job in on_time], late, end_s, slack_s)
