"""How many servers a traffic wants: the fewest of which enough requests find room."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.scale import (
    ATTAINMENT_WINDOW_S,
    DOWNSCALE_DELAY_S,
    ClusterLoad,
    Scaler,
    ScaleTarget,
    poisson_below,
    predict_attainment,
    servers_needed,
)

TARGET = ScaleTarget(attainment=0.95, least=1, most=8, lead_s=60.0)


@pytest.mark.parametrize(("count", "mean"), [(60, 48.0), (3, 1.5), (1, 0.2), (30, 40.0)])
def test_a_poisson_tail_is_that_of_its_terms(count, mean):
    terms = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(math.ceil(count))]
    assert poisson_below(count, mean) == pytest.approx(sum(terms))


def test_where_the_normal_takes_over_the_two_agree():
    for count in (380, 400, 430):
        exact = sum(math.exp(-400 + k * math.log(400) - math.lgamma(k + 1)) for k in range(count))
        assert poisson_below(count, 400.1) == pytest.approx(exact, abs=0.01)
        assert poisson_below(count, 400.0) == pytest.approx(exact, abs=1e-9)


@given(st.floats(0, 20), st.floats(0, 2000), st.integers(1, 20))
def test_more_servers_never_promise_less(asked, in_progress, servers):
    here, more = (predict_attainment(n, asked, in_progress) for n in (servers, servers + 1))
    assert 0 <= here <= more + 1e-9 <= 1 + 2e-9


def test_the_worked_example():
    assert predict_attainment(3, 2.4, 48) == pytest.approx(0.949, abs=0.002)
    assert predict_attainment(4, 2.4, 48) > 0.9999
    assert servers_needed(ScaleTarget(attainment=0.94), 2.4, 48)[0] == 3
    assert servers_needed(ScaleTarget(attainment=0.95), 2.4, 48)[0] == 4
    assert servers_needed(ScaleTarget(attainment=0.95, engines=2), 2.4, 48)[0] == 2


def test_many_small_requests_need_less_room_than_few_large_ones():
    """Of as much work: large ones come in lumps."""
    assert servers_needed(TARGET, 2.4, 480)[0] < servers_needed(TARGET, 2.4, 6)[0]


def test_bounds_hold_and_say_what_is_predicted_there():
    servers, share = servers_needed(ScaleTarget(attainment=0.95, most=2), 5.0, 100)
    assert servers == 2 and share < 0.01
    assert servers_needed(ScaleTarget(least=3), 0.1, 2)[0] == 3
    assert servers_needed(TARGET, 0.0, 0.0) == (1, 1.0)


def test_a_simulated_room_is_full_as_often_as_predicted():
    """Arrivals at random, times of any distribution: who comes while 60 are inside is late."""
    draw, rate, mean_s = random.Random(3), 10.0, 4.8
    now_s, ends, late, num = 0.0, [], 0, 40_000
    for _ in range(num):
        now_s += draw.expovariate(rate)
        ends = [at_s for at_s in ends if at_s > now_s]
        late += len(ends) >= 60
        ends.append(now_s + draw.choice([0.5 * mean_s, 0.5 * mean_s, 2 * mean_s]))
    assert 1 - late / num == pytest.approx(predict_attainment(3, 2.4, 48), abs=0.03)


class House:
    """A scaler that is asked every ten seconds."""

    def __init__(self, **how) -> None:
        self.target = ScaleTarget(**{"attainment": 0.95, "most": 8, "lead_s": 60.0, **how})
        self.scaler, self.now_s = Scaler(self.target), 0.0

    def run(self, seconds, asked, servers, *, each=0.05, attainment=None) -> list[int]:
        found = []
        for number in range(round(seconds / 10)):
            engines = asked(number * 10) if callable(asked) else asked
            load = ClusterLoad(
                engines_needed=engines,
                in_progress=engines / each,
                servers=servers,
                attainment=attainment,
            )
            decision = self.scaler.decide(self.now_s, load)
            assert 0 <= decision.predicted <= 1 and decision.why
            found.append(decision.servers)
            self.now_s += 10
        return found


def test_more_is_asked_for_at_once():
    house = House()
    assert set(house.run(60, 0.5, 1)) == {1}
    assert house.run(10, 2.4, 1)[0] >= 4


def test_what_grows_is_met_before_it_is_there():
    """From 1 to 2 engines in two minutes: where it will be in a minute, 2.5, wants four."""
    house = House()
    last = house.run(120, lambda at_s: 1 + at_s / 120, 2)[-1]
    assert last == servers_needed(TARGET, 2.4, 48)[0] == 4
    assert servers_needed(TARGET, 1.92, 38)[0] == 3, "what is asked now would want fewer"


def test_fewer_only_after_a_while_and_one_after_the_other():
    house = House()
    found = house.run(2 * DOWNSCALE_DELAY_S + 20, 0.5, 4)
    first = found.index(3)
    assert first == DOWNSCALE_DELAY_S / 10
    assert set(found[:first]) == {4}
    assert found.count(3) == 2, "who asks with four ready again is told again, much later"


def test_a_peak_in_between_begins_the_wait_anew():
    house = House()
    house.run(DOWNSCALE_DELAY_S - 20, 0.5, 4)
    house.run(10, 2.5, 4)
    assert set(house.run(DOWNSCALE_DELAY_S - 20, 0.5, 4)) == {4}


def test_who_falls_short_of_what_was_predicted_gets_one_more():
    house = House()
    assert set(house.run(60, 0.5, 2, attainment=0.8)) == {3}
    later = house.run(60 + ATTAINMENT_WINDOW_S, 0.5, 3, attainment=0.8)
    assert later[0] == 3 and later[-1] == 4, "the next one when that had time to show"
    assert set(house.run(30, 0.5, 4, attainment=0.99)) == {4}


def test_falling_short_does_not_go_beyond_the_bound():
    house = House(most=2)
    assert set(house.run(600, 0.5, 2, attainment=0.1)) == {2}
