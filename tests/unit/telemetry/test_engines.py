"""What is kept of each engine: the snapshot of its cost model, and what it predicts of answers."""

import msgspec
import pytest

from headway.core.clock import VirtualClock
from headway.perf.model import StepModel
from telemetry_cases import step, telemetry

SNAPSHOT = StepModel().snapshot()


def test_an_answers_token_takes_its_share_of_a_predicted_decode_step():
    """Steps with prompts and those without a prediction say nothing; engines count alike."""
    live = telemetry(VirtualClock())
    live.on_step(step(0))
    live.on_step(step(1, num_tokens=50, predicted_s=9.0))
    assert live.engines.answer_s == 0
    live.on_step(step(2, predicted_s=0.008))
    assert live.engines.answer_s == pytest.approx(0.002), "4 rows in 8 ms"
    drafts = {"num_tokens": 12, "num_decode_tokens": 12, "num_drafts": 8, "num_kept_drafts": 4}
    live.on_step(step(3, predicted_s=0.016, engine=1, **drafts))
    assert live.engines.answer_s == pytest.approx((0.002 + 0.016 / 8) / 2), "2 tokens for each row"
    live.on_step(step(4, predicted_s=0.004, engine=1))
    assert live.engines.answer_s == pytest.approx((0.002 + 0.001) / 2)
    live.on_death(1)
    assert live.engines.answer_s == pytest.approx(0.002)


def test_the_newest_snapshot_of_each_living_engine_is_kept():
    live = telemetry(VirtualClock())
    first, second, other = (msgspec.structs.replace(SNAPSHOT, num_observed=n) for n in (1, 2, 3))
    live.on_step(step(0, model=first))
    live.on_step(step(1))
    live.on_step(step(2, model=other, engine=1))
    assert {n: each.num_observed for n, each in live.engines.models.items()} == {0: 1, 1: 3}
    live.on_step(step(3, model=second))
    live.on_death(1)
    assert {n: each.num_observed for n, each in live.engines.models.items()} == {0: 2}
