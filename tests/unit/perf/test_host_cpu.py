"""What the server's process computes for each: found from its seconds, never below zero."""

import time
from array import array

import numpy as np
import pytest

from headway.cli.common import model_folder
from headway.core.clock import VirtualClock
from headway.perf.frontend import MIN_BUSY_SECONDS, nonnegative_least_squares
from headway.spec import read_model_spec
from headway.telemetry.calibration import cpu_costs, host_work
from headway.telemetry.contention import CpuWatch
from headway.telemetry.live import Telemetry
from headway.telemetry.windows import Slot

REQUEST_S, STEP_S, TOKEN_S, IDLE_S = 2e-3, 5e-5, 1e-4, 0.04


def second(requests: int, steps: int, tokens: int, host_s: float | None = None) -> Slot:
    """A second in which so much came and left, and what it took by the costs above."""
    slot = Slot(0, 1)
    slot.arrivals, slot.first_tokens = requests, min(requests, tokens)
    slot.decode.count = steps
    gaps = np.full(tokens - slot.first_tokens, 0.01)
    slot.gaps["default"] = array("d", gaps)
    taken = IDLE_S + REQUEST_S * requests + STEP_S * steps + TOKEN_S * tokens
    slot.host_s = taken if host_s is None else host_s
    return slot


def ramp(count: int = 40, noise: float = 0.0, seed: int = 0) -> list[Slot]:
    """More from second to second, answers of different lengths, rows from 1 to 32."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        requests = int(rng.poisson(1 + number))
        tokens = requests * int(rng.integers(20, 90))
        slot = second(requests, int(tokens / rng.uniform(1, 4 + number)), tokens)
        slot.host_s *= rng.normal(1, noise) if noise else 1.0
        found.append(slot)
    return found


def test_planted_costs_are_found():
    found = cpu_costs(ramp())
    assert found == pytest.approx((REQUEST_S, STEP_S, TOKEN_S), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_all_of_it_together_is_what_was_measured(seed: int):
    """Under noise of a tenth one part is taken for another; what a busy second takes is not."""
    request, step, token = cpu_costs(ramp(noise=0.1, seed=seed))
    busy = 30 * request + 800 * step + 1800 * token
    assert busy == pytest.approx(30 * REQUEST_S + 800 * STEP_S + 1800 * TOKEN_S, rel=0.2)
    assert min(request, step, token) >= 0


def test_too_little_tells_nothing():
    assert cpu_costs([]) == (0.0, 0.0, 0.0)
    assert cpu_costs(ramp(MIN_BUSY_SECONDS - 1)) == (0.0, 0.0, 0.0)
    idle = [second(0, 0, 0) for _ in range(60)]
    assert cpu_costs(idle) == (0.0, 0.0, 0.0), "it computes, but for nobody"


def test_seconds_that_nobody_read_are_left_out():
    unread = [second(10, 100, 500, host_s=0.0) for _ in range(30)]
    assert cpu_costs([*ramp(), *unread]) == cpu_costs(ramp())


def test_no_part_is_negative():
    """A cost that would help only below zero is none at all."""
    work = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert nonnegative_least_squares(work, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx(
        [2.0, 0.0]
    )
    assert nonnegative_least_squares(work, np.array([-1.0, -1.0, -1.0])).tolist() == [0.0, 0.0]
    assert nonnegative_least_squares(work, np.array([1.0, 3.0, 5.0])).tolist() == pytest.approx(
        [1.0, 2.0]
    )


def test_a_second_is_counted_before_and_after_it_is_over():
    slot = second(3, 40, 120)
    assert host_work(slot) == (3, 40, 120)
    slot.close()
    assert host_work(slot) == (3, 40, 120)


def test_the_watch_tells_what_was_computed_since():
    """Nothing of what was before it looked, and nothing of a pause."""
    cpu, now = iter([9.0, 9.25, 11.0, 11.5]), iter([0.0, 1.0, 2.0, 60.0])
    watch = CpuWatch(lambda: next(cpu), lambda: next(now))
    assert [watch.seconds() for _ in range(4)] == [0.0, 0.25, 1.75, 0.0]
    real = CpuWatch(now_s=lambda: 0.0)
    real.seconds()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    assert real.seconds() >= 0.05


def test_each_second_that_is_over_has_its_cpu_time():
    """Asked once a second, when the next begins; nobody is asked where nobody is set."""
    clock, asked = VirtualClock(100.0), []
    made = Telemetry(["tiny"], read_model_spec(model_folder(None)), clock=clock)
    made.advance()
    made.cpu_watch = CpuWatch(
        lambda: asked.append(clock.now_s()) or clock.now_s() / 10, clock.now_s
    )
    for at_s in (100.4, 101.1, 101.9, 102.0, 103.5):
        clock.advance_to(at_s)
        made.advance()
    seconds = {slot.second: slot.host_s for slot in made.slots.last(10, 103.5)[0]}
    expected = {100: 0.0, 101: 0.09, 102: 0.15, 103: 0.0}
    assert seconds == pytest.approx(expected)
    assert asked == [101.1, 102.0, 103.5]
