"""Arrival processes: all send times are drawn before the first request, so no answer moves them.

Each process is a row of `ARRIVALS`: it takes an `ArrivalPace` and a generator and returns ascending
seconds since the start. The same seed draws the same times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPace:
    """Rate and duration: `count` requests, or as many as fall into `duration_s`.

    `burstiness` is the shape of gamma gaps: 1 is Poisson, and the gaps' coefficient of variation is
    1/√burstiness (0.25 → 2). A ramp goes from `ramp_from` to `rate` requests per second.
    """

    rate: float
    duration_s: float
    count: int | None = None
    burstiness: float = 1.0
    ramp_from: float = 0.0

    @property
    def expected(self) -> float:
        """Return the number of requests at a steady rate."""
        return self.rate * self.duration_s


def from_gaps(pace: ArrivalPace, draw: Callable[[int], Times]) -> Times:
    """Return times with the gaps of `draw(n)`, up to the count or the end of the duration."""
    if pace.count is not None:
        return np.cumsum(draw(pace.count))
    times = np.empty(0)
    while not len(times) or times[-1] < pace.duration_s:
        more = draw(int(pace.expected + 4 * math.sqrt(pace.expected)) + 8)
        times = np.concatenate([times, np.cumsum(more) + (times[-1] if len(times) else 0.0)])
    return times[times < pace.duration_s]


def poisson(pace: ArrivalPace, rng: np.random.Generator) -> Times:
    """Return independent arrivals: exponential gaps of mean 1/rate."""
    return from_gaps(pace, lambda n: rng.exponential(1 / pace.rate, n))


def gamma(pace: ArrivalPace, rng: np.random.Generator) -> Times:
    """Return arrivals with gamma gaps of the same mean: bursts below a burstiness of 1, nearly even
    gaps far above."""
    shape = pace.burstiness
    return from_gaps(pace, lambda n: rng.gamma(shape, 1 / (pace.rate * shape), n))


def constant(pace: ArrivalPace, rng: np.random.Generator) -> Times:
    """Return even gaps, the first request at 0: rate 4 → 0, 0.25, 0.5, …"""
    del rng
    count = pace.count if pace.count is not None else math.ceil(round(pace.expected, 9))
    return np.arange(count) / pace.rate


def ramp(pace: ArrivalPace, rng: np.random.Generator) -> Times:
    """Return Poisson arrivals of a rate that grows (or falls) linearly over the duration.

    Unit arrivals u are mapped through the inverse of Λ(t) = r₀t + (r₁ − r₀)t²/2D.
    """
    low, high = pace.ramp_from, pace.rate
    duration = pace.duration_s if pace.count is None else 2 * pace.count / (low + high)
    total = duration * (low + high) / 2
    unit = ArrivalPace(rate=1.0, duration_s=total, count=pace.count)
    arrivals = poisson(unit, rng)
    growth = (high - low) / duration
    if growth == 0:
        return arrivals / low
    under = np.maximum(low**2 + 2 * growth * arrivals, 0.0)
    return (np.sqrt(under) - low) / growth


ARRIVALS: dict[str, Callable[[ArrivalPace, np.random.Generator], Times]] = {
    "poisson": poisson,
    "gamma": gamma,
    "constant": constant,
    "ramp": ramp,
}
