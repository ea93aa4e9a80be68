"""KV blocks by tier in `/metrics`: bytes held for later prompts, and what restores took."""

import pytest

from headway.core.clock import VirtualClock
from headway.core.records import NO_STEP, StepRecord, TierUse
from telemetry_cases import telemetry

DEVICE, DISK = TierUse("device", 10**6), TierUse("disk", 24_576_000_000)


def record(*uses: TierUse, engine: int = 0) -> StepRecord:
    """Return a step that names these tiers."""
    made = StepRecord(**{name: getattr(NO_STEP, name) for name in NO_STEP.__struct_fields__})
    made.kv_tiers, made.engine = list(uses), engine
    return made


def test_bytes_of_engines_add_up_by_tier_and_a_dead_one_keeps_its_disk():
    live = telemetry(clock := VirtualClock())
    live.on_step(record(DEVICE, DISK))
    live.on_step(record(TierUse("device", 500), engine=1))
    live.on_step(record(DEVICE, TierUse("disk", 9)))
    clock.advance(60)
    live.render()
    values = live.registry.values["kv_tier_bytes"]
    assert values == {("device",): 1_000_500, ("disk",): 9}
    live.on_death(0)
    assert live.engines.tier_bytes == {"disk": 9, "device": 500}
    live.on_step(record(TierUse("disk", 7)))
    assert live.engines.tier_bytes["disk"] == 7, "the next engine takes the place of the dead one"
    live.on_death(1)
    clock.advance(60)
    live.render()
    assert live.registry.values["kv_tier_bytes"] == {("disk",): 7}


def test_what_a_restore_saved_and_took_is_counted_by_tier():
    told = telemetry(VirtualClock())
    step = record(DEVICE)
    step.num_queried_tokens, step.num_cached_tokens, step.alone_s_per_token = 100, 80, 0.01
    step.restored_tokens = {"disk": 30, "host": 20, "engine:a#00": 10}
    step.restore_s = {"disk": 0.5, "engine:a#00": 0.25}
    told.on_step(step)
    values = told.registry.values
    by_source = values["prompt_tokens_cached_by_source"]
    assert by_source == {("device",): 20, ("disk",): 30, ("host",): 20, ("engine",): 10}
    assert values["kv_tier_read_seconds"] == {("disk",): 0.5, ("engine",): 0.25}
    saved_s = {name: values["kv_tier_seconds_saved"][name,] for name in ("disk", "host", "engine")}
    assert saved_s == pytest.approx({"disk": 0.3, "host": 0.2, "engine": 0.1})
