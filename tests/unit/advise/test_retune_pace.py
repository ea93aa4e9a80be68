"""Steps at the machine's pace of the moments in which they are simulated."""

from itertools import pairwise

import numpy as np
import pytest

from headway.advise.retune.pace import InTime, along
from headway.advise.simulate.truth import Fit
from headway.engine.cost import Work
from simulated_house import steady_steps

WORK = Work(8, 8, 800, 800)


@pytest.fixture(scope="module")
def fit():
    return Fit(steady_steps(), (0,))


def truth(fit, began_s, pace, scale=1.0) -> InTime:
    """Steps that are expected to take 10 ms, each so many times as long."""
    fit.expected = np.full(len(pace), 0.010)
    fit.took = 0.010 * np.array(pace)
    return InTime(fit, np.array(began_s), np.arange(len(pace)), scale)


def test_a_step_goes_as_fast_as_the_machine_did_then(fit):
    one = truth(fit, [0.0, 0.010], [1.0, 4.0])
    assert one.when_s(one.done_by(0.005) + 0.012) == pytest.approx(0.038)
    assert one.done_by(0.050) == pytest.approx(0.020)
    times = [0.001 * at for at in range(50)]
    assert [one.when_s(one.done_by(at)) for at in times] == pytest.approx(times)


def test_where_it_had_nothing_to_do_it_goes_as_fast_as_usual(fit):
    """A step of 10 ms that took 20, 60 ms of nothing, and another: half as fast is usual."""
    one = truth(fit, [0.0, 0.080], [2.0, 2.0])
    assert one.done_by(0.080) == pytest.approx(0.010 + 0.030)
    assert one.done_by(0.200) == pytest.approx(0.050 + 0.050)
    assert one.when_s(one.done_by(-0.020)) == pytest.approx(-0.020)


def test_seconds_follow_the_clock_and_the_scale(fit):
    mean_s = fit.mean.seconds(WORK)
    began_s = np.arange(100) * 0.020
    steady, slower = (truth(fit, began_s, [2.0] * 100, scale) for scale in (1.0, 1.5))
    assert steady.seconds(WORK) == pytest.approx(2 * mean_s)
    assert slower.seconds(WORK) == pytest.approx(3 * mean_s)
    worse = truth(fit, np.cumsum([0.0] + [0.010] * 50 + [0.040] * 49), [1.0] * 50 + [4.0] * 50)
    worse.now_s = lambda: 0.600
    assert worse.seconds(WORK) == pytest.approx(4 * mean_s)
    assert worse.seconds(Work(0, 0, 0, 0)) > 0


def test_a_line_through_points_never_goes_back():
    xs, ys = [0.0, 1.0, 1.0, 3.0], [0.0, 2.0, 2.0, 2.5]
    found = [along(xs, ys, x / 10, 1.0) for x in range(-10, 50)]
    assert all(a <= b for a, b in pairwise(found))
    assert found[0] == -1.0 and found[-1] == pytest.approx(2.5 + 1.9)
