"""The search for formats: against every combination, its own bound, and a whole that loses more."""

import random
from collections.abc import Mapping
from itertools import product

import pytest

from headway.compress.search import (
    Budget,
    FormatOption,
    choose,
    hull,
    kl_of,
    solve,
    within_budget,
)
from headway.core.errors import UsageError
from headway.spec.formats import PLAIN, Format

FORMATS = (Format("int4", 128), Format("int4", 64), Format("int8"), PLAIN)


def size_of(choice: FormatOption) -> float:
    return choice.num_bytes


def drawn(rng: random.Random, modules: int) -> dict[str, list[FormatOption]]:
    """Modules whose losses fall with their bytes, some of them not worth it."""
    found = {}
    for number in range(modules):
        sizes = sorted(rng.randint(1, 40) for _ in FORMATS)
        losses = sorted((rng.random() for _ in FORMATS), reverse=True)
        found[f"m{number}"] = [
            FormatOption(format=format, kl=loss, num_bytes=size, seconds=size / 10)
            for format, loss, size in zip(FORMATS, losses, sizes, strict=True)
        ]
    return found


def best(choices: Mapping[str, list[FormatOption]], budget: float) -> float:
    """The least loss of all combinations within the budget."""
    fitting = [
        sum(choice.kl for choice in combination)
        for combination in product(*choices.values())
        if sum(choice.num_bytes for choice in combination) <= budget
    ]
    return min(fitting)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_better_than_the_bound(seed: int):
    """bound ≤ best of all ≤ found, and found spends what it says, within the budget."""
    rng = random.Random(seed)
    choices = drawn(rng, 5)
    least = sum(min(c.num_bytes for c in of) for of in choices.values())
    budget = least + rng.randint(0, 60)
    found = solve(choices, value=kl_of, cost=size_of, budget=budget)
    assert found.spent == pytest.approx(sum(c.num_bytes for c in found.chosen.values()))
    assert found.value == pytest.approx(sum(c.kl for c in found.chosen.values()))
    assert found.spent <= budget + 1e-9
    assert found.bound <= best(choices, budget) + 1e-9 <= found.value + 2e-9


def test_the_example_of_the_module():
    choices = {
        "a": [
            FormatOption(format=Format("int4", 64), kl=0.5, num_bytes=4),
            FormatOption(format=Format("int8"), kl=0.1, num_bytes=8),
        ],
        "b": [
            FormatOption(format=Format("int4", 64), kl=0.6, num_bytes=4),
            FormatOption(format=Format("int8"), kl=0.1, num_bytes=6),
        ],
    }
    found = solve(choices, value=kl_of, cost=size_of, budget=10)
    assert {name: c.format.kind for name, c in found.chosen.items()} == {"a": "int4", "b": "int8"}
    assert (found.spent, found.value) == (10, pytest.approx(0.6))
    found = solve(choices, value=kl_of, cost=size_of, budget=12)
    assert found.bound == pytest.approx(0.6 - 0.1 * 2)  # half of a's step


def test_a_choice_that_no_price_makes_best_is_left_out():
    line = hull(
        [
            FormatOption(format=Format("int4", 64), kl=1.0, num_bytes=1),
            FormatOption(format=Format("int4", 32), kl=0.9, num_bytes=2),  # above the line
            FormatOption(format=Format("int8"), kl=0.0, num_bytes=3),
            FormatOption(format=PLAIN, kl=0.0, num_bytes=9),  # no better
        ],
        kl_of,
        size_of,
    )
    assert [choice.num_bytes for choice in line] == [1, 3]


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(UsageError, match="cheapest formats take"):
        solve(drawn(random.Random(1), 3), value=kl_of, cost=size_of, budget=1)


def least(choices: Mapping[str, list[FormatOption]]) -> float:
    """The loss of the dearest formats."""
    return sum(min(choice.kl for choice in of) for of in choices.values())


def test_a_budget_of_loss_takes_the_least_bytes():
    choices = drawn(random.Random(3), 5)
    limit = 1.2 * least(choices)
    found = choose(choices, Budget(max_kl=limit))
    assert sum(choice.kl for choice in found.chosen.values()) <= limit
    seconds = sum(min(c.seconds for c in of) for of in choices.values()) + 2
    by_seconds = choose(choices, Budget(max_seconds=seconds))
    assert sum(choice.seconds for choice in by_seconds.chosen.values()) <= seconds
    with pytest.raises(UsageError, match="takes"):
        choose(choices, Budget(max_kl=limit, max_bytes=found.value - 1))


def test_modules_go_up_until_the_whole_is_within_the_budget():
    """The whole loses twice what the modules alone do: the search goes on until it fits."""
    choices = drawn(random.Random(4), 5)
    budget = Budget(max_kl=3 * least(choices))
    measured = []

    def whole(chosen: Mapping[str, FormatOption]) -> float:
        measured.append(2 * sum(choice.kl for choice in chosen.values()))
        return measured[-1]

    chosen, kl = within_budget(choices, choose(choices, budget), budget, whole)
    assert budget.max_kl is not None and kl <= budget.max_kl
    assert len(measured) > 1
    assert sorted(measured, reverse=True) == measured
    assert kl == 2 * sum(choice.kl for choice in chosen.values())


def test_a_whole_that_never_fits_ends():
    choices = drawn(random.Random(5), 3)
    budget = Budget(max_kl=1.2 * least(choices))
    chosen, kl = within_budget(choices, choose(choices, budget), budget, lambda chosen: 9.0)
    assert kl == 9.0
    assert all(at.kl == min(c.kl for c in choices[name]) for name, at in chosen.items())
