"""What the steps of a calibration would have taken with nobody else on their cores.

Where server and client had tokens to write and to read while a step ran, they took its cores: that
is in what was measured. A simulation adds it again by its own load (`cores.Cores`), so here it is
taken out by the same rule. Worked example, two cores, an engine of one thread: a step took 9 ms,
and in its first 3 ms server and client computed besides. Three had two cores then: 2 ms of it were
done, and 6 ms after that. It would have taken 8 ms.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.advise.simulate.cores import Desk
from headway.advise.simulate.front import Front
from headway.telemetry.calibration import MachineCalibration

Floats = NDArray[np.float64]


class Busy(NamedTuple):
    """(from, until) of each time in which one process computed, in order, none into another."""

    from_s: Floats
    until_s: Floats

    def before(self, at_s: Floats) -> Floats:
        """How much of this lies before each moment."""
        total_s = np.concatenate([[0.0], np.cumsum(self.until_s - self.from_s)])
        index = np.searchsorted(self.from_s, at_s)
        over_s = np.maximum(self.until_s[index - 1] - at_s, 0.0) if len(self.from_s) else 0.0
        found: Floats = np.where(index > 0, total_s[index] - over_s, 0.0)
        return found

    def and_also(self, other: "Busy") -> "Busy":
        """When both computed."""
        edges = np.unique(np.concatenate([*self, *other]))
        middle = (edges[:-1] + edges[1:]) / 2
        both = self.covers(middle) & other.covers(middle)
        return Busy(edges[:-1][both], edges[1:][both])

    def covers(self, at_s: Floats) -> NDArray[np.bool_]:
        """Whether it computed at each moment."""
        index = np.searchsorted(self.from_s, at_s)
        if not len(self.from_s):
            return np.zeros(len(at_s), dtype=bool)
        return (index > 0) & (at_s < self.until_s[index - 1])


def own_seconds(
    calibration: MachineCalibration, front: Front, threads: int, engines: int = 1
) -> Floats:
    """Seconds of each step on cores of its own, where engines of so many threads ran."""
    steps = calibration.steps
    took = np.array(steps.seconds)
    others = 1 + front.has_client
    if not 0 < front.num_cores < threads * engines + others:
        return took
    begin = np.array(steps.started_s)
    end = begin + took
    wanted = threads * np.minimum(beside(begin, end), engines)
    server, client = busy_times(calibration, front, end, wanted)
    both = server.and_also(client)
    both_s = both.before(end) - both.before(begin)
    one_s = sum(each.before(end) - each.before(begin) for each in (server, client)) - 2 * both_s
    speeds = [np.minimum(1.0, front.num_cores / (wanted + more)) for more in (0, 1, 2)]
    found: Floats = (took - both_s - one_s) * speeds[0] + one_s * speeds[1] + both_s * speeds[2]
    return np.maximum(found, LEAST_SHARE * took)


LEAST_SHARE = 0.2
"""A step had at least this much of its cores, whatever the arithmetic says."""


def beside(begin: Floats, end: Floats) -> Floats:
    """How many engines were in a step in the middle of each, itself among them."""
    middle = (begin + end) / 2
    begun, ended = np.searchsorted(np.sort(begin), middle), np.searchsorted(np.sort(end), middle)
    found: Floats = np.maximum(begun - ended, 1).astype(float)
    return found


def busy_times(
    calibration: MachineCalibration, front: Front, end: Floats, wanted: Floats
) -> tuple[Busy, Busy]:
    """When the server's process and the client computed, by what came and what left."""
    rows = calibration.steps.sampled
    work = [(at_s, count, n) for at_s, count, n in zip(end, rows, wanted, strict=True) if count]
    from_s = calibration.traffic_from_s
    if from_s is not None:
        threads = float(wanted.min())
        work += [(from_s + asked.at_s, 0, threads) for asked in calibration.traffic]
    work.sort()
    server, client = Desk(), Desk()
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    for at_s, count, threads in work:
        slower = max((threads + 1 + front.has_client) / front.num_cores, 1.0)
        if count:
            server_s = front.step_cpu_s + count * front.token_cpu_s
            client_s = front.client_step_cpu_s + count * front.client_cpu_s
            reads_s = at_s + server.wait_s(at_s)
        else:
            server_s, client_s, reads_s = front.request_cpu_s, front.client_request_cpu_s, at_s
        for desk, comes_s, seconds, found in (
            (server, at_s, server_s, times[0]),
            (client, reads_s, client_s, times[1]),
        ):
            if seconds:
                begins_s = comes_s + desk.wait_s(comes_s)
                desk.work(comes_s, slower * seconds)
                found.append((begins_s, desk.free_s))
    return busy(times[0]), busy(times[1])


def busy(times: list[tuple[float, float]]) -> Busy:
    """Columns of these."""
    table = np.array(times, dtype=float).reshape(-1, 2)
    return Busy(table[:, 0], table[:, 1])
