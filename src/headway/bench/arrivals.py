"""When requests are sent: times drawn before the first is sent, so that no answer moves them.

Each process is a row of `ARRIVALS`: given a `Pace` and a generator it returns ascending seconds
since the start. The same seed draws the same times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast and how long: `count` requests, or as many as fall into `duration_s`.

    `burstiness` is the shape of gamma gaps: 1 is Poisson, and the gaps' coefficient of variation
    is 1/√burstiness (0.25 → 2). A ramp goes from `ramp_from` to `rate` requests per second.
    """

    rate: float
    duration_s: float
    count: int | None = None
    burstiness: float = 1.0
    ramp_from: float = 0.0

    @property
    def expected(self) -> float:
        """The number of requests at a steady rate."""
        return self.rate * self.duration_s


def from_gaps(pace: Pace, draw: Callable[[int], Times]) -> Times:
    """Times whose gaps `draw(n)` gives, up to the count or the end of the duration."""
    if pace.count is not None:
        return np.cumsum(draw(pace.count))
    times = np.empty(0)
    while not len(times) or times[-1] < pace.duration_s:
        more = draw(int(pace.expected + 4 * math.sqrt(pace.expected)) + 8)
        times = np.concatenate([times, np.cumsum(more) + (times[-1] if len(times) else 0.0)])
    return times[times < pace.duration_s]


def poisson(pace: Pace, rng: np.random.Generator) -> Times:
    """Independent arrivals: exponential gaps of mean 1/rate."""
    return from_gaps(pace, lambda n: rng.exponential(1 / pace.rate, n))


def gamma(pace: Pace, rng: np.random.Generator) -> Times:
    """Gamma gaps of the same mean: bursts below a burstiness of 1, nearly even gaps far above."""
    shape = pace.burstiness
    return from_gaps(pace, lambda n: rng.gamma(shape, 1 / (pace.rate * shape), n))


def constant(pace: Pace, rng: np.random.Generator) -> Times:
    """Even gaps, the first request at once: rate 4 → 0, 0.25, 0.5, …"""
    del rng
    count = pace.count if pace.count is not None else math.ceil(round(pace.expected, 9))
    return np.arange(count) / pace.rate


def ramp(pace: Pace, rng: np.random.Generator) -> Times:
    """Poisson arrivals whose rate grows (or falls) evenly over the duration.

    Unit arrivals u are mapped through the inverse of Λ(t) = r₀t + (r₁ − r₀)t²/2D.
    """
    low, high = pace.ramp_from, pace.rate
    duration = pace.duration_s if pace.count is None else 2 * pace.count / (low + high)
    total = duration * (low + high) / 2
    unit = Pace(rate=1.0, duration_s=total, count=pace.count)
    arrivals = poisson(unit, rng)
    growth = (high - low) / duration
    if growth == 0:
        return arrivals / low
    under = np.maximum(low**2 + 2 * growth * arrivals, 0.0)
    return (np.sqrt(under) - low) / growth


ARRIVALS: dict[str, Callable[[Pace, np.random.Generator], Times]] = {
    "poisson": poisson,
    "gamma": gamma,
    "constant": constant,
    "ramp": ramp,
}
