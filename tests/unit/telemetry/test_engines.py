"""The snapshot of each engine's cost model."""

import msgspec

from headway.core.clock import VirtualClock
from headway.perf.model import StepModel
from telemetry_cases import step, telemetry

SNAPSHOT = StepModel().snapshot()


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
