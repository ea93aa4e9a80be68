"""How long a row takes to come free: the mean of recent starts, more when the next is overdue."""

import pytest

from headway.perf.rates import SLOT_STARTS, SlotRate


def test_the_mean_of_starts_while_somebody_waits():
    slot_rate = SlotRate()
    slot_rate.record_start(0.5)
    assert slot_rate.slot_s(0.9) == 0.0, "nobody waited"
    slot_rate.step(1.0, lacking=True)
    assert slot_rate.slot_s(1.02) == 0.0, "nothing is known yet"
    for now_s in (1.04, 1.04, 1.16):
        slot_rate.record_start(now_s)
        slot_rate.step(now_s, lacking=True)
    assert slot_rate.slot_s(1.16) == pytest.approx(0.16 / 3)
    slot_rate.step(1.2, lacking=False)
    assert slot_rate.slot_s(1.2) == 0.0


def test_a_wait_that_grows_counts_and_old_starts_are_forgotten():
    slot_rate = SlotRate()
    slot_rate.step(0.0, lacking=True)
    for number in range(1, 5):
        slot_rate.record_start(number * 0.1)
    assert slot_rate.slot_s(0.4) == pytest.approx(0.1)
    assert slot_rate.slot_s(5.4) == pytest.approx(0.1 + 4.9 / 5)
    for number in range(5 * SLOT_STARTS):
        slot_rate.record_start(0.4 + number * 0.02)
    assert slot_rate.slot_s(0.4 + (5 * SLOT_STARTS - 1) * 0.02) == pytest.approx(0.02, rel=0.1)
