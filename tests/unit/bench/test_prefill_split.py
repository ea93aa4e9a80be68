"""How many of several engines compute prompts, by the load of each kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from literature.split import fullest_pool, prefill_engines


@pytest.mark.parametrize(
    ("load", "number"),
    [
        ((0.9, 0.5), 5),  # of eight
        ((0.1, 4.0), 1),
        ((4.0, 0.1), 7),
        ((3.0, 1.0), 6),  # 3 : 1, as textbooks have it for long prompts
        ((1.0, 3.0), 2),
        ((0.0, 0.0), 4),
    ],
)
def test_the_fuller_pool_is_as_empty_as_can_be(load, number):
    assert prefill_engines(8, *load) == number


@given(st.integers(2, 12), st.floats(0, 20), st.floats(0, 20))
def test_no_other_division_is_better_and_no_pool_is_empty(count, prefill, decode):
    number = prefill_engines(count, prefill, decode)
    assert 0 < number < count
    best = min(fullest_pool(count, n, prefill, decode) for n in range(1, count))
    assert fullest_pool(count, number, prefill, decode) == best
