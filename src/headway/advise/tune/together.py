"""What simulation and real runs say together of a setting's gain over the default.

Both err: real runs of a minute by chance, a simulation by what it leaves out. How far the
simulation is off is seen where both are known: by what its gains differ from the real ones, less
what chance does to those, and it is never taken for nearer than 15%. The gain is the mean of
the two, each weighted by how sure it is (empirical Bayes: Efron and Morris, "Data Analysis Using
Stein's Estimator and its Generalizations", 1975). All of it in logarithms, as gains multiply.

    real +14% (-1 to +31%)   simulated +12%, off by 15%   together +14% ( 0 to +29%)
    real  +1% (-12 to +16%)  simulated +12%, off by 15%   together  +3% (-9 to +17%)
    real +14% (-1 to +31%)   simulated -30%, off by 48%   together +13% (-2 to +30%)
"""

from collections.abc import Iterable
from math import exp, log, sqrt

from headway.advise.tune.confirm import LEAST, SURE, Confirmed
from headway.advise.tune.search import Point

NEAREST = 0.15
"""No simulation is taken to be less off than this."""
LEAST_ERROR = 0.005
"""Of a real gain, however many requests it is of."""


def join(alive: list[Confirmed], points: Iterable[Point]) -> None:
    """Fill in what was simulated, and what both say, of settings that ran beside the default."""
    goodput = {point.changes: point.goodput for point in points}
    base = goodput.get((), 0.0)
    for one in alive:
        one.together, one.together_interval = one.gain, one.gain_interval
        is_known = base > 0 and one.changes in goodput
        one.simulated = round(goodput[one.changes] / base - 1, 4) if is_known else None
    known = [one for one in alive if one.simulated is not None]
    off = off_by(known)
    for one in known:
        gain, low, high = weighed(one, off)
        one.together, one.together_interval = round(gain, 4), (round(low, 4), round(high, 4))


def off_by(known: list[Confirmed]) -> float:
    """How far the simulation is off, as a standard deviation of logarithms."""
    if not known:
        return NEAREST
    squares = [
        (told(one.gain) - told(one.simulated or 0.0)) ** 2 - error(one) ** 2 for one in known
    ]
    return sqrt(max(sum(squares) / len(known), NEAREST**2))


def weighed(one: Confirmed, off: float) -> tuple[float, float, float]:
    """(gain, from, to) of both together."""
    real, simulated = 1 / error(one) ** 2, 1 / off**2
    mean = real * told(one.gain) + simulated * told(one.simulated or 0.0)
    mean /= real + simulated
    reach = SURE / sqrt(real + simulated)
    return exp(mean) - 1, exp(mean - reach) - 1, exp(mean + reach) - 1


def error(one: Confirmed) -> float:
    """The standard error of a real gain's logarithm."""
    low, high = one.gain_interval
    return max((told(high) - told(low)) / (2 * SURE), LEAST_ERROR)


def told(gain: float) -> float:
    """A gain as a logarithm."""
    return log(max(1 + gain, LEAST))
