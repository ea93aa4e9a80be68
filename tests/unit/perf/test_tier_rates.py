"""What a byte takes: learned from what was moved, and forgotten when nothing was."""

import pytest

from headway.core.plan import Moved
from headway.perf.rates import PRIOR_BYTE_S, READ_START_S, CopyRate, ReadRate


def read(num_bytes: int, seconds: float) -> Moved:
    return Moved("disk", "in", num_bytes, num_bytes, seconds)


def test_a_read_takes_its_start_and_its_bytes():
    assert ReadRate(1e-9).read_s(10**9) == pytest.approx(READ_START_S + 1.0)
    assert ReadRate().read_s(0) == READ_START_S


def test_reads_teach_the_rate():
    rate = ReadRate(1e-9)
    for _ in range(50):
        rate.observe(read(10**6, READ_START_S + 0.01))
    assert rate.byte_s == pytest.approx(1e-8, rel=1e-3)


def test_one_hiccup_says_little():
    """A small read that waits 40 ms for a thread does not make a large one seem dear."""
    rate = ReadRate()
    rate.observe(read(70_000, 0.04))
    assert PRIOR_BYTE_S < rate.byte_s < 2 * PRIOR_BYTE_S


def test_a_read_below_its_start_takes_no_time_a_byte():
    rate = ReadRate(1e-9)
    for _ in range(50):
        rate.observe(read(10**6, 0.0))
    assert 0 <= rate.byte_s < 1e-12


def test_doubt_brings_a_rate_back_that_a_hiccup_spoilt():
    """Nothing is read while the disk seems slow, so nothing else would."""
    rate = ReadRate()
    for _ in range(20):
        rate.observe(read(10**6, 30.0))
    assert rate.byte_s > 1000 * PRIOR_BYTE_S
    for _ in range(2000):
        rate.doubt()
    assert rate.byte_s == pytest.approx(PRIOR_BYTE_S, rel=0.01)


def test_the_first_copy_counts_alone_and_later_ones_a_fifth():
    rate = CopyRate(1e-10)
    rate.observe(100, 100e-9)
    assert rate.byte_s == pytest.approx(1e-9)
    for _ in range(20):
        rate.observe(100, 100e-9)
    rate.observe(100, 600e-9)
    assert rate.byte_s == pytest.approx(2e-9)


def test_copies_of_nothing_teach_nothing():
    rate = CopyRate(1e-10)
    rate.observe(0, 1.0)
    rate.observe(100, 0.0)
    assert (rate.byte_s, rate.num_observed) == (1e-10, 0)


def test_a_copy_that_was_not_made_moves_the_rate_to_the_prior():
    rate = CopyRate(1e-10)
    rate.observe(1, 1.0)
    rate.doubt()
    assert 1e-10 < rate.byte_s < 1.0
