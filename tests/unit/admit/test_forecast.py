"""The forecast of waiting: what it learns from steps, from the cache and from refusals."""

from functools import partial
from math import inf

import pytest
from msgspec import structs

from admission_house import CLASSES, House, step
from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lengths import AdmissionRequest
from headway.admit.prefixes import ComputedPrefixes, page_hashes
from headway.admit.queue import QueueOrder
from headway.core.errors import OverloadedError
from headway.core.request import SamplingParams
from headway.core.slo import Slo


def num_cached(prefixes: ComputedPrefixes, salt: str, prompt: list[int]) -> int:
    return prefixes.num_cached(page_hashes(salt, prompt), len(prompt))


def test_progress_counts():
    house = House()
    ticket = house.ask(1000)
    (engine_id,) = ticket.entry.engine_ids
    house.forecast.on_record(step(600, 0.6, prefilling=[(engine_id, 0, 600), (99, 0, 5)]))
    assert house.forecast.tokens(ticket.entry) == 400
    ticket.on_first_token(0)
    assert house.forecast.backlog_s() == 0
    house.forecast.check_integrity()


def test_what_is_cached_is_not_waited_for():
    house = House()
    record = step(100, 0.1, num_queried_tokens=1000, num_cached_tokens=900)
    house.forecast.on_record(record)
    assert house.forecast.uncached == pytest.approx(0.1)
    assert house.forecast.tokens(house.ask(1000).entry) == pytest.approx(100)


def test_a_wait_is_what_the_engine_predicts_of_a_prompt_token():
    """Whatever the step itself took: the prediction of the newest record holds."""
    house = House()
    ticket = house.ask(1000)
    for token_s in (0.004, 0.0005):
        house.forecast.on_record(step(0, 0.1, prefill_s_per_token=token_s, alone_s_per_token=0.001))
        assert house.forecast.backlog_s() == pytest.approx(1000 * token_s)
        assert house.forecast.alone_s == 0.001
    ticket.close()


def test_before_any_step_no_request_is_refused_for_load():
    house = House()
    house.admission.queues.by_engine[0].forecast = house.forecast = Forecast(
        house.clock, order=QueueOrder.DEADLINE, lane_share=0.1
    )
    for _ in range(10):
        house.ask(5000)


def test_while_rows_are_short_the_queue_is_so_many_rows_long():
    """Ten short prompts of one user take 1 s to compute and, a row every 0.4 s, 4 s to begin; the
    next would have its row after 4.4 s, and another user, who has it after one of theirs, 0.8 s."""
    house, full = House(max_queue_wait_s=4.0), step(10, 0.01, slot_s=0.4)
    relaxed = Slo(ttft_s=100.0)
    heavy = house.caller("heavy")
    for _ in range(10):
        house.ask(100, caller=heavy, slo=relaxed)
    new = QueueEntry(user="heavy", due_s=inf)
    house.forecast.set_prompts(new, [100])
    other = QueueEntry(user="other", due_s=inf)
    house.forecast.set_prompts(other, [100])
    assert house.forecast.wait_s(new) == pytest.approx(1.1 + 0.1)
    house.forecast.on_record(full)
    assert house.forecast.wait_s(new) == pytest.approx(4.4 + 0.01)
    assert house.forecast.wait_s(other) == pytest.approx(0.8 + 0.01)
    with pytest.raises(OverloadedError) as error:
        house.ask(100, caller=heavy, slo=relaxed)
    assert error.value.reason == "queue_seconds"
    house.ask(100, caller=house.caller("other"), slo=relaxed).close()
    house.forecast.on_record(step(10, 0.01))
    assert house.forecast.wait_s(new) < 2, "there are rows again"


def test_rows_that_others_had_of_late_are_not_counted_on():
    """Of the last forty rows each second went to one who does not wait now: a backlog of two takes
    twice as long, but not the first request of a user with few."""
    house = House()
    house.forecast.on_record(step(10, 0.01, slot_s=0.4))
    relaxed = Slo(ttft_s=100.0)
    for number in range(40):
        caller = house.caller("heavy" if number % 2 else f"light {number % 3}")
        ticket = house.ask(10, caller=caller, slo=relaxed)
        ticket.on_first_token(0)
        ticket.close()
    house.ask(10, caller=house.caller("heavy"), slo=relaxed)
    for user, wait_s in (("heavy", 2 * 0.4 * 2), ("seldom", 2 * 0.4)):
        new = QueueEntry(user=user, due_s=inf)
        house.forecast.set_prompts(new, [10])
        assert house.forecast.wait_s(new) == pytest.approx(wait_s, rel=0.05)


def test_what_was_computed_before_is_not_waited_for_again():
    """A system prompt of 1,500 tokens counts once, by owner, and never the last token."""
    house = House()
    system, question = list(range(1500)), [7] * 150
    first = AdmissionRequest(
        lengths=[1650],
        sampling=SamplingParams(),
        max_model_len=8192,
        prompts=[system + question],
        salt="alice",
    )
    ticket = house.admission.arrive(house.caller(), CLASSES["standard"], 8)
    ticket.set_prompts(first)
    assert ticket.entry.remaining == {0: 1650}
    ticket.on_first_token(0)
    found = partial(num_cached, house.admission.queues.by_engine[0].prefixes)
    assert found("alice", system + [9] * 150) == 1472
    assert found("bob", system + question) == 0
    assert found("alice", system[:64]) == 63
    again = house.admission.arrive(house.caller(), CLASSES["standard"], 8)
    again.set_prompts(structs.replace(first, prompts=[system + [9] * 150]))
    assert again.entry.remaining == {0: 178}


def test_remembered_prefixes_are_bounded():
    """The least recently used pages go first."""
    prefixes = ComputedPrefixes(max_pages=4)
    prefixes.add(page_hashes("", [1] * 128))
    prefixes.add(page_hashes("", [2] * 192))
    assert len(prefixes) == 4
    assert num_cached(prefixes, "", [2] * 300) == 192
    assert num_cached(prefixes, "", [1] * 300) == 0  # its first page is gone


def test_answers_end_sooner_where_draft_tokens_are_accepted():
    """A user with 2 slots of 4 gets the third after 50 steps of 40 ms, or a third of them."""
    waits = []
    for kept in (0, 8):
        house = House()
        told = {"num_decode_tokens": 12, "num_drafts": 8, "num_kept_drafts": kept}
        told |= {"verified": [("lookup", 8, kept)], "slot_s": 9.0}
        for _ in range(100):
            full = step(0, 0.04, user_slots={"A": (4.0, 1.0)}, **told)
            house.forecast.on_record(full)
        entry = QueueEntry(user="B", n=1, answer=50, due_s=house.clock.now_s() + 1.5)
        house.forecast.set_prompts(entry, [100] * 3)
        waits.append(house.forecast.wait_s(entry))
    slow, fast = waits
    assert slow - fast == pytest.approx(50 * 0.04 * (1 - 1 / 3), rel=0.01)
