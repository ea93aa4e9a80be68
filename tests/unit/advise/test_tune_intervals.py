"""How sure a gain of real runs is: the interval holds what is true, and no more is believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.advise.tune.confirm import MeasuredBlock, paired_gain


def block(met: list[bool]) -> MeasuredBlock:
    times: list[float | None] = [0.1] * len(met)
    return MeasuredBlock(changes=(), round=0, span_s=10.0, met=met, ttft_s=times, tpot_s=times)


def fates(rng: np.random.Generator, share: float, count: int, stretch: int) -> list[bool]:
    """So many requests in their objectives; those of a stretch share their fate."""
    return np.repeat(rng.random(count // stretch) < share, stretch).tolist()


def covered(true_gain: float, first: float, second: float, stretch: int, runs: int = 250) -> float:
    """In how many of these experiments the 95% hold what is true."""
    rng, inside = np.random.default_rng(7), 0
    for _ in range(runs):
        pair = (block(fates(rng, first, 400, stretch)), block(fates(rng, second, 400, stretch)))
        _, (low, high) = paired_gain([pair])
        inside += low <= true_gain <= high
    return inside / runs


@pytest.mark.parametrize(("first", "second"), [(0.8, 0.8), (0.6, 0.9), (0.9, 0.7)])
@pytest.mark.parametrize("stretch", [1, 10])
def test_the_95_percent_hold_what_is_true_in_95_of_100(first: float, second: float, stretch: int):
    """For requests that are independent, and for ten in a row that share their fate."""
    assert 0.88 <= covered(second / first - 1, first, second, stretch) <= 0.99


def test_neighbours_that_share_their_fate_are_not_counted_one_by_one():
    """400 requests of 40 fates: an interval that took them for 400 would be a third as wide."""
    rng = np.random.default_rng(1)
    widths = []
    for stretch in (1, 10):
        pairs = [
            (block(fates(rng, 0.7, 400, stretch)), block(fates(rng, 0.7, 400, stretch)))
            for _ in range(40)
        ]
        widths.append(np.median([high - low for _, (low, high) in map(paired_gain, zip(pairs))]))
    assert widths[1] > 2 * widths[0]


def test_they_hold_it_too_where_a_round_is_another_machine():
    """Each round's gain is 20% up or down by chance, as where a neighbour computes: two rounds."""
    rng, inside = np.random.default_rng(3), 0
    for _ in range(250):
        pairs = [
            (block(fates(rng, 0.5, 400, 1)), block(fates(rng, 0.5 * factor, 400, 1)))
            for factor in np.exp(rng.normal(0, 0.2, 2))
        ]
        low, high = paired_gain(pairs)[1]
        inside += low <= 0 <= high
    assert inside / 250 >= 0.75


def test_pairs_take_out_what_both_suffered():
    """A slow minute hits both: paired, a gain of one in ten is sure; unpaired it would drown."""
    rng = np.random.default_rng(2)
    slow = np.repeat(rng.random(40) < 0.4, 10)
    first = ~slow & (rng.random(400) < 0.85)
    second = ~slow & ((rng.random(400) < 0.6) | first)
    paired = paired_gain([(block(first.tolist()), block(second.tolist()))])
    moved = np.roll(second, 200).tolist()
    unpaired = paired_gain([(block(first.tolist()), block(moved))])
    assert paired[1][0] > 0 > unpaired[1][0]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=10, max_size=80))
@hypothesis_settings(max_examples=40, deadline=None)
def test_gains_lie_within_their_interval_and_turn_with_the_pair(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    gain, (low, high) = paired_gain([(block(first), block(second))])
    assert low - 1e-9 <= high and gain >= -1
    if first == second:
        assert gain == low == high == 0
    if sum(second) > sum(first) > 0:
        assert gain > 0 > paired_gain([(block(second), block(first))])[0]


def test_a_default_that_meets_nothing_can_be_beaten():
    gain, (low, _) = paired_gain([(block([False] * 50), block([True] * 50))])
    assert gain == 50 and low > 0
    assert paired_gain([(block([False] * 50), block([False] * 50))]) == (0.0, (0.0, 0.0))


def test_pairs_that_contradict_each_other_make_no_gain_sure():
    """90 of 100 in place of 30, then 40 in place of 60: no round alone shows that doubt."""
    one, other = (
        (block([True] * 30 + [False] * 70), block([True] * 90 + [False] * 10)),
        (block([True] * 60 + [False] * 40), block([True] * 40 + [False] * 60)),
    )
    gain, (low, high) = paired_gain([one, other])
    assert gain == pytest.approx(0.4444, abs=1e-3) and low < 0 < high
    assert paired_gain([one, one])[1][0] > 0


def test_a_block_that_is_shorter_is_compared_as_far_as_it_goes():
    gain, _ = paired_gain([(block([True] * 40), block([True] * 30))])
    assert gain == 0.0
