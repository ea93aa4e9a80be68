"""Which of several engines answers a request, and the queues before them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission_house import PLAIN, TOKEN_S, step
from headway.admit.admission import Admission, Ticket
from headway.admit.engine_queues import MAX_SHARE, EngineCandidate, choose_engine
from headway.admit.lengths import AdmissionRequest
from headway.core.clock import VirtualClock
from headway.core.principal import Principal
from headway.core.request import SamplingParams
from headway.core.service import KeyLimits
from headway.edge.keys import Caller
from headway.edge.rates import Meter

Waits = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=9)


@given(Waits)
def test_no_engine_gets_more_than_its_share_and_none_of_those_waits_much_less(waits):
    candidates = [EngineCandidate(*each) for each in waits]
    chosen = candidates[choose_engine(candidates)]
    fair = MAX_SHARE * (1 + sum(each.num_requests for each in candidates)) / len(candidates)
    assert chosen.num_requests <= fair
    allowed = [each for each in candidates if each.num_requests <= fair]
    assert chosen.wait_s <= 1.1 * min(each.wait_s for each in allowed) + 0.005


@pytest.mark.parametrize(("third", "chosen"), [(6, 2), (8, 0)])
def test_a_prefix_draws_its_requests_as_long_as_they_are_not_too_many(third, chosen):
    candidates = [EngineCandidate(0.3, 4), EngineCandidate(0.3, 4), EngineCandidate(0.05, third)]
    assert choose_engine(candidates) == chosen


class Engines:
    """Three engines where a prompt token takes 1 ms."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.admission = Admission(self.clock, num_engines=3)
        self.queues = self.admission.queues
        for engine in range(3):
            self.queues.on_engine_ready(engine, 100_000)
            for _ in range(10):
                self.queues.on_record(step(100, 100 * TOKEN_S, engine=engine))
        self.ids = iter(range(1, 10**6))

    def ask(self, prompt: list[int]) -> tuple[Ticket, int]:
        """A request that is let in and sent: its ticket and its number in the engine."""
        caller = Caller(principal=Principal("alice"), meter=Meter(KeyLimits(), self.clock))
        ticket = self.admission.arrive(caller, PLAIN, 4)
        request = AdmissionRequest(
            lengths=[len(prompt)],
            sampling=SamplingParams(max_tokens=None),
            max_model_len=32_000,
            prompts=[prompt],
        )
        ticket.set_prompts(request)
        number = next(self.ids)
        ticket.on_sent(0, number)
        self.admission.check_integrity()
        return ticket, number

    def counts(self) -> list[int]:
        return [line.num_requests for line in self.queues.by_engine]


def test_strangers_are_spread_and_a_conversation_stays() -> None:
    house = Engines()
    tickets = [house.ask([n] * 300)[0] for n in range(6)]
    assert house.counts() == [2, 2, 2]
    first = tickets[0]
    first.on_first_token(0)
    again, _ = house.ask([0] * 300 + [7] * 20)
    assert again.engine == first.engine, "there its beginning is in memory"
    for ticket in [*tickets, again]:
        ticket.close()
    assert house.counts() == [0, 0, 0]
    house.admission.check_integrity()


def test_an_engine_that_is_down_gets_no_request_and_its_own_are_counted_elsewhere() -> None:
    house = Engines()
    tickets = {n: house.ask([n] * 300) for n in range(6)}
    house.queues.on_engine_down(0)
    for ticket, number in tickets.values():
        if ticket.engine == 0:
            house.queues.on_failover(number, 1)
    house.admission.check_integrity()
    assert house.counts() == [0, 4, 2]
    assert house.ask([9] * 300)[0].engine == 2
    for engine in (1, 2):
        house.queues.on_engine_down(engine)
    assert house.ask([10] * 300)[0].engine in range(3), "for the first that is back"
    house.queues.on_engine_ready(0, 100_000)
    assert house.ask([11] * 300)[0].engine == 0
    house.queues.on_failover(10**7, 2)  # a request that is over


def test_new_requests_stand_where_prompts_begin_and_move_on_with_their_first_token() -> None:
    house = Engines()
    house.queues.on_roles([True, True, False])
    tickets = [house.ask([n] * 300) for n in range(6)]
    assert house.counts() == [3, 3, 0]
    ticket, number = tickets[0]
    house.queues.on_handover(number, 2)
    assert house.counts() == [3, 3, 0], "it waits for its first token yet"
    ticket.on_first_token(0)
    house.queues.on_handover(number, 2)
    assert (ticket.engine, sum(house.counts()), house.counts()[2]) == (2, 6, 1)
    house.admission.check_integrity()
    house.queues.on_engine_down(0)
    house.queues.on_engine_down(1)
    assert house.ask([9] * 300)[0].engine == 2, "where nobody else is"
    for each, _ in tickets:
        each.close()
    house.queues.on_handover(number, 2)  # a request that is over
    house.admission.check_integrity()


def test_limits_count_what_waits_before_any_engine() -> None:
    house = Engines()
    for n in range(9):
        house.ask([n] * 300)
    assert house.queues.count(user="alice") == 9
    assert len(list(house.queues.entries)) == 9
