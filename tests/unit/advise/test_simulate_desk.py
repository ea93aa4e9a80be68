"""The front's queue: what the server's process takes for each, in order, and who waits for it."""

from dataclasses import replace

import numpy as np
import pytest

from headway.advise.simulate.cores import FifoServer
from headway.advise.simulate.front import NO_FRONT, FrontendTimes
from headway.perf.frontend import HostCost
from simulated_house import Formula, poisson, served, talks, world


def busy(**costs: float) -> FrontendTimes:
    """Nothing but what the desk takes."""
    return replace(NO_FRONT, **costs)


def test_who_comes_while_it_is_busy_waits():
    """Work of 2 s at 0 and of 1 s at 1: who comes at 2.5 waits 0.5 s, who comes at 9 none."""
    desk = FifoServer()
    assert desk.wait_s(0.0) == 0.0
    desk.work(0.0, 2.0)
    desk.work(1.0, 1.0)
    assert (desk.wait_s(2.5), desk.wait_s(9.0)) == (0.5, 0.0)
    desk.work(9.0, 1.0)
    assert desk.free_s == 10.0


def test_updates_of_a_step_are_read_one_after_the_other():
    """A step ends at 5 s: 10 ms out, 1 ms for each before it, half of the door, 0.5 s late."""
    front = replace(NO_FRONT, out_s=0.01, door_s=0.004)
    assert front.read_s(5.0, 3, 0.5, 0.001) == pytest.approx([5.512, 5.513, 5.514])
    assert front.read_s(5.0, 0, 0.5, 0.001) == []


def test_requests_are_judged_as_lindley_says():
    """10 ms a request, at 70 a second: when each is judged, no step being in the way."""
    times, cost_s = poisson(70, 400), 0.01
    made = world(Formula(1e-6), served(), front=busy(request_cpu_s=cost_s))
    judged, judge = [], made._judge

    def seen(asking, tries, now_s):
        judged.append(now_s - asking.x.scheduled_s)
        judge(asking, tries, now_s)

    made._judge = seen
    made.run(talks(times))
    expected, wait_s = [0.0], 0.0
    for gap_s in np.diff(times):
        wait_s = max(0.0, wait_s + cost_s - gap_s)
        expected.append(wait_s)
    assert judged == pytest.approx(expected, abs=1e-9)


def test_tokens_leave_as_fast_as_the_desk_writes_them_and_no_faster():
    """16 rows at 1 ms a step could be 16,000 tokens a second; at 0.2 ms a token 5,000 leave."""
    for token_s, least_s in ((0.0, 0.0), (2e-4, 16 * 200 * 2e-4)):
        front = busy(token_cpu_s=token_s)
        result = world(Formula(1e-3), served(), front=front).run(talks([0.0] * 16, answer=200))
        span_s = max(x.ended_s for x in result)
        assert span_s == pytest.approx(max(200 * 1e-3, least_s), rel=0.06)


def test_what_a_step_costs_is_shared_by_its_rows():
    """2 ms a step and steps of 1 ms: one row gets a token each 2 ms, and so do eight."""
    for rows in (1, 8):
        made = world(Formula(1e-3), served(), front=busy(step_cpu_s=2e-3))
        result = made.run(talks([0.0] * rows, answer=100))
        tpot_s = np.mean([(x.chunk_s[-1] - x.chunk_s[0]) / 99 for x in result])
        assert tpot_s == pytest.approx(2e-3, rel=0.05)


def test_a_desk_that_keeps_up_changes_little():
    """At a tenth of what it could: TPOT within 5% of a front without a queue."""
    times = poisson(10, 200)
    tpots = []
    for front in (NO_FRONT, busy(token_cpu_s=5e-5, request_cpu_s=1e-3)):
        result = world(Formula(0.01), served(), front=front).run(talks(times, answer=20))
        tpots.append(np.median([(x.chunk_s[-1] - x.chunk_s[0]) / 19 for x in result]))
    assert tpots[1] == pytest.approx(tpots[0], rel=0.05)


def test_without_costs_nothing_changes_to_the_byte():
    conversations = talks(poisson(40, 100), prompt=50, answer=10)
    runs = [
        world(Formula(4e-3), served(), front=front).run(conversations)
        for front in (NO_FRONT, replace(NO_FRONT, num_cores=64))
    ]
    assert runs[0] == runs[1]


def test_newcomers_wait_behind_the_tokens_of_others():
    """32 answers saturate it; who comes then reads the first token late, though rows are free."""
    quick, slow = (
        world(Formula(1e-3), served(), front=busy(token_cpu_s=cost_s)).run(
            talks([*[0.0] * 32, 0.1], answer=300)
        )[-1]
        for cost_s in (0.0, 2e-4)
    )
    assert quick.chunk_s[0] - quick.scheduled_s < 0.01
    assert slow.chunk_s[0] - slow.scheduled_s > 0.1


def test_all_engines_of_a_server_have_one_desk():
    """Two engines give twice the tokens, and the desk as many as before."""
    spans = []
    for replicas in (1, 2):
        front = busy(token_cpu_s=2e-4)
        made = world(Formula(1e-3), served(), replicas=replicas, front=front)
        spans.append(max(x.ended_s for x in made.run(talks([0.0] * 32, answer=100))))
    assert spans[1] == pytest.approx(spans[0], rel=0.05)
    assert spans[0] == pytest.approx(32 * 100 * 2e-4, rel=0.05)


def test_every_token_still_comes_once_and_in_order():
    front = busy(token_cpu_s=3e-4, step_cpu_s=1e-4, request_cpu_s=2e-3)
    made = world(Formula(2e-3), served(policy="slo"), front=front)
    result = made.run(talks(poisson(60, 200), prompt=40, answer=15))
    assert all(x.output_tokens == 15 for x in result)
    assert all(list(x.chunk_s) == sorted(x.chunk_s) for x in result)
    assert all(x.chunk_s[0] >= x.scheduled_s and x.ended_s == x.chunk_s[-1] for x in result)
    made.door.admission.check_integrity()
    made.replicas[0].engine.check_integrity()


@pytest.mark.parametrize(
    ("costs", "token_s"),
    [
        ({"token_cpu_s": 2e-4, "client_cpu_s": 5e-5}, 2e-4),
        ({"token_cpu_s": 5e-5, "client_cpu_s": 2e-4}, 2e-4),
        ({"token_cpu_s": 1e-4, "client_cpu_s": 1e-4}, 1e-4),
        ({"step_cpu_s": 3.2e-3, "client_cpu_s": 1e-4}, 2e-4),  # sixteen rows share a step's
    ],
)
def test_the_slower_of_server_and_client_decides(costs: dict[str, float], token_s: float):
    """They work beside each other: 16 answers of 200 tokens take as long as the slower needs."""
    result = world(Formula(1e-3), served(), front=busy(**costs)).run(talks([0.0] * 16, answer=200))
    span_s = max(x.ended_s for x in result)
    assert span_s == pytest.approx(16 * 200 * token_s, rel=0.06)


def test_a_slower_machine_has_a_slower_front():
    front = FrontendTimes(request_cpu_s=1e-3, step_cpu_s=1e-5, token_cpu_s=1e-4, client_cpu_s=5e-5)
    result = front.scaled(1.5)
    assert result.token_cpu_s == pytest.approx(1.5e-4) and result.in_s == pytest.approx(
        1.5 * 2.5e-3
    )
    assert result.client_cpu_s == pytest.approx(7.5e-5) and result.num_cores == front.num_cores
    assert front.scaled(1.0) == front


def test_a_calibration_that_measured_none_has_no_queue():
    """Files of before, and servers of several models."""
    assert FrontendTimes.of(HostCost(in_s=1e-3)).token_cpu_s == 0.0
    host = HostCost(token_cpu_s=1e-4, request_cpu_s=1e-3, step_cpu_s=1e-5, client_cpu_s=2e-5,
                    num_cores=4)  # fmt: skip
    result = FrontendTimes.of(host)
    assert (result.token_cpu_s, result.request_cpu_s, result.step_cpu_s) == (1e-4, 1e-3, 1e-5)
    assert (result.client_cpu_s, result.num_cores) == (2e-5, 4)
