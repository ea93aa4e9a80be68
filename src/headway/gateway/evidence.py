"""Whether bad events are more frequent in one arm than in the other, told at any time.

    blocks of requests     control ✓ ✓ ✗ ✓ … ✓    canary ✗
    evidence of a block    P(block | bet: the canary is worse) / P(block | both alike)

The evidence multiplies from block to block. While the canary is no worse, whatever the rate is and
however it moves, it passes 1 / alpha at any time with probability alpha at most (Ville), so it may
be looked at after each request. Source: R. Turner, A. Ly, P. Grünwald, "Generic E-variables for
exact sequential k-sample tests that allow for optional stopping", 2021, for Bernoulli streams.
Their variable is for equal rates; a bet that the canary is worse holds for all that are lower too:
its first factor falls with the control's rate, its second rises with the canary's.
"""

import math
from dataclasses import dataclass, field

BETS = ((0.03, 0.1), (0.08, 0.2), (0.2, 0.5), (0.5, 0.15), (0.95, 0.05))
"""(how much of what is good in the control is bad in the canary, weight): a mixture."""
PRIOR_BAD, PRIOR_ALL = 0.1, 4.0
MEMORY = 2000
"""Requests of the control that its rate is learned from; the rate of a service moves."""


@dataclass(slots=True)
class Block:
    """Requests of each arm, and the bad ones among them."""

    control: int = 0
    control_bad: int = 0
    canary: int = 0
    canary_bad: int = 0


@dataclass(slots=True)
class Evidence:
    """Evidence that one kind of bad event is more frequent in the canary."""

    sums: Block = field(default_factory=Block)
    value: float = 1.0
    """The evidence now: 1 says nothing, less speaks for the canary."""
    _logs: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
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
        rate = self._bad / self._all
        for number, (more, _) in enumerate(BETS):
            worse = rate + more * (1 - rate)
            self._logs[number] += log_ratio(block, rate, worse)
        pairs = zip(self._logs, BETS, strict=True)
        self.value = sum(weight * math.exp(min(log, 300.0)) for log, (_, weight) in pairs)
        self._bad += block.control_bad
        self._all += block.control
        if self._all > MEMORY:
            self._bad, self._all = self._bad * MEMORY / self._all, float(MEMORY)

    def check_integrity(self) -> None:
        assert 0 <= self.sums.control_bad <= self.sums.control
        assert 0 <= self.sums.canary_bad <= self.sums.canary
        assert 0 < self._bad < self._all and self.value >= 0
        assert not (self._block.control and self._block.canary)


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
