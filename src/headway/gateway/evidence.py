"""Whether bad events are more frequent in one arm than in the other, told at any time.

    blocks of requests     control ✓ ✓ ✗ ✓ … ✓    canary ✗
    evidence of a block    P(block | bet: the canary is worse) / P(block | both alike)

The evidence multiplies from block to block. While the canary is no worse, whatever the rate is and
however it moves, it passes 1 / alpha at any time with probability alpha at most (Ville), so it may
be looked at after each request. Source: R. Turner, A. Ly, P. Grünwald, "Generic E-variables for
exact sequential k-sample tests that allow for optional stopping", 2021, for Bernoulli streams.
Their variable is for equal rates; a bet that the canary is worse holds for all that are lower too:
its first factor falls with the control's rate, its second rises with the canary's.

Any bet is fair that is placed before its block. Most of the stake is on plans that are to be done
by a request of the canary (`PLANS`): the best test of that many looks once, at the end, and a plan
bets so that it has its price there if that test has (T. Breiman, "Optimal gambling systems for
favorable games", 1961, ends with such a goal by a deadline). What it has left behind its last
request is bet on one rate, or it would speak against a canary for ever. The rest is on a mixture of
rates, which finds small differences in the long run.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate

PLANS = ((30, 0.6), (60, 0.2))
"""(request of the canary by which it is to be done, share of the stake)."""
BETS = ((0.03, 0.02), (0.08, 0.04), (0.2, 0.1), (0.5, 0.03), (0.95, 0.01))
"""(how much of what is good in the control is bad in the canary, share of the stake)."""
AFTERWARDS = 0.08
"""The same of a plan that is over."""
PRIOR_BAD, PRIOR_ALL = 0.5, 10.0
MEMORY = 2000
"""Requests of the control that its rate is learned from; the rate of a service moves."""
SUREST, NEARLY = 0.999, 1 + 1e-9
"""The highest rate that a plan bets on; a price that is rounded off is still the price."""


@dataclass(slots=True)
class Block:
    """Requests of each arm, and the bad ones among them."""

    control: int = 0
    control_bad: int = 0
    canary: int = 0
    canary_bad: int = 0


@dataclass(slots=True)
class Evidence:
    """Evidence that one kind of bad event is more frequent in the canary; `bound` is enough."""

    bound: float = 100.0
    sums: Block = field(default_factory=Block)
    value: float = 1.0
    """The evidence now: 1 says nothing, less speaks for the canary."""
    _logs: list[float] = field(default_factory=lambda: [0.0] * (len(PLANS) + len(BETS)))
    _block: Block = field(default_factory=Block)
    _bad: float = PRIOR_BAD
    _all: float = PRIOR_ALL

    def add(self, canary: bool, bad: bool) -> None:
        """One request of an arm has ended."""
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
        """A block has requests of both arms: bets are on rates that were known before it."""
        block, self._block = self._block, Block()
        rate, before = self._bad / self._all, self.sums.canary - block.canary
        shares = [share for _, share in (*PLANS, *BETS)]
        values = [s * math.exp(log) for s, log in zip(shares, self._logs, strict=True)]
        bets = [
            planned(rate, last - before, value / self.bound)
            if last > before
            else rate + AFTERWARDS * (1 - rate)
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
        if self._all > MEMORY:
            self._bad, self._all = self._bad * MEMORY / self._all, float(MEMORY)

    def check_integrity(self) -> None:
        assert 0 <= self.sums.control_bad <= self.sums.control
        assert 0 <= self.sums.canary_bad <= self.sums.canary
        assert 0 < self._bad < self._all and self.value >= 0
        assert not (self._block.control and self._block.canary)


def planned(rate: float, remaining: int, price: float) -> float:
    """The canary's rate that a plan bets on, with so many requests left; `rate` is no bet.

    It has `price` of what it is to reach, so it is reached by so many bad ones of those left as
    healthy ones show with at most this chance. Rate 0.05, 30 left, 0.004: six, which have 0.0033,
    or 0.0155 once the next one is bad: that is bet to be 0.0155 / 0.0033 = 4.7 times likelier.
    """
    if remaining <= 0 or price >= 1:
        return rate
    chances = at_least(remaining, rate)
    need = next((k for k, chance in enumerate(chances) if chance <= price * NEARLY), 0)
    if not need:
        return rate
    return min(SUREST, rate * at_least(remaining - 1, rate)[need - 1] / chances[need])


def at_least(count: int, rate: float) -> list[float]:
    """The chance of k or more bad ones among `count`, for k = 0 … count."""
    one, exactly = (1 - rate) ** count, []
    for bad in range(count + 1):
        exactly.append(one)
        one *= (count - bad) / (bad + 1) * rate / (1 - rate)
    return list(accumulate(reversed(exactly)))[::-1]


def log_ratio(block: Block, control: float, canary: float) -> float:
    """The logarithm of a block's evidence for these two rates against one that is their mean.

    1 control request that is good, 1 canary's that is bad, rates 0.1 and 0.5, both alike 0.3:
    log(0.9 x 0.5 / (0.7 x 0.3)) = log 2.14
    """
    alike = (block.control * control + block.canary * canary) / (block.control + block.canary)
    return (
        block.control_bad * math.log(control / alike)
        + (block.control - block.control_bad) * math.log((1 - control) / (1 - alike))
        + block.canary_bad * math.log(canary / alike)
        + (block.canary - block.canary_bad) * math.log((1 - canary) / (1 - alike))
    )
