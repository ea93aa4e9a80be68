"""Select a format for each module under a budget, by loss and cost.

The loss of a format is the KL of the model with only this module rounded; to first order, losses
are additive. Example with two modules and at most 10 bytes:

    a   4 bytes 0.5 nats   8 bytes 0.1        start (4, 4), 1.1 nats: b's step saves 0.5 nats for
    b   4 bytes 0.6 nats   6 bytes 0.1        2 bytes; a's saves 0.4 for 4, of which half would fit

b is raised: 10 bytes, 0.6 nats. If modules were divisible, nothing could be better: this is the
bound.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.core.errors import UsageError
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOption:
    """One module in one format: loss in nats per token, bytes, seconds of a decode step."""

    format: Format
    kl: float
    num_bytes: float
    seconds: float = 0.0


FormatOptions = Mapping[str, Sequence[FormatOption]]
Measure = Callable[[FormatOption], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The selected option of each module, the sums, and a lower bound for any selection."""

    chosen: Mapping[str, FormatOption]
    value: float
    spent: float
    bound: float


@dataclass(frozen=True, slots=True)
class Move:
    """The step of a module from one option to the next better one."""

    module: str
    to: FormatOption
    saves: float
    costs: float

    @property
    def rate(self) -> float:
        return self.saves / self.costs


def solve(choices: FormatOptions, *, value: Measure, cost: Measure, budget: float) -> Allocation:
    """Minimize the sum of `value` with a sum of `cost` within `budget`, nearly optimally.

    Every module starts with its cheapest option; steps along the lower hulls are taken in the order
    of saving per cost. Raises UsageError if even the cheapest options exceed the budget.
    """
    hulls = {module: hull(of, value, cost) for module, of in choices.items()}
    chosen = {module: line[0] for module, line in hulls.items()}
    spent = sum(cost(choice) for choice in chosen.values())
    if spent > budget * (1 + 1e-9):
        raise UsageError(
            f"The cheapest formats take {spent:.4g}; the budget is {budget:.4g}.",
            "Give a larger budget.",
        )
    total = sum(value(choice) for choice in chosen.values())
    bound, stopped = total, False
    moves = [move for module, line in hulls.items() for move in steps(module, line, value, cost)]
    blocked: set[str] = set()
    for move in sorted(moves, key=lambda move: -move.rate):
        room = budget - spent
        if not stopped and move.costs > room:
            bound, stopped = total - move.rate * room, True
        if move.module in blocked or move.costs > room:
            blocked.add(move.module)
            continue
        chosen[move.module] = move.to
        spent, total = spent + move.costs, total - move.saves
    return Allocation(chosen=chosen, value=total, spent=spent, bound=bound if stopped else total)


def hull(choices: Sequence[FormatOption], value: Measure, cost: Measure) -> list[FormatOption]:
    """Return the lower convex hull of the options, the cheapest first."""
    line: list[FormatOption] = []
    for choice in sorted(choices, key=lambda each: (cost(each), value(each))):
        if line and value(choice) >= value(line[-1]):
            continue
        while len(line) > 1 and above(line[-2], line[-1], choice, value, cost):
            line.pop()
        line.append(choice)
    return line


def above(a: FormatOption, b: FormatOption, c: FormatOption, value: Measure, cost: Measure) -> bool:
    """Whether b is on or above the line from a to c."""
    direct = (value(c) - value(a)) * (cost(b) - cost(a))
    return (value(b) - value(a)) * (cost(c) - cost(a)) >= direct


def steps(module: str, line: Sequence[FormatOption], value: Measure, cost: Measure) -> list[Move]:
    """Return the steps from each option of a hull to the next."""
    return [
        Move(module, to, value(at) - value(to), max(cost(to) - cost(at), 1e-30))
        for at, to in pairwise(line)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A bound on bytes or on seconds, or one on KL; with `max_kl`, `cost` is minimized."""

    max_bytes: float | None = None
    max_seconds: float | None = None
    max_kl: float | None = None

    @property
    def by_seconds(self) -> bool:
        return self.max_seconds is not None

    def cost(self, choice: FormatOption) -> float:
        return choice.seconds if self.by_seconds else choice.num_bytes


def kl_of(choice: FormatOption) -> float:
    return choice.kl


def choose(choices: FormatOptions, budget: Budget) -> Allocation:
    """Select formats under the budget; with bounds on KL and cost, the KL's, if the cost allows
    it."""
    limit = budget.max_seconds if budget.by_seconds else budget.max_bytes
    if budget.max_kl is None:
        assert limit is not None
        return solve(choices, value=kl_of, cost=budget.cost, budget=limit)
    allocation = solve(choices, value=budget.cost, cost=kl_of, budget=budget.max_kl)
    if limit is not None and allocation.value > limit:
        raise UsageError(
            f"A KL of {budget.max_kl:g} takes {allocation.value:.4g}; the budget is {limit:.4g}.",
            "Give a larger budget of one of the two.",
        )
    return allocation


def within_budget(
    choices: FormatOptions,
    allocation: Allocation,
    budget: Budget,
    whole_kl: Callable[[Mapping[str, FormatOption]], float],
) -> tuple[dict[str, FormatOption], float]:
    """Raise modules to better formats until the measured KL of the whole is within the budget.

    Returns (options, KL of the whole). Without a bound on KL the whole is measured once.
    """
    chosen = dict(allocation.chosen)
    kl = whole_kl(chosen)
    while budget.max_kl is not None and kl > budget.max_kl:
        moves = [
            move
            for module, at in chosen.items()
            for move in steps(module, hull_from(choices[module], at, budget), kl_of, budget.cost)[
                :1
            ]
        ]
        if not moves:
            break
        best = max(moves, key=lambda move: move.rate)
        chosen[best.module] = best.to
        kl = whole_kl(chosen)
    return chosen, kl


def hull_from(
    choices: Sequence[FormatOption], at: FormatOption, budget: Budget
) -> list[FormatOption]:
    """Return the hull from one option on."""
    better = [choice for choice in choices if choice.kl < at.kl]
    return [at, *hull(better, kl_of, budget.cost)]
