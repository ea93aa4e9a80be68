"""Admission on a virtual clock: which requests are admitted or refused, why, and for how long."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from admission_house import (
    CLASSES,
    DEFAULT,
    PLAIN,
    TOKEN_S,
    House,
    full,
    request_of,
    request_with,
    step,
    with_limits,
)
from headway.admit.admission import Ticket
from headway.admit.forecast import QueueEntry
from headway.core.errors import OverloadedError, RequestError
from headway.core.service import service_classes
from headway.core.slo import Slo
from headway.engine.policy import POLICIES

# ── lengths ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "code", "reason"),
    [
        (501, {}, "messages", "context_length_exceeded", "max_prompt_tokens"),
        (5, {"max_tokens": 65}, "max_tokens", "integer_above_max_value", "max_output_tokens"),
        (5, {"min_tokens": 65}, "min_tokens", "integer_above_max_value", "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("of_key", [False, True])
def test_lengths_of_a_key_and_a_class(of_key, prompt, sampling, param, code, reason):
    house, limits = House(), {"max_prompt_tokens": 500, "max_output_tokens": 64}
    row, caller = (PLAIN, house.caller(**limits)) if of_key else (with_limits(**limits), None)
    house.ask(500, row, caller, max_tokens=64).close()
    with pytest.raises(RequestError) as error:
        house.ask(prompt, row, caller, **sampling)
    assert (error.value.status, error.value.param, error.value.code) == (400, param, code)
    assert error.value.reason == reason and str({**limits}[reason]) in str(error.value)
    assert not house.forecast.entries, "who is refused leaves nothing behind"


def test_an_answer_that_is_cut_to_the_context_holds_its_min_tokens():
    house, row = House(), replace(with_limits(max_output_tokens=64), slo=Slo())
    with pytest.raises(RequestError, match="room for 10") as error:
        house.ask(31_990, row, min_tokens=11)
    assert (error.value.status, error.value.param) == (400, "min_tokens")
    house.ask(31_990, row, min_tokens=10).close()


def test_an_answer_of_no_given_length_is_cut():
    house = House()
    request = request_of()
    house.arrive(with_limits(max_output_tokens=64)).set_prompts(request)
    assert request.sampling.max_tokens == 64
    request = request_of(31_990)
    house.arrive(replace(with_limits(max_output_tokens=64), slo=Slo())).set_prompts(request)
    assert request.sampling.max_tokens == 10, "no more than the context holds"


# ── rates ───────────────────────────────────────────────────────────────────────────────────────


def test_the_limits_of_a_class_hold_for_each_of_its_users():
    house, row = House(), with_limits(requests_at_once=1)
    first = house.ask(row=row)
    with pytest.raises(RequestError, match="Each user of the class interactive") as error:
        house.arrive(row)
    assert (error.value.status, error.value.reason) == (429, "requests_at_once")
    house.ask(row=row, caller=house.caller("bob"))
    first.close()
    first.close()
    house.arrive(row)


def test_a_key_with_a_limit_of_its_own_is_not_bound_by_its_class():
    house, row = House(), with_limits(tokens_per_minute=100)
    rich = house.caller("rich", tokens_per_minute=1000)
    house.ask(400, row, rich, max_tokens=100)
    assert rich.meter.tokens.available == 500
    with pytest.raises(RequestError) as error:
        house.ask(400, row, house.caller("poor"), max_tokens=100)
    assert (error.value.status, error.value.reason) == (400, "tokens_per_minute")


def test_tokens_are_held_and_settled():
    house, row = House(), with_limits(tokens_per_minute=1000)
    alice = house.caller()
    ticket = house.ask(100, row, alice, max_tokens=100, n=4)
    assert ticket.meter.tokens.available == 500
    with pytest.raises(RequestError) as error:
        house.ask(100, row, alice, max_tokens=401)
    assert error.value.status == 429
    assert error.value.retry_after_s == pytest.approx(60 / 1000)
    ticket.close(120)
    assert ticket.meter.tokens.available == pytest.approx(880)


@pytest.mark.parametrize(
    ("lengths", "sampling", "count"),
    [
        ([100], {"max_tokens": 100, "n": 4}, 100 + 4 * 100),
        ([100, 50], {"max_tokens": 10, "n": 2}, 150 + 2 * 2 * 10),
        ([100], {}, 32_000),
        ([100], {"n": 4}, 100 + 4 * 31_900),
        ([100, 31_990], {"n": 2}, 32_090 + 2 * (31_900 + 10)),
        ([100, 31_990], {"max_tokens": 20, "n": 2}, 32_090 + 2 * (20 + 10)),
    ],
)
def test_all_answers_are_held_at_their_longest(lengths, sampling, count):
    """Of each prompt n answers of `max_tokens`, or of all that the context has room for."""
    house, key = House(), House().caller(tokens_per_minute=10**6)
    ticket = house.arrive(replace(PLAIN, slo=Slo()), key)
    ticket.set_prompts(request_with(lengths, **sampling))
    assert key.meter.tokens.available == 10**6 - count
    ticket.close(150)
    assert key.meter.tokens.available == pytest.approx(10**6 - 150)


def test_answers_of_no_given_length_have_the_minute_s_tokens_together():
    """Many answers to many prompts cannot take more than a minute's worth in one request."""
    house, row = House(), replace(PLAIN, slo=Slo())
    key = house.caller(tokens_per_minute=5000)
    request = request_with([100, 100], n=8)
    first = house.arrive(row, key)
    first.set_prompts(request)
    assert request.sampling.max_tokens == 300, "(5000 - 200) / 16"
    assert key.meter.tokens.available == 0
    with pytest.raises(RequestError, match="may take 4900; a lower max_tokens") as error:
        house.ask(4899, row, key, max_tokens=1)
    assert error.value.status == 429, "concurrent requests share one balance"
    first.close(5000)
    least = request_with([100], min_tokens=400)
    house.arrive(row, house.caller(tokens_per_minute=5000)).set_prompts(least)
    assert least.sampling.max_tokens == 4900
    never = request_with([100], n=128, min_tokens=100)
    with pytest.raises(RequestError, match="ask for fewer answers") as error:
        house.arrive(row, house.caller(tokens_per_minute=5000)).set_prompts(never)
    assert (error.value.status, error.value.code) == (400, "tokens_per_minute_exceeded")


# ── the queue ───────────────────────────────────────────────────────────────────────────────────


def test_the_queue_is_bounded_before_anything_is_rendered():
    house = House()
    tickets = [house.arrive(num_slots=100) for _ in range(400)]
    with pytest.raises(OverloadedError) as error:
        house.arrive(num_slots=100)
    full(error, "queue_requests")
    for ticket in tickets[256:]:
        ticket.close()
    with pytest.raises(OverloadedError, match="256 requests wait already"):
        house.arrive()
    tickets[0].close()
    house.arrive()
    with pytest.raises(OverloadedError):
        house.arrive()
    tickets[1].set_prompts(request_of())
    tickets[1].on_first_token(0)
    house.arrive()


def test_the_queue_is_bounded_in_bytes():
    """As in numbers: one user cannot fill it for another, who has its share."""
    house = House(max_queue_bytes=1000)
    alice, bob = house.caller("alice"), house.caller("bob")
    ticket = house.arrive(caller=alice, num_bytes=999)
    house.arrive(caller=alice, num_bytes=5)
    with pytest.raises(OverloadedError, match="1000 bytes wait already") as error:
        house.arrive(caller=alice, num_bytes=1)
    full(error, "queue_bytes")
    house.arrive(caller=bob, num_bytes=600)
    with pytest.raises(OverloadedError):
        house.arrive(caller=bob, num_bytes=1)
    ticket.close()
    house.arrive(caller=alice, num_bytes=1)


def test_idle_work_fills_no_queue_but_its_own():
    house = House(max_queue=3)
    for _ in range(3):
        house.arrive(CLASSES["batch"])
    with pytest.raises(OverloadedError):
        house.arrive(CLASSES["batch"])
    for _ in range(3):
        house.arrive()


def test_queues_of_a_class_and_of_a_key():
    house, row = House(), with_limits(queue_requests=2)
    house.arrive(row)
    house.arrive(row, house.caller("bob"))
    with pytest.raises(OverloadedError) as error:
        house.arrive(row)
    full(error, "class_queue_requests")
    house.arrive(CLASSES["standard"])
    narrow = house.caller("carol", queue_requests=1)
    house.arrive(caller=narrow)
    with pytest.raises(RequestError) as refusal:
        house.arrive(caller=narrow)
    assert (refusal.value.status, refusal.value.reason) == (429, "key_queue_requests")


def test_far_beyond_its_objective_a_first_token_is_not_waited_for():
    """1 ms a token: 1,700 tokens are before a chat whose first token may take 1.5 s."""
    house = House()
    house.ask(500)
    house.ask(500)
    assert not house.ask(300).late
    assert house.ask(200).late, "it is let in: one that comes a little late is worth having"
    house.ask(200)
    with pytest.raises(OverloadedError) as error:
        house.ask(200)
    full(error, "queue_seconds")
    assert "would take 2.0 s; this exceeds the maximum queue wait of 1.9 s" in str(error.value), (
        "1.7, its own 0.2, a step of 0.1"
    )


def test_while_requests_are_late_those_that_would_be_are_refused():
    """1 ms a token and a tenth of the time for those late: 600 tokens are before a chat of 200."""
    house = House()
    house.ask(50)
    house.clock.advance(1.6)
    house.ask(300)
    assert not house.ask(300).late
    with pytest.raises(OverloadedError) as error:
        house.ask(220)
    full(error, "queue_seconds")
    assert "would take 1.0 s; this exceeds the maximum queue wait of 0.9 s" in str(error.value), (
        "0.22 and half of 1.28 are waited"
    )
    house.ask(220, slo=Slo(ttft_s=60))
    house.ask(200, CLASSES["standard"])
    house.ask(200, CLASSES["batch"])
    house.ask(200, caller=house.caller("bob"))


def test_after_a_refusal_less_may_be_waited_for_as_long_as_an_objective():
    """1 ms a token: where 1,000 tokens are before it, a chat of 300 waits 1.4 s."""
    house = House()
    places = [house.ask(500) for _ in range(3)]
    with pytest.raises(
        OverloadedError, match=r"would take 2.0 s; this exceeds the maximum queue wait of 1.9 s"
    ):
        house.ask(400)
    places.pop().close()
    house.clock.advance(1.4)
    with pytest.raises(
        OverloadedError, match=r"would take 1.4 s; this exceeds the maximum queue wait of 0.9 s"
    ):
        house.ask(300)
    for place in places:
        place.close()
    house.clock.advance(1.6)
    house.ask(500)
    house.ask(500)
    assert not house.ask(300).late, "long ago"


def test_a_refusal_by_a_strict_limit_puts_no_pressure_on_others():
    """1,200 tokens are before a chat of 300: it is late by 0.1 s, and let in."""
    house, impatient = House(), Slo(ttft_s=0.25)
    house.ask(500)
    house.ask(500)
    with pytest.raises(OverloadedError) as error:
        house.ask(20, with_limits(queue_seconds=0.5))
    full(error, "class_queue_seconds")
    house.ask(100, slo=impatient)
    house.ask(100, slo=impatient)
    with pytest.raises(OverloadedError) as error:
        house.ask(150, slo=impatient)
    full(error, "queue_seconds")
    assert house.ask(300).late


def test_an_impossible_objective_puts_no_pressure_on_others():
    """Late by its own 0.1 s, not by its class's 1.5 s: a chat after 1,350 tokens is let in late."""
    house = House()
    house.ask(50, slo=Slo(ttft_s=0.1))
    house.clock.advance(0.2)
    for length in (500, 500, 350):
        house.ask(length)
    assert house.ask(200).late


def test_a_configured_bound_holds_under_pressure():
    house = House(max_queue_wait_s=1.5)
    for length in 500, 500, 300:
        house.ask(length)
    for _ in range(2):
        with pytest.raises(OverloadedError, match=r"the maximum queue wait of 1.5 s"):
            house.ask(200)
    assert not house.ask(50).late


def test_what_is_late_even_alone_may_wait_twice_its_objective():
    """1.2 s of its own for an objective of 1.15 s, so 2.3 s: beside 0.9 s, not beside 1.4 s."""
    house, impossible = House(), Slo(ttft_s=1.15)
    house.ask(900, slo=Slo(ttft_s=1.1))
    house.ask(1200, slo=impossible).close()
    assert house.ask(1200, slo=impossible).late
    with pytest.raises(OverloadedError) as error:
        house.ask(1200, slo=impossible)
    assert "the maximum queue wait of 2.3 s" in str(error.value)


def test_the_bound_can_be_configured():
    house = House(max_queue_wait_s=0.65)
    house.ask(400)
    house.ask(100)
    with pytest.raises(OverloadedError) as error:
        house.ask(200)
    full(error, "queue_seconds")
    with pytest.raises(OverloadedError) as error:
        house.ask(20, with_limits(queue_seconds=0.5))
    full(error, "class_queue_seconds")
    with pytest.raises(RequestError) as refusal:
        house.ask(10, caller=house.caller("alice", queue_seconds=0.5))
    assert (refusal.value.status, refusal.value.reason) == (429, "key_queue_seconds")


def test_an_idle_server_refuses_no_request_for_load():
    house = House(max_queue_wait_s=0.01)
    assert not house.ask(30_000).late


def test_late_and_idle_requests_are_not_ahead():
    house = House(max_queue_wait_s=60)
    for _ in range(5):
        house.ask(500)
    house.ask(3000, CLASSES["batch"])
    entry = QueueEntry(user="alice", lengths=[100], remaining={0: 100}, untouched={0})
    assert house.forecast.wait_s(entry) == pytest.approx(2.6 + 0.1)
    idle = QueueEntry(
        user="alice", idle_only=True, lengths=[100], remaining={0: 100}, untouched={0}
    )
    assert house.forecast.wait_s(idle) == pytest.approx(5.6 + 0.1)
    house.clock.advance(1.6)  # by now the five are late, and have the lane
    assert house.forecast.wait_s(entry) == pytest.approx(0.1 / (1 - 0.1) + 0.1)
    assert house.forecast.wait_s(idle) == pytest.approx(5.6 + 0.1)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_first_come_first_served_waits_for_all(policy):
    house = House(order=POLICIES[policy].queue_order)
    house.ask(500)
    house.ask(3000, CLASSES["batch"])
    house.clock.advance(10)
    entry = QueueEntry(user="alice", lengths=[100], remaining={0: 100}, untouched={0})
    assert house.forecast.wait_s(entry) == pytest.approx(3.6 + 0.1)


def test_requests_due_later_are_not_ahead():
    """Under slo an interactive request goes before a standard one, not the other way round."""
    house = House()
    house.ask(500, CLASSES["standard"])
    first = house.ask(100)
    assert house.forecast.wait_s(first.entry) == pytest.approx(0.1)
    last = house.ask(100, CLASSES["standard"])
    assert house.forecast.wait_s(last.entry) == pytest.approx(0.7 + 0.1)


@pytest.mark.parametrize("policy", ["fair", "slo"])
def test_a_user_does_not_wait_for_all_that_another_has_waiting(policy):
    """The example of the docstring, and with twice the weight."""
    house = House(order=POLICIES[policy].queue_order)
    heavy = house.caller("heavy")
    for _ in range(10):
        house.ask(500, caller=heavy, slo=Slo(ttft_s=20))
    late = Slo(ttft_s=30)
    assert house.forecast.wait_s(house.ask(100, slo=late).entry) == pytest.approx(0.2 + 0.1)
    twice = replace(house.caller("bob"), weight=2.0)
    entry = house.ask(100, caller=twice, slo=late).entry
    assert house.forecast.wait_s(entry) == pytest.approx(0.1 + 0.05 + 0.05 + 0.1)


def test_one_user_cannot_fill_the_queue_for_the_others():
    house = House(max_queue=8)
    heavy = house.caller("heavy")
    for _ in range(8):
        house.arrive(caller=heavy)
    with pytest.raises(OverloadedError):
        house.arrive(caller=heavy)
    for _ in range(4):
        house.arrive(caller=house.caller("light"))
    with pytest.raises(OverloadedError):
        house.arrive(caller=house.caller("light"))
    house.arrive(caller=house.caller("third"))
    while house.forecast.num_waiting < 16:
        house.arrive(caller=house.caller(f"user {house.forecast.num_waiting}"))
    with pytest.raises(OverloadedError):
        house.arrive(caller=house.caller("somebody else"))
    assert house.forecast.num_waiting == 16, "twice the queue, whoever comes"


def test_long_jobs_have_a_lane_and_a_bound():
    house = House(max_long_queue=2)
    relaxed = replace(CLASSES["standard"], slo=Slo(ttft_s=300))
    house.ask(2000, relaxed)
    house.ask(2000, relaxed)
    with pytest.raises(OverloadedError) as error:
        house.ask(2000, relaxed)
    full(error, "long_queue")
    chat = house.ask(100)
    assert chat.entry.long is False
    wait_s = 100 * TOKEN_S / (1 - 0.1) + 0.1
    assert house.forecast.wait_s(chat.entry) == pytest.approx(wait_s)


# ── requests that ask for no objective ──────────────────────────────────────────────────────────


def ask_often(house: House, times: int, prompt: int, row=DEFAULT, **how) -> None:
    for _ in range(times):
        house.ask(prompt, row, **how)


def test_a_request_without_objective_is_queued_for_a_minute():
    """1 ms a token: the 100th request of 600 tokens would wait for a minute and is refused."""
    house = House()
    tickets = [house.ask(600, DEFAULT) for _ in range(99)]
    assert [ticket.entry.best_effort for ticket in tickets] == [False] * 3 + [True] * 96
    assert house.forecast.wait_s(tickets[-1].entry) == pytest.approx(96 * 0.6 + 0.1, abs=2.0)
    with pytest.raises(OverloadedError) as error:
        ask_often(house, 5, 600, DEFAULT)
    full(error, "queue_seconds")
    assert "this exceeds the maximum queue wait of 60.0 s" in str(error.value)


@pytest.mark.parametrize("how", ["slo", "class", "stated"])
def test_a_request_with_an_objective_is_refused_as_before(how):
    house = House()
    row, slo = {
        "slo": (DEFAULT, PLAIN.slo),
        "class": (PLAIN, None),
        "stated": (service_classes(["ttft=1.5s,tpot=120ms"])["default"], None),
    }[how]
    with pytest.raises(OverloadedError, match=r"the maximum queue wait of 1.9 s") as error:
        ask_often(house, 10, 400, row, slo=slo)
    full(error, "queue_seconds")


def test_the_queue_is_in_order_and_delays_no_request_with_an_objective():
    """Those queued go by arrival, later ones too that could be in time; others go before them."""
    house, terms = House(), DEFAULT.terms()
    for _ in range(3):
        house.ask(600, DEFAULT)
    queued = house.ask(600, DEFAULT)
    assert queued.entry.best_effort and queued.late
    assert queued.terms(terms).ttft_s == 600.0, "ten waits: never late"
    house.clock.advance(0.01)
    short = house.ask(5, DEFAULT)
    assert short.entry.best_effort, "it came later"
    assert house.forecast.wait_s(short.entry) > house.forecast.wait_s(queued.entry)
    other = house.ask(5, DEFAULT, house.caller("bob"))
    assert not other.entry.best_effort and other.terms(terms) == terms, "another user's turn"
    before = house.forecast.wait_s(queued.entry)
    request = house.ask(5, PLAIN, house.caller("carol"))
    assert house.forecast.wait_s(request.entry) < 1.5 < before
    house.clock.advance(2.0)
    house.ask(5, PLAIN, house.caller("carol"))
    assert queued.entry.late_s > house.clock.now_s(), "it puts no pressure on others"


def test_the_bound_of_the_queue_can_be_configured():
    house = House(max_queue_wait_s=3.0)
    with pytest.raises(OverloadedError, match=r"the maximum queue wait of 3.0 s"):
        ask_often(house, 10, 600, DEFAULT)
    assert house.forecast.num_waiting == 4


def test_a_queue_that_has_ended_is_forgotten():
    house = House()
    tickets = [house.ask(600, DEFAULT) for _ in range(5)]
    assert tickets[-1].entry.best_effort
    for ticket in tickets[1:]:
        ticket.on_first_token(0)
    assert not house.ask(600, DEFAULT).entry.best_effort


# ── any order of events ─────────────────────────────────────────────────────────────────────────


class Door(RuleBasedStateMachine):
    """Requests come, are measured, sent, computed, begin and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(max_queue=5)
        self.callers = {
            name: self.house.caller(name, tokens_per_minute=3000, requests_at_once=4)
            for name in ("alice", "bob")
        }
        self.tickets: list[Ticket] = []
        self.answers: list[int] = []

    @rule(
        name=st.sampled_from(["alice", "bob"]),
        row=st.sampled_from(sorted(CLASSES)),
        prompt=st.integers(1, 2000),
        answer=st.none() | st.integers(1, 500),
    )
    def ask(self, name: str, row: str, prompt: int, answer: int | None) -> None:
        waiting = self.house.forecast.num_waiting
        refusal = None
        try:
            ticket = self.house.ask(prompt, CLASSES[row], self.callers[name], max_tokens=answer)
        except RequestError as error:
            refusal = error
        if refusal is None:
            self.tickets.append(ticket)
            return
        assert refusal.reason is not None
        assert self.house.forecast.num_waiting == waiting
        if refusal.status == 503:
            assert waiting > 0, "an idle server is not full"
        if refusal.status != 400:
            assert 0 < refusal.retry_after_s <= 120

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), computed=st.integers(1, 2500), seconds=st.floats(0.001, 1))
    def compute(self, data: st.DataObject, computed: int, seconds: float) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        (engine_id,) = ticket.entry.engine_ids
        self.house.clock.advance(seconds)
        self.house.forecast.on_record(
            step(computed, seconds, prefilling=[(engine_id, 0, computed)])
        )

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tickets)).on_first_token(0)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), used=st.integers(0, 600))
    def end(self, data: st.DataObject, used: int) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        ticket.close(used)

    @invariant()
    def counts(self) -> None:
        self.house.admission.check_integrity()
        open_entries = {ticket.entry for ticket in self.tickets}
        assert set(self.house.forecast.entries) <= open_entries
        if not self.tickets:
            assert self.house.forecast.backlog_s() == 0
            for caller in self.callers.values():
                assert caller.meter.tokens._held == 0


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=30, stateful_step_count=20)
