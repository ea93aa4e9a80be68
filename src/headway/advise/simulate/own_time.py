"""Step times of a calibration without the work of other processes on the same cores.

While a step ran, the server had tokens to write and the client tokens to read: their use of the
cores is in the measured time. A simulation adds it again for its own load (`cores.SharedCores`), so
here it is taken out by the same rule. Worked example, two cores, an engine of one thread: a step
took 9 ms, and in its first 3 ms server and client computed besides. Three threads had two cores
then: 2 ms of the step were done, and 6 ms after that. Alone it would have taken 8 ms.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.advise.simulate.cores import FifoServer
from headway.advise.simulate.front import FrontendTimes
from headway.telemetry.calibration import MachineCalibration

Floats = NDArray[np.float64]


class BusyIntervals(NamedTuple):
    """(from, until) of each interval in which one process computed, in order, without overlap."""

    from_s: Floats
    until_s: Floats

    def before(self, at_s: Floats) -> Floats:
        """Return the busy seconds before each moment."""
        total_s = np.concatenate([[0.0], np.cumsum(self.until_s - self.from_s)])
        index = np.searchsorted(self.from_s, at_s)
        over_s = np.maximum(self.until_s[index - 1] - at_s, 0.0) if len(self.from_s) else 0.0
        seconds: Floats = np.where(index > 0, total_s[index] - over_s, 0.0)
        return seconds

    def and_also(self, other: "BusyIntervals") -> "BusyIntervals":
        """Return the intervals in which both computed."""
        edges = np.unique(np.concatenate([*self, *other]))
        middle = (edges[:-1] + edges[1:]) / 2
        both = self.covers(middle) & other.covers(middle)
        return BusyIntervals(edges[:-1][both], edges[1:][both])

    def covers(self, at_s: Floats) -> NDArray[np.bool_]:
        """Return whether the process computed at each moment."""
        index = np.searchsorted(self.from_s, at_s)
        if not len(self.from_s):
            return np.zeros(len(at_s), dtype=bool)
        return (index > 0) & (at_s < self.until_s[index - 1])


def own_seconds(
    calibration: MachineCalibration, front: FrontendTimes, threads: int, engines: int = 1
) -> Floats:
    """Return the seconds of each step on cores of its own, for engines of `threads` threads."""
    steps = calibration.steps
    observed_s = np.array(steps.seconds)
    if not 0 < front.num_cores < threads * engines + 1 + front.has_client:
        return observed_s
    begin = np.array(steps.started_s)
    end = begin + observed_s
    num_threads = threads * np.minimum(engines_in_step(begin, end), engines)
    server, client = busy_times(calibration, front, end, num_threads)
    both = server.and_also(client)
    both_s = both.before(end) - both.before(begin)
    one_s = sum(each.before(end) - each.before(begin) for each in (server, client)) - 2 * both_s
    speeds = [np.minimum(1.0, front.num_cores / (num_threads + more)) for more in (0, 1, 2)]
    seconds: Floats = (
        (observed_s - both_s - one_s) * speeds[0] + one_s * speeds[1] + both_s * speeds[2]
    )
    return np.maximum(seconds, MIN_CORE_SHARE * observed_s)


MIN_CORE_SHARE = 0.2
"""Least share of its cores that a step is taken to have had."""


def engines_in_step(begin: Floats, end: Floats) -> Floats:
    """Return how many engines were in a step in the middle of each step, itself included."""
    middle = (begin + end) / 2
    begun, ended = np.searchsorted(np.sort(begin), middle), np.searchsorted(np.sort(end), middle)
    count: Floats = np.maximum(begun - ended, 1).astype(float)
    return count


def busy_times(
    calibration: MachineCalibration, front: FrontendTimes, end: Floats, num_threads: Floats
) -> tuple[BusyIntervals, BusyIntervals]:
    """Return when the server's process and the client computed, by arrivals and finished steps."""
    rows = calibration.steps.sampled
    work = [
        (at_s, count, n) for at_s, count, n in zip(end, rows, num_threads, strict=True) if count
    ]
    from_s = calibration.traffic_from_s
    if from_s is not None:
        threads = float(num_threads.min())
        work += [(from_s + request.at_s, 0, threads) for request in calibration.traffic]
    work.sort()
    server, client = FifoServer(), FifoServer()
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for at_s, count, threads in work:
        slower = max((threads + 1 + front.has_client) / front.num_cores, 1.0)
        if count:
            server_s = front.step_cpu_s + count * front.token_cpu_s
            client_s = front.client_step_cpu_s + count * front.client_cpu_s
            reads_s = at_s + server.wait_s(at_s)
        else:
            server_s, client_s, reads_s = front.request_cpu_s, front.client_request_cpu_s, at_s
        for desk, comes_s, seconds, intervals in (
            (server, at_s, server_s, times[0]),
            (client, reads_s, client_s, times[1]),
        ):
            if seconds:
                begins_s = comes_s + desk.wait_s(comes_s)
                desk.work(comes_s, slower * seconds)
                intervals.append((begins_s, desk.free_s))
    return busy_intervals(times[0]), busy_intervals(times[1])


def busy_intervals(times: list[tuple[float, float]]) -> BusyIntervals:
    """Return these intervals as columns."""
    table = np.array(times, dtype=float).reshape(-1, 2)
    return BusyIntervals(table[:, 0], table[:, 1])
