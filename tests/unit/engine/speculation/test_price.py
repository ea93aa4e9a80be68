"""What drafting takes is learned from steps, whatever was expected."""

import pytest

from headway.engine.cost import StepCost
from headway.engine.speculation.price import DraftPrice


def test_heads_that_are_dearer_than_expected_are_soon_known_to_be():
    """Three times as dear: after 40 steps that is known, but for what is left of the prior."""
    price = DraftPrice(StepCost(), 0.3, at_once=True)
    expected = price.drafting
    real_s = 3 * (expected.pass_s + 4 * expected.row_s)
    for _ in range(40):
        price.observe(4, 4, real_s)
    assert price.drafting.pass_s + 4 * price.drafting.row_s == pytest.approx(real_s, rel=0.16)


@pytest.mark.parametrize("at_once", [False, True], ids=["draft model", "heads"])
def test_a_pass_and_a_row_are_learned(at_once: bool):
    """Seen: 2 ms a pass and 0.5 ms a row; a model takes a pass for each depth, heads one."""
    price = DraftPrice(StepCost(), 0.3, at_once=at_once)
    for number in range(300):
        depth, sequences = 1 + number % 4, 1 + number % 3
        passes = 1 if at_once else depth
        price.observe(depth, depth * sequences, 2e-3 * passes + 5e-4 * depth * sequences)
    drafting = price.drafting
    assert drafting.at_once == at_once
    assert drafting.pass_s == pytest.approx(2e-3, rel=0.05)
    assert drafting.row_s == pytest.approx(5e-4, rel=0.05)


def test_being_asked_costs_though_little_is_guessed():
    """The first pass computes what came since: 1 ms for being asked, 0.1 ms a pass. One guess takes
    as long as eight at two thirds of their price."""
    price = DraftPrice(StepCost(), 0.03)
    for number in range(200):
        depth = (1, 1, 2, 4, 8)[number % 5]
        price.observe(depth, depth * (1 + number % 2), 1e-3 + 1e-4 * depth)
    drafting = price.drafting
    assert drafting.seconds(1) + drafting.row_s == pytest.approx(1.1e-3, rel=0.05)
    assert drafting.seconds(8) + 8 * drafting.row_s == pytest.approx(1.8e-3, rel=0.05)
