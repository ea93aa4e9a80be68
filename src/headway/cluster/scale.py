"""Number of servers for a load, by the predicted attainment.

Inputs are the engines that the load needs at the promised pace (`now.engines_asked` of `/stats`)
and the requests in progress. Requests in progress are Poisson for any distribution of lengths
(M/G/inf), each occupies its share of an engine, and a request that arrives when all shares are
occupied is late. Example: 48 requests need 2.4 engines, 0.05 each:

    3 servers    room for 60   P(Poisson(48) < 60) = 0.95
    4 servers    room for 80   P(Poisson(48) < 80) = 1.00

It scales up at once, to the forecast for the time when a new server would be ready; it scales down
by one server after DOWNSCALE_DELAY_S without need for more.
"""

from collections import deque
from dataclasses import dataclass, field
from math import erf, exp, inf, sqrt

TREND_WINDOW_S = 120.0
"""The trend is that of the last two minutes."""
MIN_TREND_SAMPLES = 5
DOWNSCALE_DELAY_S = 300.0
"""Seconds for which fewer servers must suffice before one is removed."""
ATTAINMENT_WINDOW_S = 60.0
"""Attainment is a mean over a minute, so the effect of a new server is awaited for that long."""
NEGLIGIBLE = 1e-12
MIN_NORMAL_MEAN = 400.0
"""Mean from which the normal distribution approximates the Poisson distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """The load of all servers of a model.

    The `in_progress` requests need `engines_needed` engines; `attainment` is the recent share that
    met its objectives, None if no request was judged. `servers` are ready.
    """

    engines_needed: float
    in_progress: float
    servers: int
    attainment: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTarget:
    """The promised attainment and the limits: `engines` per server, `lead_s` until one is ready."""

    attainment: float = 0.95
    least: int = 1
    most: int = 8
    engines: int = 1
    lead_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A number of servers, the predicted attainment, and the reason in a sentence."""

    servers: int
    predicted: float
    why: str


def poisson_below(count: int, mean: float) -> float:
    """Return P(X < `count`) for a Poisson variable with this mean."""
    if mean > MIN_NORMAL_MEAN:
        return 0.5 * (1 + erf((count - 0.5 - mean) / sqrt(2 * mean)))
    term, total = exp(-mean), 0.0
    for number in range(count):
        total += term
        term *= mean / (number + 1)
        if number > mean and term < NEGLIGIBLE:
            break
    return min(total, 1.0)


def predict_attainment(
    servers: int, engines_needed: float, in_progress: float, engines: int = 1
) -> float:
    """Return the share of requests that find room, if `in_progress` requests need
    `engines_needed` engines."""
    if engines_needed <= 0 or in_progress <= 0:
        return 1.0
    fullness = engines_needed / (servers * engines)
    if fullness < NEGLIGIBLE:
        return 1.0
    return poisson_below(round(in_progress / fullness), in_progress)


def servers_needed(
    target: ScaleTarget, engines_needed: float, in_progress: float
) -> tuple[int, float]:
    """Return (the fewest servers that meet the target, their predicted attainment)."""
    for servers in range(target.least, target.most + 1):
        share = predict_attainment(servers, engines_needed, in_progress, target.engines)
        if share >= target.attainment or servers == target.most:
            return servers, share
    raise AssertionError("least is beyond most")


@dataclass(slots=True)
class Scaler:
    """Decides from one load after the other; the result depends only on these calls."""

    target: ScaleTarget
    _samples: deque[tuple[float, float]] = field(default_factory=deque)
    _more_s: float | None = None
    """Time of the last load that needed all current servers."""
    _raised_s: float = -inf
    _raised_to: int = 0
    """When, and to how many servers, the scaler added one because attainment was below the
    prediction."""

    def decide(self, now_s: float, load: ClusterLoad) -> Decision:
        """Return the number of servers for this load."""
        self._samples.append((now_s, load.engines_needed))
        while self._samples[0][0] < now_s - TREND_WINDOW_S:
            self._samples.popleft()
        growth = self._growth(load.engines_needed)
        engines_needed, busy = load.engines_needed * growth, load.in_progress * growth
        servers, _ = servers_needed(self.target, engines_needed, busy)
        why = f"{engines_needed:.2f} engines are forecast for {busy:.0f} requests"
        if servers < (raised_servers := self._correction(now_s, load)):
            servers, why = (
                raised_servers,
                f"fewer requests met their objectives than predicted, though {why}",
            )
        if servers >= load.servers or self._more_s is None:
            self._more_s = now_s
        if servers < load.servers and now_s - self._more_s < DOWNSCALE_DELAY_S:
            servers, why = load.servers, f"{why}; fewer would do, it waits"
        elif servers < load.servers:
            servers, self._more_s = load.servers - 1, now_s
        servers = min(max(servers, self.target.least), self.target.most)
        share = predict_attainment(servers, engines_needed, busy, self.target.engines)
        return Decision(servers=servers, predicted=share, why=why)

    def _correction(self, now_s: float, load: ClusterLoad) -> int:
        """Return one server more than now if attainment is below the target, as the prediction is
        too high.

        Before another one is added, this one gets the time to be ready and to have an effect.
        Returns 0 if no correction is active.
        """
        is_over = now_s - self._raised_s >= self.target.lead_s + ATTAINMENT_WINDOW_S
        if is_over and load.attainment is not None and load.attainment < self.target.attainment:
            self._raised_s, self._raised_to = now_s, load.servers + 1
            return self._raised_to
        return 0 if is_over else self._raised_to

    def _growth(self, engines_needed: float) -> float:
        """Return the predicted growth of the load until a new server would be ready.

        It is the slope of a line through the last two minutes, at least 1 and at most 2.
        """
        if len(self._samples) < MIN_TREND_SAMPLES or engines_needed <= 0:
            return 1.0
        times = [at_s for at_s, _ in self._samples]
        values = [value for _, value in self._samples]
        mean_s, mean = sum(times) / len(times), sum(values) / len(values)
        spread = sum((at_s - mean_s) ** 2 for at_s in times)
        if spread <= 0:
            return 1.0
        slope = sum((t - mean_s) * (v - mean) for t, v in self._samples) / spread
        return min(max(1 + slope * self.target.lead_s / engines_needed, 1.0), 2.0)
