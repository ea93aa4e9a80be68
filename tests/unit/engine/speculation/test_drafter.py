"""What drafting takes is learned from steps, whatever was expected; a failure pauses it."""

import pytest

from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample, StepResult, StepTimings
from headway.engine.speculation.proposers.draft import OFF, PAUSES_S, DrafterCost, DraftProposer
from headway.perf.model import StepModel


def test_heads_that_are_slower_than_expected_are_soon_known_to_be():
    """Three times as slow: after 40 steps that is known, but for the weight of the prior."""
    cost = DrafterCost(StepModel(), 0.3, at_once=True)
    real_s = 3 * cost.drafting.seconds(4)
    for _ in range(40):
        cost.observe(4, real_s)
    assert cost.drafting.seconds(4) == cost.drafting.seconds(1) == pytest.approx(real_s, rel=0.16)


def test_being_asked_and_a_pass_are_learned():
    """Seen: 1 ms for being asked, 2 ms a pass."""
    cost = DrafterCost(StepModel(), 0.3)
    for number in range(300):
        depth = (1, 1, 2, 4, 8)[number % 5]
        cost.observe(depth, 1e-3 + 2e-3 * depth)
    assert cost.drafting.seconds(1) == pytest.approx(3e-3, rel=0.1)
    assert cost.drafting.seconds(8) == pytest.approx(17e-3, rel=0.05)
    assert cost.drafting.seconds(0) == 0


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_one_depth_alone_tells_what_that_depth_takes(depth: int):
    cost = DrafterCost(StepModel(), 0.01)
    for _ in range(300):
        cost.observe(depth, 0.02)
    assert cost.drafting.seconds(depth) == pytest.approx(0.02, rel=0.1)
    assert 0 <= cost.drafting.seconds(1) <= cost.drafting.seconds(8)


def test_a_step_that_computes_a_long_prompt_first_counts_little():
    cost = DrafterCost(StepModel(), 0.3)
    for _ in range(50):
        cost.observe(4, 0.01)
    cost.observe(4, 10.0)
    assert cost.drafting.seconds(4) < 0.012


def failing() -> StepResult:
    return StepResult(0, [], draft_failure="RuntimeError: no")


def test_a_drafter_that_fails_is_asked_again_later_and_in_the_end_no_more():
    drafter = DraftProposer(SpeculationConfig(sources=("draft",), draft_share=0.1), StepModel())
    assert drafter.is_available(1.0) and not drafter.failure
    for pause_s in PAUSES_S:
        drafter.end_step(failing())
        assert f"asked again after {pause_s:.0f} s" in drafter.failure
        steps = [drafter.is_available(1.0) for _ in range(int(pause_s))]
        assert steps == [False] * (int(pause_s) - 1) + [True]
    drafter.end_step(failing())
    assert drafter.failure.endswith(OFF)
    assert not any(drafter.is_available(1e6) for _ in range(100))


def test_one_good_step_clears_the_failure():
    drafter = DraftProposer(SpeculationConfig(sources=("draft",), draft_share=0.1), StepModel())
    drafter.end_step(failing())
    good = StepResult(1, [Sample(1, [5], drafts=[6])], timings=StepTimings(draft_s=0.001))
    drafter.end_step(good)
    assert not drafter.failure
