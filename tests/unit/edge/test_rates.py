"""Rates and budgets: never more than a burst and the rate, whatever the order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.core.service import KeyLimits
from headway.edge.rates import Gcra, Meter

PER_MINUTE = 120


def test_the_example_of_the_docstring():
    clock = VirtualClock()
    rate = Gcra(120, clock)
    assert rate.wait_s(120) == 0 < rate.wait_s(121)
    rate.take(120)
    clock.advance(1)
    assert rate.available == pytest.approx(2)
    clock.advance(1000)
    rate.hold(100)
    assert rate.available == 20
    rate.settle(100, 30)
    assert rate.available == pytest.approx(90)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 150)), max_size=40))
def test_never_more_than_a_burst_and_the_rate(steps):
    """What is taken in any window is at most one burst and the rate times its length."""
    clock = VirtualClock()
    rate = Gcra(PER_MINUTE, clock)
    taken: list[tuple[float, int]] = []
    for pause_s, count in steps:
        clock.advance(pause_s)
        if rate.wait_s(count) == 0:
            rate.take(count)
            taken.append((clock.now_s(), count))
    for first, (since_s, _) in enumerate(taken):
        for last in range(first, len(taken)):
            window_s = taken[last][0] - since_s
            total = sum(count for _, count in taken[first : last + 1])
            assert total <= PER_MINUTE + window_s * PER_MINUTE / 60 + 1e-6


def test_a_line_of_a_batch_leaves_half_to_the_others_of_its_key():
    """Ten a minute and three at once: lines take five and two, others what is left of them."""
    clock = VirtualClock()
    meter = Meter(KeyLimits(requests_at_once=3, requests_per_minute=10), clock)
    for _ in range(2):
        meter.enter(spare=True)
    with pytest.raises(RequestError) as refused:
        meter.enter(spare=True)
    assert refused.value.reason == "requests_at_once"
    meter.enter()
    for _ in range(3):
        meter.leave()
    for _ in range(2):
        meter.enter(spare=True)
        meter.leave()
    with pytest.raises(RequestError) as refused:
        meter.enter(spare=True)
    assert refused.value.reason == "requests_per_minute"
    clock.advance(refused.value.retry_after_s)
    meter.enter(spare=True)
    meter.leave(counted=False)
    for _ in range(6):
        meter.enter()
        meter.leave()
    with pytest.raises(RequestError):
        meter.enter()


def test_a_line_as_large_as_a_minute_waits_for_all_of_it():
    clock = VirtualClock()
    meter = Meter(KeyLimits(tokens_per_minute=100), clock)
    assert meter.hold(100, "max_tokens", spare=True) == 100
    meter.settle(100, 30)
    for count, wait_s in ((20, 0), (21, 0.6), (90, 18)):
        if wait_s:
            with pytest.raises(RequestError) as refused:
                meter.hold(count, "max_tokens", spare=True)
            assert refused.value.retry_after_s == pytest.approx(wait_s)
        else:
            meter.settle(meter.hold(count, "max_tokens", spare=True), 0)
    with pytest.raises(RequestError) as refused:
        meter.hold(101, "max_tokens", spare=True)
    assert (refused.value.status, refused.value.code) == (400, "tokens_per_minute_exceeded")


@given(st.integers(1, PER_MINUTE), st.integers(0, 4000))
def test_it_is_let_in_when_it_was_told_and_not_before(count, debt):
    clock = VirtualClock()
    rate = Gcra(PER_MINUTE, clock)
    rate.take(debt)
    wait_s = rate.wait_s(count)
    if wait_s > 0.01:
        clock.advance(wait_s - 0.005)
        assert rate.wait_s(count) > 0
        clock.advance(0.006)
    assert rate.wait_s(count) == 0


class Budget(RuleBasedStateMachine):
    """Requests hold what they may take and settle what they took, in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.meter = Meter(KeyLimits(tokens_per_minute=PER_MINUTE), self.clock)
        self.open: list[int] = []
        self.charged: list[tuple[float, int]] = []

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(count=st.integers(2, 160))
    def ask(self, count: int) -> None:
        refusal = None
        try:
            self.open.append(self.meter.hold(count, "max_tokens"))
        except RequestError as error:
            refusal = error
        if count > PER_MINUTE:
            assert refusal is not None and refusal.status == 400
        elif refusal is not None:
            assert refusal.status == 429 and 0 < refusal.retry_after_s <= 120

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        used = data.draw(st.integers(0, held))
        self.meter.settle(held, used)
        self.charged.append((self.clock.now_s(), used))

    @invariant()
    def within_the_budget(self) -> None:
        tokens = self.meter.tokens
        tokens.check_integrity()
        assert tokens.available >= -1e-6, "nobody took more than was held"
        now_s = self.clock.now_s()
        total = 0
        for at_s, used in reversed(self.charged):
            total += used
            assert total <= PER_MINUTE + (now_s - at_s) * PER_MINUTE / 60 + 1e-6
        assert tokens.available <= PER_MINUTE - sum(self.open) + 1e-6


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=30, stateful_step_count=20)


# ── a meter ─────────────────────────────────────────────────────────────────────────────────────


def refused(meter: Meter) -> RequestError:
    with pytest.raises(RequestError) as caught:
        meter.enter()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert 0 < caught.value.retry_after_s <= 120
    return caught.value


def test_requests_at_once():
    meter = Meter(KeyLimits(requests_at_once=2), VirtualClock())
    meter.enter()
    meter.enter()
    error = refused(meter)
    assert "2 requests at once" in str(error) and error.reason == "requests_at_once"
    meter.leave()
    meter.enter()
    assert meter.headers() == []


def test_requests_per_minute():
    clock = VirtualClock()
    meter = Meter(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        meter.enter()
        meter.leave()
    error = refused(meter)
    assert error.retry_after_s == pytest.approx(20) and error.reason == "requests_per_minute"
    assert dict(meter.headers()) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"60.0s",
    }
    clock.advance(20.01)
    meter.enter()
    refused(meter)


def test_more_than_was_held_is_a_debt():
    """The next request waits until it is paid, and is told to wait two minutes at most."""
    clock = VirtualClock()
    meter = Meter(KeyLimits(tokens_per_minute=600), clock)
    meter.enter()
    held = meter.hold(600, "prompt")
    assert refused(meter).reason == "tokens_per_minute", "the budget is held"
    meter.settle(held, 1200)
    meter.leave()
    assert refused(meter).retry_after_s == pytest.approx(60.1)
    meter.settle(0, 10_000)
    assert refused(meter).retry_after_s == 120
    clock.advance(1100)
    meter.enter()


def test_what_can_never_be_had_is_no_429():
    meter = Meter(KeyLimits(tokens_per_minute=600), VirtualClock())
    with pytest.raises(RequestError) as error:
        meter.hold(601, "max_tokens")
    assert (error.value.status, error.value.reason) == (400, "tokens_per_minute")
    assert meter.tokens.available == 600
