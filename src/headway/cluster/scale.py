"""How many servers a traffic wants: by the attainment that is predicted with so many.

Given how many engines the traffic asks for (`now.engines_asked` of `/stats`: at the promised pace)
and how many requests are in progress at a time, it predicts the share that meets its objectives
with each number of servers. Requests in progress are Poisson whatever their lengths (M/G/inf), each
takes its share of an engine, and whoever comes while all shares are taken is late. Worked example,
2.4 engines asked by 48 requests, so 0.05 each:

    3 servers    room for 60   P(Poisson(48) < 60) = 0.95
    4 servers    room for 80   P(Poisson(48) < 80) = 1.00

Scaled up at once, to what is forecast for when a new server would be ready; down by one, where
nothing asked for more for a while.
"""

from collections import deque
from dataclasses import dataclass, field
from math import erf, exp, inf, sqrt

KEPT_S = 120.0
"""The trend is that of the last two minutes."""
FEW_SAMPLES = 5
PATIENCE_S = 300.0
"""So long fewer servers have to do before one goes."""
SETTLES_S = 60.0
"""What is met of late is told over a minute: so long a new server is waited for."""
NOTHING = 1e-12
NORMAL_FROM = 400.0
"""A Poisson mean from which the normal distribution is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the servers of a model told together.

    `asked` engines by `in_progress` requests; `attainment` is the share that met its objectives of
    late, None where none was judged. `servers` are ready.
    """

    asked: float
    in_progress: float
    servers: int
    attainment: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is promised and what may be used: `engines` a server, `lead_s` until one is ready."""

    attainment: float = 0.95
    least: int = 1
    most: int = 8
    engines: int = 1
    lead_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """So many servers, the attainment that is predicted with them, and why in a sentence."""

    servers: int
    predicted: float
    why: str


def below(count: int, mean: float) -> float:
    """The probability that a Poisson number of this mean is below `count`."""
    if mean > NORMAL_FROM:
        return 0.5 * (1 + erf((count - 0.5 - mean) / sqrt(2 * mean)))
    term, total = exp(-mean), 0.0
    for number in range(count):
        total += term
        term *= mean / (number + 1)
        if number > mean and term < NOTHING:
            break
    return min(total, 1.0)


def predicted(servers: int, asked: float, in_progress: float, engines: int = 1) -> float:
    """The share of requests that find room, where `in_progress` take `asked` engines."""
    if asked <= 0 or in_progress <= 0:
        return 1.0
    fullness = asked / (servers * engines)
    if fullness < NOTHING:
        return 1.0
    return below(round(in_progress / fullness), in_progress)


def wanted(target: Target, asked: float, in_progress: float) -> tuple[int, float]:
    """(the fewest servers that keep the target, what is predicted with them)."""
    for servers in range(target.least, target.most + 1):
        share = predicted(servers, asked, in_progress, target.engines)
        if share >= target.attainment or servers == target.most:
            return servers, share
    raise AssertionError("least is beyond most")


@dataclass(slots=True)
class Scaler:
    """Decides from one load after the other; what it says depends on what it was told alone."""

    target: Target
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _more_s: float | None = None
    """When as many servers as there are were wanted last."""
    _raised_s: float = -inf
    _raised_to: int = 0
    """When one was added because fewer requests met their objectives than predicted, and to how
    many."""

    def decide(self, now_s: float, load: Load) -> Decision:
        """How many servers there should be."""
        self._seen.append((now_s, load.asked))
        while self._seen[0][0] < now_s - KEPT_S:
            self._seen.popleft()
        growth = self._growth(load.asked)
        asked, busy = load.asked * growth, load.in_progress * growth
        servers, _ = wanted(self.target, asked, busy)
        why = f"{asked:.2f} engines are forecast for {busy:.0f} requests"
        if servers < (raised := self._raised(now_s, load)):
            servers, why = (
                raised,
                f"fewer requests met their objectives than predicted, though {why}",
            )
        if servers >= load.servers or self._more_s is None:
            self._more_s = now_s
        if servers < load.servers and now_s - self._more_s < PATIENCE_S:
            servers, why = load.servers, f"{why}; fewer would do, it waits"
        elif servers < load.servers:
            servers, self._more_s = load.servers - 1, now_s
        servers = min(max(servers, self.target.least), self.target.most)
        share = predicted(servers, asked, busy, self.target.engines)
        return Decision(servers=servers, predicted=share, why=why)

    def _raised(self, now_s: float, load: Load) -> int:
        """One more than there were when less was met than promised: the prediction is too hopeful.

        That one has the time to be ready and to show, before the next is added; 0 where none was.
        """
        is_over = now_s - self._raised_s >= self.target.lead_s + SETTLES_S
        if is_over and load.attainment is not None and load.attainment < self.target.attainment:
            self._raised_s, self._raised_to = now_s, load.servers + 1
            return self._raised_to
        return 0 if is_over else self._raised_to

    def _growth(self, asked: float) -> float:
        """By how much more is asked when a new server would be ready: the line through the last
        two minutes, never downwards, at most twice."""
        if len(self._seen) < FEW_SAMPLES or asked <= 0:
            return 1.0
        times = [at_s for at_s, _ in self._seen]
        values = [value for _, value in self._seen]
        mean_s, mean = sum(times) / len(times), sum(values) / len(values)
        spread = sum((at_s - mean_s) ** 2 for at_s in times)
        if spread <= 0:
            return 1.0
        slope = sum((t - mean_s) * (v - mean) for t, v in self._seen) / spread
        return min(max(1 + slope * self.target.lead_s / asked, 1.0), 2.0)
