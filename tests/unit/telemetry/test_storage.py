"""Token hours by tier, and the price of a disk's: what is kept between two records is counted."""

import pytest

from headway.core.clock import VirtualClock
from headway.telemetry.records import BEFORE_ANY, StepRecord, TierUse
from headway.telemetry.storage import GB, HOURS_A_MONTH, Storage
from telemetry_cases import telemetry

HOUR_S = 3600.0
DEVICE, DISK = TierUse("device", 10**6, 1000), TierUse("disk", 24_576_000_000, 2_000_000)


def record(*uses: TierUse, engine: int = 0) -> StepRecord:
    """A step that tells of these tiers."""
    made = StepRecord(**{name: getattr(BEFORE_ANY, name) for name in BEFORE_ANY.__struct_fields__})
    made.kv_tiers, made.engine = list(uses), engine
    return made


def test_worked_example():
    """Two million tokens of 12 KiB for half an hour, at 0.08 dollars a GB and month."""
    storage = Storage(0.08)
    storage.take(record(DISK), 0.0)
    (told,) = storage.told(HOUR_S / 2)
    assert told.token_hours == pytest.approx(1e6)
    assert told.usd == pytest.approx(24.576 * 0.5 * 0.08 / 730)
    assert told.usd_per_million_token_hours == pytest.approx(told.usd)


def test_what_is_told_again_counts_from_then_on():
    storage = Storage()
    storage.take(record(TierUse("device", 100, 10)), 0.0)
    storage.take(record(TierUse("device", 300, 30)), HOUR_S)
    storage.take(record(TierUse("device", 0, 0)), 2 * HOUR_S)
    (told,) = storage.told(9 * HOUR_S)
    assert told.token_hours == pytest.approx(10 + 30)
    assert (told.num_bytes, told.num_tokens) == (0, 0)


def test_nothing_is_counted_twice():
    storage = Storage(1.0)
    storage.take(record(DISK), 0.0)
    first = storage.told(HOUR_S)[0]
    again = storage.told(HOUR_S)[0]
    assert (first.token_hours, first.usd) == (again.token_hours, again.usd)


def test_memory_has_no_price_of_its_own_and_a_disk_none_that_was_not_named():
    for price in (None, 0.08):
        storage = Storage(price)
        storage.take(record(DEVICE, DISK), 0.0)
        told = {each.tier: each for each in storage.told(HOUR_S)}
        assert told["device"].usd is None
        assert told["device"].usd_per_million_token_hours is None
        assert (told["disk"].usd is None) == (price is None)


def test_a_disk_that_holds_nothing_has_no_price_a_token():
    storage = Storage(0.08)
    storage.take(record(TierUse("disk", 0, 0)), 0.0)
    (told,) = storage.told(HOUR_S)
    assert (told.usd, told.usd_per_million_token_hours) == (0.0, None)


def test_several_engines_are_added_up():
    storage = Storage()
    for engine in range(3):
        storage.take(record(DEVICE, engine=engine), 0.0)
    (told,) = storage.told(HOUR_S)
    assert (told.num_tokens, told.num_bytes) == (3000, 3 * 10**6)
    assert told.token_hours == pytest.approx(3000)


def test_an_engine_that_died_keeps_nothing_in_memory_and_all_on_its_disk():
    storage = Storage(0.08)
    storage.take(record(DEVICE, DISK), 0.0)
    storage.lose(0, HOUR_S)
    told = {each.tier: each for each in storage.told(2 * HOUR_S)}
    assert told["device"].token_hours == pytest.approx(1000)
    assert told["device"].num_tokens == 0
    assert told["disk"].token_hours == pytest.approx(2 * 2e6)


def test_the_next_engine_takes_the_place_of_the_dead_one():
    storage = Storage()
    storage.take(record(DISK), 0.0)
    storage.lose(0, 0.0)
    storage.take(record(DISK), 0.0)
    assert storage.told(HOUR_S)[0].token_hours == pytest.approx(2e6)


def test_metrics_and_stats_tell_it():
    clock = VirtualClock()
    told = telemetry(clock)
    told.storage.price = 0.08
    told.on_step(record(DEVICE, DISK))
    clock.advance(HOUR_S)
    text = told.render().decode()
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
             for line in text.splitlines() if "kv_t" in line and line[0] != "#"}  # fmt: skip
    by_tier = {
        name: value
        for name, value in lines.items()
        if name.startswith("headway:kv_token_hours_total") and 'tier="disk"' in name
    }
    assert list(by_tier.values()) == [pytest.approx(2e6)]
    usd = [line for line in text.splitlines() if line.startswith("headway:kv_storage_usd_total")]
    expected = DISK.num_bytes / GB * 0.08 / HOURS_A_MONTH
    assert float(usd[0].rpartition(" ")[2]) == pytest.approx(expected)


def test_what_a_restore_saved_and_took_is_counted_by_tier():
    told = telemetry(VirtualClock())
    step = record(DEVICE)
    step.num_queried_tokens, step.num_cached_tokens = 100, 80
    step.restored_tokens = {"disk": 30, "host": 20, "engine:a#00": 10}
    step.restore_s = {"disk": 0.5, "engine:a#00": 0.25}
    told.on_step(step)
    values = told.registry.values
    by_source = values["prompt_tokens_cached_by_source"]
    assert by_source == {("device",): 20, ("disk",): 30, ("host",): 20, ("engine",): 10}
    assert values["kv_tier_read_seconds"] == {("disk",): 0.5, ("engine",): 0.25}
    assert values["kv_tier_seconds_saved"].keys() == {("disk",), ("host",), ("engine",)}
