"""The arithmetic of metrics, by the examples that everybody can check on paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.perf.roofline import ratio, roofline_s, utilization
from headway.telemetry.formulas import (
    error_budget,
    goodput_per_s,
    kv_bytes,
    p99,
    percentiles,
    split_spend,
    tpot_s,
    usd_per_million,
)


def test_kv_of_llama_2_13b():
    """Batch 32 of 2,048 tokens in FP16: 53.7 GB; GQA divides by heads/kv_heads."""
    found = kv_bytes(32 * 2048, layers=40, kv_heads=40, head_dim=128, dtype_bytes=2)
    assert found == 2 * 32 * 2048 * 40 * 5120 * 2 == 53_687_091_200
    assert kv_bytes(32 * 2048, 40, 8, 128, 2) * 5 == found


def test_price_of_a_million_tokens():
    """$2 an hour at 100 tokens/s is $5.56."""
    assert usd_per_million(2.0, 100.0) == pytest.approx(5.5556, abs=1e-4)
    assert usd_per_million(2.0, 0.0) is None


def test_mbu_of_7b_in_fp16():
    """100 tokens/s on 2 TB/s: 1.4 TB/s, 70%; without the two bytes some notes print 35%."""
    assert utilization(7e9 * 2 * 100, 1.0, 2e12) == pytest.approx(0.70)
    assert utilization(7e9 * 2 * 100, 1.0, 1e12) == pytest.approx(1.4), "never clamped"
    assert utilization(1.0, 1.0, 0.0) is None, "no ceiling, no ratio"


def test_goodput_counts_requests_not_averages():
    assert goodput_per_s(30, 1.0) == 30
    assert goodput_per_s(30, 60.0) == 0.5


def test_tpot_is_what_follows_the_first_token():
    assert tpot_s(2.0, 5.0, 4) == 1.0
    assert tpot_s(2.0, 2.0, 1) is None


def test_error_budget():
    assert error_budget(95, 100, 0.9) == pytest.approx((0.95, 0.5, 0.5))
    assert error_budget(70, 100, 0.9) == pytest.approx((0.7, -2.0, 3.0)), "overspent"
    assert error_budget(0, 0, 0.9) == (None, None, None)
    assert error_budget(10, 10, 1.0) == (1.0, 1.0, None)
    assert error_budget(9, 10, 1.0) == (0.9, 0.0, None), "no miss is allowed"


def test_roofline_takes_the_slower_side():
    assert roofline_s(100.0, 1000.0, bandwidth=10.0, peak_flops=1000.0) == 10.0
    assert roofline_s(100.0, 1000.0, bandwidth=0.0, peak_flops=1000.0) == 1.0


def test_spend_is_split_by_the_time_it_took():
    """1 s of decode steps, 1 s of steps with 300 prompt and 100 answer tokens."""
    assert split_spend(2.0, 1.0, 1.0, 300, 100) == pytest.approx((0.75, 1.25))
    assert split_spend(2.0, 0.0, 0.0, 0, 0) == (0.0, 2.0), "idle: it waits to answer"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_p99_is_the_one_of_percentiles(values):
    found = percentiles(values)
    assert found.count == len(values)
    assert p99(np.array(values)) == pytest.approx(found.p99, abs=1e-9)
    assert found.p50 <= found.p90 <= found.p95 <= found.p99 <= max(values)


def test_nothing_has_no_percentiles():
    assert percentiles([]).p99 is None and p99(np.empty(0)) is None and ratio(1, 0) is None
