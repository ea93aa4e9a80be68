"""SLOs as they are written and judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.slo import (
    DEFAULT_CLASS,
    OBJECTIVES,
    Slo,
    format_duration,
    parse_class,
    parse_classes,
    parse_duration,
    parse_slo,
)


def test_objectives_are_read_in_seconds():
    assert parse_slo("ttft=500ms,tpot=50ms") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert parse_slo("itl_p99=250us, e2e = 2m") == Slo(itl_p99_s=0.00025, e2e_s=120.0)


def test_a_class_has_a_name():
    assert parse_class("interactive:ttft=500ms") == ("interactive", Slo(ttft_s=0.5))
    assert parse_class("ttft=1s") == (DEFAULT_CLASS, Slo(ttft_s=1.0))
    assert parse_classes(["batch:e2e=60s", "ttft=1s"]) == {
        "batch": Slo(e2e_s=60.0),
        "default": Slo(ttft_s=1.0),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no objective"),
        ("ttft", "'ttft' is no objective"),
        ("ttft=500", "'500' is not a duration"),
        ("ttft=0ms", "'0ms' is not a duration"),
        ("ttft=-1s", "'-1s' is not a duration"),
        ("ttft=inf", "not a duration"),
        ("latency=1s", "there is no objective latency"),
        ("ttft=1s,ttft=2s", "ttft is given twice"),
        ("a class:ttft=1s", "no name of a class"),
        (":ttft=1s", "no name of a class"),
    ],
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_class(text)
    assert caught.value.fix


def test_a_class_comes_once():
    with pytest.raises(UsageError, match="class a is given twice"):
        parse_classes(["a:ttft=1s", "a:tpot=1s"])


def test_missed_names_each_objective_in_order():
    slo = Slo(ttft_s=0.5, tpot_s=0.05, itl_p99_s=0.1, e2e_s=2.0)
    assert slo.missed(0.5, 0.05, 0.1, 2.0) == ()  # a bound that is just reached is met
    assert slo.missed(0.6, 0.06, 0.2, 3.0) == OBJECTIVES
    assert slo.missed(0.6, None, None, 1.0) == ("ttft",)  # one token: no TPOT, no gaps
    assert Slo().missed(99.0, 99.0, 99.0, 99.0) == ()


@given(st.lists(st.integers(1, 10**9), min_size=4, max_size=4))
def test_what_is_written_is_read_again(microseconds):
    bounds = [number / 1e6 for number in microseconds]
    slo = Slo(ttft_s=bounds[0], tpot_s=bounds[1], itl_p99_s=bounds[2], e2e_s=bounds[3])
    again = parse_slo(str(slo))
    for before, after in zip(slo.bounds(), again.bounds(), strict=True):
        assert after == pytest.approx(before, rel=1e-9)


def test_durations_are_written_in_the_unit_that_reads_best():
    assert [format_duration(s) for s in (0.5, 2.0, 0.00025, 90.0)] == [
        "500ms",
        "2s",
        "250us",
        "90s",
    ]
    assert parse_duration("1.5s", "x") == 1.5
