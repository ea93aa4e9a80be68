"""A format for each module: what is lost, what it costs, and the best choice under a budget.

The loss of a format is the KL of the model with this module alone rounded; losses add up to first
order. Worked example, two modules, at most 10 bytes:

    a   4 bytes 0.5 nats   8 bytes 0.1        from (4, 4) with 1.1 nats: b's step saves 0.5 nats for
    b   4 bytes 0.6 nats   6 bytes 0.1        2 bytes, a's 0.4 for 4, of which half would fit

b goes up: 10 bytes, 0.6 nats. Were modules divisible, nothing could do better: that is the bound.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.core.errors import UsageError
from headway.spec.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One module in one format: nats a token that are lost, bytes, seconds of a decode step."""

    format: Format
    kl: float
    num_bytes: float
    seconds: float = 0.0


Choices = Mapping[str, Sequence[Choice]]
Measure = Callable[[Choice], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The choice for each module, what it adds up to, and what no choice can go below."""

    chosen: Mapping[str, Choice]
    value: float
    spent: float
    bound: float


@dataclass(frozen=True, slots=True)
class Move:
    """A module from one choice to the next better one: what it saves, what it costs."""

    module: str
    to: Choice
    saves: float
    costs: float

    @property
    def rate(self) -> float:
        return self.saves / self.costs


def solve(choices: Choices, *, value: Measure, cost: Measure, budget: float) -> Found:
    """The least sum of `value` with a sum of `cost` within `budget`, nearly.

    Every module starts with its cheapest choice; moves along the lower hulls are taken in the order
    of what they save for what they cost. Raises UsageError when even the cheapest is too dear.
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
    return Found(chosen=chosen, value=total, spent=spent, bound=bound if stopped else total)


def hull(choices: Sequence[Choice], value: Measure, cost: Measure) -> list[Choice]:
    """The choices that some price makes best, the cheapest first."""
    line: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (cost(each), value(each))):
        if line and value(choice) >= value(line[-1]):
            continue
        while len(line) > 1 and above(line[-2], line[-1], choice, value, cost):
            line.pop()
        line.append(choice)
    return line


def above(a: Choice, b: Choice, c: Choice, value: Measure, cost: Measure) -> bool:
    """Whether b lies on or above the line from a to c."""
    direct = (value(c) - value(a)) * (cost(b) - cost(a))
    return (value(b) - value(a)) * (cost(c) - cost(a)) >= direct


def steps(module: str, line: Sequence[Choice], value: Measure, cost: Measure) -> list[Move]:
    """From each choice of a hull to the next."""
    return [
        Move(module, to, value(at) - value(to), max(cost(to) - cost(at), 1e-30))
        for at, to in pairwise(line)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is asked: one bound on cost, or one on KL (then `cost` says what is to be least)."""

    max_bytes: float | None = None
    max_seconds: float | None = None
    max_kl: float | None = None

    @property
    def by_seconds(self) -> bool:
        return self.max_seconds is not None

    def cost(self, choice: Choice) -> float:
        return choice.seconds if self.by_seconds else choice.num_bytes


def kl_of(choice: Choice) -> float:
    return choice.kl


def choose(choices: Choices, budget: Budget) -> Found:
    """The formats under this budget; a budget of KL and of cost: the KL, if the cost allows it."""
    limit = budget.max_seconds if budget.by_seconds else budget.max_bytes
    if budget.max_kl is None:
        assert limit is not None
        return solve(choices, value=kl_of, cost=budget.cost, budget=limit)
    found = solve(choices, value=budget.cost, cost=kl_of, budget=budget.max_kl)
    if limit is not None and found.value > limit:
        raise UsageError(
            f"A KL of {budget.max_kl:g} takes {found.value:.4g}; the budget is {limit:.4g}.",
            "Give a larger budget of one of the two.",
        )
    return found


def checked(
    choices: Choices,
    found: Found,
    budget: Budget,
    whole_kl: Callable[[Mapping[str, Choice]], float],
) -> tuple[dict[str, Choice], float]:
    """(choices, KL of the whole): the dearest modules go up until the whole is within the budget.

    Without a budget of KL the whole is measured once.
    """
    chosen = dict(found.chosen)
    kl = whole_kl(chosen)
    while budget.max_kl is not None and kl > budget.max_kl:
        moves = [
            move
            for module, at in chosen.items()
            for move in steps(module, from_here(choices[module], at, budget), kl_of, budget.cost)[
                :1
            ]
        ]
        if not moves:
            break
        best = max(moves, key=lambda move: move.rate)
        chosen[best.module] = best.to
        kl = whole_kl(chosen)
    return chosen, kl


def from_here(choices: Sequence[Choice], at: Choice, budget: Budget) -> list[Choice]:
    """The hull from one choice on."""
    better = [choice for choice in choices if choice.kl < at.kl]
    return [at, *hull(better, kl_of, budget.cost)]
