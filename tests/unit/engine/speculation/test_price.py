"""What drafting takes is learned from steps, whatever was expected."""

import pytest

from headway.engine.cost import StepCost
from headway.engine.speculation.price import DraftPrice


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
