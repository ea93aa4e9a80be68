"""Verdicts follow from the headline figure and the promise; intervals hold what they are of."""

import numpy as np
import pytest

from literature.claim import (
    HOLDS,
    IN_PART,
    NOT_HERE,
    Figure,
    Finding,
    Promise,
    median_of,
    ratio_of,
)


@pytest.mark.parametrize(
    ("promise", "value", "low", "verdict"),
    [
        (Promise(low=2.0), 2.4, 2.2, HOLDS),
        (Promise(low=2.0), 1.8, 1.7, HOLDS),  # a tenth is forgiven
        (Promise(low=2.0), 1.5, 1.2, IN_PART),
        (Promise(low=2.0), 1.5, 0.9, NOT_HERE),  # it may be nothing
        (Promise(low=2.0), 0.7, 0.6, NOT_HERE),
        (Promise(low=2.0, high=4.0), 4.3, 4.2, HOLDS),
        (Promise(low=2.0, high=4.0), 9.0, 8.0, IN_PART),
        (Promise(low=54.0, exact=True), 53.7, None, HOLDS),
        (Promise(low=54.0, exact=True), 50.0, None, NOT_HERE),
        (Promise(low=54.0, exact=True), 60.0, None, NOT_HERE),
        (Promise(low=50.0, none=5.0), 20.0, None, IN_PART),
        (Promise(low=50.0, none=5.0), 4.0, None, NOT_HERE),
    ],
)
def test_a_verdict_is_a_rule(promise, value, low, verdict):
    figure = Figure(name="n", value=value, low=low, high=None if low is None else value + 1)
    assert Finding(figures=[figure], promise=promise, why="").verdict == verdict


@pytest.mark.parametrize(
    ("headline", "part", "unmeasured", "verdict"),
    [
        (80.0, 60.0, [], HOLDS),
        (80.0, 20.0, [], IN_PART),
        (80.0, 1.0, [], IN_PART),
        (80.0, None, ["cost"], IN_PART),
        (30.0, 60.0, [], IN_PART),
        (1.0, 60.0, [], NOT_HERE),
    ],
)
def test_a_claim_holds_only_if_every_part_was_measured_and_holds(
    headline, part, unmeasured, verdict
):
    """75% less latency and 53% less cost."""
    figures = [Figure(name="latency", value=headline)]
    if part is not None:
        figures.append(Figure(name="cost", value=part, promise=Promise(low=53.0, none=5.0)))
    promise = Promise(low=75.0, none=5.0)
    finding = Finding(figures=figures, promise=promise, why="", unmeasured=unmeasured)
    assert finding.verdict == verdict


def test_the_interval_of_a_median_holds_it_and_narrows_with_repeats():
    draw = np.random.default_rng(1)
    few, many = (median_of("m", draw.normal(10, 1, count)) for count in (8, 400))
    for figure in (few, many):
        assert figure.low <= figure.value <= figure.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert abs(many.value - 10) < 0.2


def test_a_ratio_of_medians_is_drawn_from_both_sides():
    figure = ratio_of("r", [4.0, 4.0, 8.0], [2.0, 2.0, 2.0])
    assert (figure.value, figure.low, figure.high) == (2.0, 2.0, 4.0)
    with pytest.raises(ValueError, match="empty"):
        ratio_of("r", [], [1.0])


def test_figures_are_told_with_three_digits_and_their_interval():
    assert str(Figure(name="", value=2.3149, unit="x", low=2.2, high=2.44)) == "2.31x (2.2 … 2.44)"
    assert str(Figure(name="", value=5120.4, unit=" MiB")) == "5,120 MiB"
    assert str(Figure(name="", value=10.156, unit="%")) == "10.2%"
    assert isinstance(Figure(name="", value=np.float64(1)).value, float)
