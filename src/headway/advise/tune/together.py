"""The combined gain of a setting over the default, from simulation and real runs.

Both have errors: real runs of a minute by chance, a simulation by its model. The error of the
simulation is estimated where both are known: by the difference of its gains from the real ones,
less the chance error of those, and it is never taken as less than 15%. The combined gain is the
mean of the two, weighted by their precision (empirical Bayes: Efron and Morris, "Data Analysis
Using Stein's Estimator and its Generalizations", 1975), in logarithms, since gains multiply.

    real +14% (-1 to +31%)   simulated +12%, off by 15%   together +14% ( 0 to +29%)
    real  +1% (-12 to +16%)  simulated +12%, off by 15%   together  +3% (-9 to +17%)
    real +14% (-1 to +31%)   simulated -30%, off by 48%   together +13% (-2 to +30%)
"""

from collections.abc import Iterable
from math import exp, log, sqrt

from headway.advise.tune.confirm import MIN_GOODPUT_RATIO, Z_95, ConfirmedSetting
from headway.advise.tune.search import Point

MIN_SIMULATION_ERROR = 0.15
"""Least error of a simulated gain."""
MIN_REAL_ERROR = 0.005
"""Least error of a real gain, however many requests it has."""


def add_simulated_gains(alive: list[ConfirmedSetting], points: Iterable[Point]) -> None:
    """Fill in the simulated and the combined gain of settings that ran beside the default."""
    goodput = {point.changes: point.goodput for point in points}
    base = goodput.get((), 0.0)
    for one in alive:
        one.together, one.together_interval = one.gain, one.gain_interval
        is_known = base > 0 and one.changes in goodput
        one.simulated = round(goodput[one.changes] / base - 1, 4) if is_known else None
    known = [one for one in alive if one.simulated is not None]
    off = simulation_error(known)
    for one in known:
        gain, low, high = combine(one, off)
        one.together, one.together_interval = round(gain, 4), (round(low, 4), round(high, 4))


def simulation_error(known: list[ConfirmedSetting]) -> float:
    """Return the error of the simulation, as a standard deviation of logarithms."""
    if not known:
        return MIN_SIMULATION_ERROR
    squares = [
        (log_gain(one.gain) - log_gain(one.simulated or 0.0)) ** 2 - real_gain_error(one) ** 2
        for one in known
    ]
    return sqrt(max(sum(squares) / len(known), MIN_SIMULATION_ERROR**2))


def combine(one: ConfirmedSetting, off: float) -> tuple[float, float, float]:
    """Return (gain, from, to) of simulation and real runs."""
    real, simulated = 1 / real_gain_error(one) ** 2, 1 / off**2
    mean = real * log_gain(one.gain) + simulated * log_gain(one.simulated or 0.0)
    mean /= real + simulated
    reach = Z_95 / sqrt(real + simulated)
    return exp(mean) - 1, exp(mean - reach) - 1, exp(mean + reach) - 1


def real_gain_error(one: ConfirmedSetting) -> float:
    """Return the standard error of a real gain's logarithm."""
    low, high = one.gain_interval
    return max((log_gain(high) - log_gain(low)) / (2 * Z_95), MIN_REAL_ERROR)


def log_gain(gain: float) -> float:
    """Return a gain as a logarithm."""
    return log(max(1 + gain, MIN_GOODPUT_RATIO))
