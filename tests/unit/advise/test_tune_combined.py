"""What simulation and real runs say together: the arithmetic, and how often it is right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.advise.tune.confirm import ConfirmedSetting
from headway.advise.tune.outcome import (
    MIN_SIMULATION_ERROR,
    add_simulated_gains,
    choose,
    log_gain,
    real_gain_error,
    simulation_error,
)
from headway.advise.tune.space import Changes
from tuned_world import point

A, B = (("max_num_seqs", 128),), (("policy", "fcfs"),)


def real(changes: Changes, gain: float, low: float, high: float) -> ConfirmedSetting:
    return ConfirmedSetting(
        changes=changes, runs=2, goodput=10 * (1 + gain), in_slo=0.9, ttft_s=0.2, tpot_s=0.03,
        tokens_per_s=100.0, gain=gain, gain_interval=(low, high),
    )  # fmt: skip


def joined(gain: float, low: float, high: float, simulated: float) -> ConfirmedSetting:
    one = real(A, gain, low, high)
    add_simulated_gains([one], [point((), 10.0), point(A, 10 * (1 + simulated))])
    return one


@pytest.mark.parametrize(
    ("known", "simulated", "together"),
    [
        ((0.14, -0.01, 0.31), 0.12, (0.14, 0.0, 0.29)),
        ((0.01, -0.12, 0.16), 0.12, (0.03, -0.09, 0.17)),
        ((0.14, -0.01, 0.31), -0.30, (0.13, -0.02, 0.30)),
    ],
)
def test_the_worked_examples(known, simulated: float, together):
    one = joined(*known, simulated)
    assert one.simulated == simulated
    assert (one.together, *one.together_interval) == pytest.approx(together, abs=0.008)


def test_a_gain_that_real_runs_alone_leave_open_is_taken_where_the_simulation_bears_it_out():
    """And not where the simulation says that there is none."""
    default = real((), 0.0, 0.0, 0.0)
    base, open_ = point((), 10.0), (0.12, -0.01, 0.27)
    assert choose([base, point(A, 11.5)], [default, real(A, *open_)], "goodput")[0] == A
    assert choose([base, point(A, 9.9)], [default, real(A, *open_)], "goodput")[0] == ()


def test_a_gain_of_the_simulation_alone_is_none():
    """Four tenths simulated, nothing seen: the simulation is that far off."""
    default = real((), 0.0, 0.0, 0.0)
    setting, why = choose(
        [point((), 10.0), point(A, 14.0)], [default, real(A, 0.0, -0.03, 0.03)], "goodput"
    )
    assert setting == () and "+40.0% simulated" in why


def test_of_two_that_real_runs_cannot_tell_apart_the_simulation_decides():
    default = real((), 0.0, 0.0, 0.0)
    points = [point((), 10.0), point(A, 14.0), point(B, 12.5)]
    result = [default, real(A, 0.31, 0.15, 0.5), real(B, 0.33, 0.17, 0.51)]
    assert choose(points, result, "goodput")[0] == A


def test_what_was_not_simulated_counts_by_its_real_runs():
    one = real(A, 0.2, 0.1, 0.3)
    for points in ([point((), 10.0)], [point((), 0.0), point(A, 5.0)], []):
        add_simulated_gains([one], points)
        assert one.simulated is None
        assert (one.together, one.together_interval) == (0.2, (0.1, 0.3))


GAIN, REACH = st.floats(-0.9, 3.0), st.floats(0.0, 1.0)


@given(st.lists(st.tuples(GAIN, REACH, GAIN), min_size=1, max_size=4))
def test_together_lies_between_both_and_is_surer_than_either(drawn):
    alive = [
        real((("max_num_seqs", n),), g, (1 + g) * (1 - r / 2) - 1, (1 + g) * (1 + r / 2) - 1)
        for n, (g, r, _) in enumerate(drawn)
    ]
    points = [point(one.changes, 10 * (1 + s)) for one, (_, _, s) in zip(alive, drawn, strict=True)]
    add_simulated_gains(alive, [point((), 10.0), *points])
    off = simulation_error(alive)
    assert off >= MIN_SIMULATION_ERROR
    for one in alive:
        low, high = one.together_interval
        ends = sorted((one.gain, one.simulated or 0.0))
        assert ends[0] - 1e-3 <= one.together <= ends[1] + 1e-3
        assert low - 1e-3 <= one.together <= high + 1e-3
        width = (log_gain(high) - log_gain(low)) / 2 / 1.96
        assert width <= min(real_gain_error(one), off) + 0.02


def regrets(
    off: float, chance: float, spread: float, count: int = 400
) -> tuple[float, float, float]:
    """(mean regret, that of real runs alone, how often the choice is worse than the default).

    Of twelve settings whose true gains spread so far the four that simulate best run for real.
    """
    rng = np.random.default_rng(0)
    both, alone, worse = [], [], 0
    for _ in range(count):
        true = rng.normal(0, spread, 12)
        simulated = true + rng.normal(0, off, 12)
        best = np.argsort(-simulated)[:4]
        observed = true[best] + rng.normal(0, chance, 4)
        points, result = [point((), 10.0)], [real((), 0.0, 0.0, 0.0)]
        for n, s, r in zip(best, simulated[best], observed, strict=True):
            changes = (("max_num_seqs", int(n)),)
            points.append(point(changes, 10 * np.exp(s)))
            reach = 1.96 * chance
            result.append(real(changes, *(float(np.exp(x) - 1) for x in (r, r - reach, r + reach))))
        top = max(true.max(), 0.0)
        for candidates, into in ((points, both), ([point((), 10.0)], alone)):
            setting, _ = choose(candidates, result, "goodput")
            gain = true[setting[0][1]] if setting else 0.0
            into.append(1 - np.exp(gain - top))
            worse += candidates is points and gain < 0
    return float(np.mean(both)), float(np.mean(alone)), worse / count


@pytest.mark.parametrize("spread", [0.05, 0.2])
@pytest.mark.parametrize("chance", [0.03, 0.12])
@pytest.mark.parametrize("off", [0.05, 0.15, 0.3])
def test_it_chooses_better_than_real_runs_alone_and_seldom_harms(off, chance, spread):
    """Whatever the simulation is worth; a choice is worse than the default in 1 of 20 at most."""
    both, alone, worse = regrets(off, chance, spread)
    assert both <= alone + 0.001
    assert worse <= 0.05
    if off == 0.05 and chance == 0.12 and spread == 0.2:
        assert both < 0.6 * alone
