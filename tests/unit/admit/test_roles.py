"""How many engines compute prompts: by what is asked, and not at every whim of the traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.admit.roles import PATIENCE_S, RoleKeeper
from headway.admit.split import fullest_pool, prefill_engines
from headway.core.clock import VirtualClock
from headway.telemetry.demand import Demand
from headway.telemetry.records import StepRecord
from telemetry_cases import decoded

TPOT_S = 0.02


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ((0.9, 0.5), 5),  # of eight
        ((0.1, 4.0), 1),
        ((4.0, 0.1), 7),
        ((3.0, 1.0), 6),  # 3 : 1, as textbooks have it for long prompts
        ((1.0, 3.0), 2),
        ((0.0, 0.0), 4),
    ],
)
def test_the_fuller_pool_is_as_empty_as_can_be(asked, number):
    assert prefill_engines(8, *asked) == number


@given(st.integers(2, 12), st.floats(0, 20), st.floats(0, 20))
def test_no_other_division_is_better_and_no_pool_is_empty(count, prefill, decode):
    number = prefill_engines(count, prefill, decode)
    assert 0 < number < count
    best = min(fullest_pool(count, n, prefill, decode) for n in range(1, count))
    assert fullest_pool(count, number, prefill, decode) == best


class House:
    """A keeper on a virtual clock, and traffic that is so many seconds of each kind a second."""

    def __init__(self, count: int = 4, num_prefill: int = 2) -> None:
        self.clock, self.changes = VirtualClock(), list[int]()
        self.demand = Demand(self.clock, lambda: TPOT_S)
        self.keeper = RoleKeeper(count, num_prefill, self.demand, self.clock, self.changes.append)
        for rows in [10, 50] * 10:
            self._told(decoded(0.008 + 0.0001 * rows, rows=rows))

    def _told(self, record: StepRecord) -> None:
        self.demand.on_record(record)
        self.keeper.on_record(record)

    def run(self, seconds: float, *, prefill: float, decode: float) -> None:
        """A tenth of a second after the other; a decode engine does 6,000 tokens/s in time."""
        for _ in range(round(10 * seconds)):
            self.clock.advance(0.1)
            if prefill:
                self._told(decoded(0.1 * prefill, prefill=1000))
            for _ in range(round(10 * decode)):
                self._told(decoded(0.014, rows=60))


def test_an_engine_changes_its_role_once_it_was_asked_for_long_enough():
    house = House()
    house.run(PATIENCE_S, prefill=1.0, decode=1.0)
    assert house.changes == []
    house.run(PATIENCE_S - 5, prefill=2.5, decode=0.2)
    assert house.changes == [], "not yet"
    house.run(PATIENCE_S, prefill=2.5, decode=0.2)
    assert house.changes == [3]
    house.run(10 * PATIENCE_S, prefill=2.5, decode=0.2)
    assert house.changes == [3], "never all"
    house.run(10 * PATIENCE_S, prefill=0.1, decode=2.0)
    assert house.changes == [3, 2, 1], "one after the other"


def test_a_burst_changes_nothing():
    house = House()
    for _ in range(5):
        house.run(15, prefill=2.5, decode=0.2)
        house.run(45, prefill=1.0, decode=1.2)
    assert house.changes == []


def test_two_engines_stay_one_of_each():
    house = House(count=2, num_prefill=1)
    house.run(5 * PATIENCE_S, prefill=2.0, decode=0.0)
    assert house.changes == []
