"""What is kept of what is over costs nothing later: the garbage collector does not visit it."""

import gc

import msgspec

from headway.core.clock import VirtualClock
from headway.core.records import StepRecord
from headway.telemetry.live import MAX_STORED_REQUESTS, MAX_STORED_STEPS
from headway.telemetry.tasks import Tasks
from telemetry_cases import answer, step, telemetry

MORE = 2000
FEW = 200
"""Of so many more; a slot of a second has some objects of its own."""


def visited() -> int:
    """Objects that a full collection visits."""
    gc.collect()
    return len(gc.get_objects())


def test_an_ended_request_is_not_visited_again():
    """A busy server keeps 100,000 of them; here all of some seconds are kept."""
    clock = VirtualClock(100.0)
    model = telemetry(clock)

    def some(count: int) -> None:
        for number in range(count):
            answer(model, clock, f"r{number}", [0.0005, 0.0005])

    some(MAX_STORED_REQUESTS)
    before = visited()
    some(MORE)
    kept = sum(len(slot.ended) for slot in model.slots.last(300, clock.now_s())[0])
    assert kept == MAX_STORED_REQUESTS + MORE
    assert visited() - before < FEW


def test_a_step_of_an_engine_is_not_visited_again():
    """As it comes in a message, with everything that a step may tell."""
    clock = VirtualClock(100.0)
    model = telemetry(clock)
    told = {"prefilling": ((7, 0, 64), (8, 0, 32)), "preempted": ((9, 3),), "compiles_s": (0.1,)}
    guesses = {"verified": (("lookup", 4, 2),), "num_drafts": 4, "num_kept_drafts": 2}
    message = msgspec.msgpack.encode(step(1, **told, **guesses))
    model.on_step(msgspec.msgpack.decode(message, type=StepRecord))
    before = visited()
    for _ in range(MAX_STORED_STEPS):
        model.on_step(msgspec.msgpack.decode(message, type=StepRecord))
    assert len(model.steps) == MAX_STORED_STEPS
    assert visited() - before < FEW


def test_a_task_is_not_visited_again():
    """Whether it was judged or not; 100,000 are remembered."""
    tasks = Tasks()
    tasks.spend("me", "first", "chat", "tiny", 0.1)
    before = visited()
    for number in range(MORE):
        tasks.spend("me", f"t{number}", "chat", "tiny", 0.1)
        assert tasks.judge("me", f"t{number}", number % 2 == 0)
    assert visited() - before < FEW
    tasks.check_integrity()
