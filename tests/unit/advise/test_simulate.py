"""The simulator's arithmetic: queues that have a formula, tokens that add up, the same twice."""

import msgspec
import numpy as np
import pytest

from headway.advise.simulate.front import FrontendTimes
from headway.core.slo import parse_slo
from headway.measure.record import Exchange
from simulated_house import Formula, poisson, served, talks, world


def waits(exchanges: list[Exchange], service_s: float) -> np.ndarray:
    return np.array([x.chunk_s[0] - x.scheduled_s - service_s for x in exchanges])


def test_one_row_with_steps_of_one_length_is_a_queue_with_one_server():
    """Each waits as Lindley's recursion says: what the one before waited and took, less the gap."""
    step_s, times = 0.01, poisson(70, 1000)
    setup = served(max_num_seqs=1, prefix_cache="")
    result = world(Formula(step_s), setup).run(talks(times))
    expected, wait_s = [0.0], 0.0
    for gap_s in np.diff(times):
        wait_s = max(0.0, wait_s + step_s - gap_s)
        expected.append(wait_s)
    assert waits(result, step_s) == pytest.approx(np.array(expected), abs=2e-5)


@pytest.mark.hardening
def test_the_queue_m_d_1_for_long():
    load, step_s, count = 0.7, 0.01, 100_000
    setup = served(max_num_seqs=1, prefix_cache="")
    result = world(Formula(step_s), setup).run(talks(poisson(load / step_s, count, seed=5)))
    expected_s = load * step_s / (2 * (1 - load))
    assert waits(result, step_s).mean() == pytest.approx(expected_s, rel=0.03)


def test_littles_law_and_all_tokens_come():
    """Requests in flight are arrivals times time, and every asked token comes once."""
    made = world(Formula(0.004, 1e-4), served(policy="slo"))
    result = made.run(talks(poisson(20, 400), prompt=60, answer=12))
    span_s = max(x.ended_s for x in result)
    steps = np.linspace(0, span_s, 20_000)
    in_air = sum((steps >= x.scheduled_s) & (steps < x.ended_s) for x in result).mean()
    mean_s = np.mean([x.ended_s - x.scheduled_s for x in result])
    assert in_air == pytest.approx(len(result) / span_s * mean_s, rel=0.01)
    assert all(x.output_tokens == 12 == sum(x.chunk_tokens) for x in result)
    assert made.replicas[0].num_tokens == 12 * len(result)
    made.replicas[0].engine.check_integrity()
    made.door.admission.check_integrity()
    assert not list(made.door.admission.queues.entries)


def test_the_same_twice_to_the_byte():
    def run() -> bytes:
        made = world(Formula(0.004, 1e-4), served(policy="slo"), replicas=2)
        conversations = talks(poisson(60, 150), prompt=100, answer=20, turns=2, think_s=0.3)
        return msgspec.json.encode(made.run(conversations))

    assert run() == run()


def test_who_arrives_in_a_step_joins_the_next():
    """Steps of 100 ms: one at 0 begins at once, one at 10 ms waits for the first step's end."""
    result = world(Formula(0.1), served()).run(talks([0.0, 0.01], answer=2))
    assert result[0].chunk_s == pytest.approx([0.1, 0.2])
    assert result[1].chunk_s == pytest.approx([0.2, 0.3])


def test_the_front_is_before_and_behind_the_steps():
    front = FrontendTimes(in_s=0.01, in_token_s=1e-4, out_s=0.002, row_s=0.001, door_s=0.004)
    result = world(Formula(0.1), served(), front=front).run(talks([0.0, 0.0], prompt=10))
    began_s = 0.002 + 0.01 + 10 * 1e-4
    ended_s = began_s + 0.1
    assert [x.chunk_s[0] for x in result] == pytest.approx([ended_s + 0.004, ended_s + 0.005])


def test_a_turn_comes_after_the_answer_and_finds_it_in_the_cache():
    """The second prompt is all that was said; what was computed of it is not computed again."""
    result = world(Formula(0.01), served()).run(
        talks([0.0], prompt=64, answer=16, turns=2, think_s=1.0)
    )
    first, second = result
    assert second.scheduled_s == pytest.approx(first.ended_s + 1.0)
    assert second.prompt_tokens == 64 + 16 + 64
    assert second.cached_tokens == 64 + 16 - 1  # the last token of an answer is never computed


def test_the_engine_learns_no_more_of_a_length_than_the_client_says():
    """With a limit every request asks for as much; the end token comes where the trace ends."""
    made = world(Formula(0.01), served(), answer_limit=200)
    seeds: list[int] = []
    add = made.replicas[0].engine.add

    def look(request):
        seeds.append(request.sampling.max_tokens)
        add(request)

    made.replicas[0].engine.add = look
    result = made.run(talks([0.0, 0.0], answer=5))
    assert seeds == [200, 200]
    assert [x.output_tokens for x in result] == [5, 5]
    assert {x.finish_reason for x in result} == {"stop"}


def test_the_door_refuses_as_the_server_does():
    """Twice what a server can take, and the queue may wait 50 ms: the rest is refused with 503."""
    made = world(Formula(0.01), served(max_num_seqs=1, max_queue_wait_s=0.05))
    result = made.run(talks(poisson(200, 300), prompt=32))
    refused = [x for x in result if x.error]
    assert {x.error for x in refused} == {"status 503"}
    assert 0.3 < len(refused) / len(result) < 0.7
    answered = [x.chunk_s[0] - x.scheduled_s for x in result if not x.error]
    assert max(answered) < 0.5


def test_retries_go_back_into_the_load():
    setup = served(max_num_seqs=1, max_queue_wait_s=0.05)
    conversations = talks(poisson(200, 300), prompt=32)
    once = world(Formula(0.01), setup)
    again = world(Formula(0.01), setup, retries=2)
    refused = sum(bool(x.error) for x in once.run(conversations))
    later = sum(bool(x.error) for x in again.run(conversations))
    assert again.num_retries > 100 and once.num_retries == 0
    assert later < refused


def test_those_who_wait_too_long_leave_and_their_rows_come_free():
    made = world(Formula(0.1), served(max_num_seqs=1), timeout_s=1.0)
    result = made.run(talks([0.0, 0.05, 3.0], answer=30, prompt=4))
    assert [x.error for x in result] == ["timeout", "timeout", "timeout"]
    assert made.replicas[0].engine.num_requests == 0
    assert not made.replicas[0].jobs


def test_only_the_first_who_may_leave_is_waited_for():
    """200 clients in flight are one event, and each leaves at its own time."""
    made = world(Formula(0.1), served(max_num_seqs=1, max_queue_wait_s=1e6), timeout_s=1.0)
    waiting = []

    def step(replica, now_s, step=made._step):
        waiting.append(sum(act == made._time_out for _, _, act, _ in made._heap))
        step(replica, now_s)

    made._step = step  # type: ignore[method-assign]
    times = [0.01 * number for number in range(200)]
    result = made.run(talks(times, answer=30, prompt=4))
    assert max(waiting) == 1
    assert {x.error for x in result} == {"timeout"}
    assert [x.ended_s for x in result] == pytest.approx([at_s + 1.0 for at_s in times])
    assert not made._waiting and not made.replicas[0].jobs


def test_two_replicas_take_twice_as_much():
    """The router spreads what comes, and each prompt goes to where its beginning was computed."""
    conversations = talks(poisson(150, 600), prompt=32)
    one = world(Formula(0.01), served(max_num_seqs=1, prefix_cache="")).run(conversations)
    made = world(Formula(0.01), served(max_num_seqs=1, prefix_cache=""), replicas=2)
    two = made.run(conversations)
    assert np.mean(waits(one, 0.01)) > 10 * np.mean(waits(two, 0.01))
    shares = [replica.num_tokens / 600 for replica in made.replicas]
    assert min(shares) > 0.4


def test_a_closed_loop_asks_when_it_was_answered():
    made = world(Formula(0.01), served(), concurrency=3, until_s=1.0)
    result = made.run(talks([0.0] * 5, answer=4))
    assert len(result) == pytest.approx(3 * 1.0 / 0.04, abs=4)
    open_at_once = [sum(a.scheduled_s <= x.scheduled_s < a.ended_s for a in result) for x in result]
    assert max(open_at_once) == 3


def test_classes_of_the_traffic_are_those_of_the_server():
    door = world(Formula(0.01), served(policy="slo")).door
    assert door.class_of("interactive").slo == parse_slo("ttft=1.5s,tpot=120ms")
    assert door.class_of("nobody").name == "default"
