"""Sequential test whether bad events are more frequent in the canary than in the control.

    blocks of requests     control ✓ ✓ ✗ ✓ … ✓    canary ✗
    evidence of a block    P(block | bet: the canary is worse) / P(block | both alike)

The evidence multiplies from block to block. If the canary is no worse, then for any rate, constant
or not, it ever passes 1 / alpha with probability alpha at most (Ville), so the test may be read
after each request. Source: R. Turner, A. Ly, P. Grünwald, "Generic E-variables for exact sequential
k-sample tests that allow for optional stopping", 2021, for Bernoulli streams. Their variable is for
equal rates; a bet that the canary is worse is valid for all lower rates too: its first factor falls
with the control's rate, its second rises with the canary's.

Any bet is valid that is placed before its block. Most of the stake is on plans with a deadline in
canary requests (`PLANS`). The best test of that size looks once, at the end, and a plan bets so
that it reaches its goal exactly if that test rejects (T. Breiman, "Optimal gambling systems for
favorable games", 1961, ends with such a goal by a deadline). After its deadline the rest of a
plan's stake is bet on one rate, or it would count against the canary for ever. The remaining stake
is on a mixture of rates, which finds small differences in the long run.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate

PLANS = ((30, 0.6), (60, 0.2))
"""(deadline in canary requests, share of the stake)."""
BETS = ((0.03, 0.02), (0.08, 0.04), (0.2, 0.1), (0.5, 0.03), (0.95, 0.01))
"""(share of the control's good events that are bad in the canary, share of the stake)."""
RATE_AFTER_DEADLINE = 0.08
"""The same share for a plan after its deadline."""
PRIOR_BAD, PRIOR_ALL = 0.5, 10.0
CONTROL_MEMORY = 2000
"""Control requests in the running estimate of its rate, because the rate of a service changes."""
MAX_BET_RATE, PRICE_TOLERANCE = 0.999, 1 + 1e-9
"""Maximum rate of a plan's bet; tolerance for rounding when a price is compared."""


@dataclass(slots=True)
class ArmCounts:
    """Counts of requests and of bad requests in each arm."""

    control: int = 0
    control_bad: int = 0
    canary: int = 0
    canary_bad: int = 0


@dataclass(slots=True)
class CanaryEvidence:
    """Evidence for one kind of bad event; at `bound` the canary is rolled back."""

    bound: float = 100.0
    sums: ArmCounts = field(default_factory=ArmCounts)
    value: float = 1.0
    """Current evidence: 1 is neutral, less favours the canary."""
    _logs: list[float] = field(default_factory=lambda: [0.0] * (len(PLANS) + len(BETS)))
    _block: ArmCounts = field(default_factory=ArmCounts)
    _bad: float = PRIOR_BAD
    _all: float = PRIOR_ALL

    def add(self, canary: bool, bad: bool) -> None:
        """Count a finished request of an arm."""
        for block in (self.sums, self._block):
            if canary:
                block.canary += 1
                block.canary_bad += bad
            else:
                block.control += 1
                block.control_bad += bad
        if self._block.control and self._block.canary:
            self._close()

    def _close(self) -> None:
        """Close a block with requests of both arms; bets use rates known before it."""
        block, self._block = self._block, ArmCounts()
        rate, before = self._bad / self._all, self.sums.canary - block.canary
        shares = [share for _, share in (*PLANS, *BETS)]
        values = [s * math.exp(log) for s, log in zip(shares, self._logs, strict=True)]
        bets = [
            plan_rate(rate, last - before, value / self.bound)
            if last > before
            else rate + RATE_AFTER_DEADLINE * (1 - rate)
            for (last, _), value in zip(PLANS, values, strict=False)
        ]
        bets += [rate + more * (1 - rate) for more, _ in BETS]
        for number, bet in enumerate(bets):
            if bet > rate:
                self._logs[number] += log_ratio(block, rate, bet)
        pairs = zip(self._logs, shares, strict=True)
        self.value = sum(share * math.exp(min(log, 300.0)) for log, share in pairs)
        self._bad += block.control_bad
        self._all += block.control
        if self._all > CONTROL_MEMORY:
            self._bad, self._all = self._bad * CONTROL_MEMORY / self._all, float(CONTROL_MEMORY)

    def check_integrity(self) -> None:
        assert 0 <= self.sums.control_bad <= self.sums.control
        assert 0 <= self.sums.canary_bad <= self.sums.canary
        assert 0 < self._bad < self._all and self.value >= 0
        assert not (self._block.control and self._block.canary)


def plan_rate(rate: float, remaining: int, price: float) -> float:
    """Return the canary's rate that a plan bets on, with `remaining` requests; `rate` is no bet.

    The plan has a fraction `price` of its goal. It is reached by a number of bad events whose
    probability under `rate` is at most `price`. Rate 0.05, 30 remaining, price 0.004: six bad
    events, with probability 0.0033, or 0.0155 after one more bad event, so the bet is that the next
    one is 0.0155 / 0.0033 = 4.7 times likelier.
    """
    if remaining <= 0 or price >= 1:
        return rate
    chances = tail_probabilities(remaining, rate)
    need = next((k for k, chance in enumerate(chances) if chance <= price * PRICE_TOLERANCE), 0)
    if not need:
        return rate
    return min(
        MAX_BET_RATE, rate * tail_probabilities(remaining - 1, rate)[need - 1] / chances[need]
    )


def tail_probabilities(count: int, rate: float) -> list[float]:
    """Return the probability of k or more bad events among `count`, for k = 0 … count."""
    one, exactly = (1 - rate) ** count, []
    for bad in range(count + 1):
        exactly.append(one)
        one *= (count - bad) / (bad + 1) * rate / (1 - rate)
    return list(accumulate(reversed(exactly)))[::-1]


def log_ratio(block: ArmCounts, control: float, canary: float) -> float:
    """Return the log evidence of a block for these two rates against both at their mean.

    1 good control request, 1 bad canary request, rates 0.1 and 0.5, mean 0.3:
    log(0.9 x 0.5 / (0.7 x 0.3)) = log 2.14
    """
    alike = (block.control * control + block.canary * canary) / (block.control + block.canary)
    return (
        block.control_bad * math.log(control / alike)
        + (block.control - block.control_bad) * math.log((1 - control) / (1 - alike))
        + block.canary_bad * math.log(canary / alike)
        + (block.canary - block.canary_bad) * math.log((1 - canary) / (1 - alike))
    )
