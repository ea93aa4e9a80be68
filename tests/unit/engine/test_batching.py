"""The three rules of batching: who starts when, and that nothing else about an answer changes.

They run in the engine over the checking fake of `test_engine`, whose tokens must come out whatever
the rule; time is a virtual clock's.
"""

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, World, additions, make_settings, perform, shapes
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.config.scheduler_config import RULES, SchedulerConfig
from headway.core.errors import UsageError
from headway.engine.batching import BATCHING, NOT_YET
from headway.engine.calibration import warm_up

WINDOW_S = 0.05
HELD = ["dynamic", "static"]


def batched(shape: Settings, batching: str) -> Settings:
    """`shape` with this rule of batching."""
    rule = replace(shape.scheduler, batching=batching, batch_window_s=WINDOW_S)
    return replace(shape, scheduler=rule)


def world_of(batching: str, shape: Settings | None = None, **changes) -> World:
    """A world whose engine follows one rule; four sequences make a batch."""
    shape = shape or make_settings(budget=64, **changes)
    return World(batched(shape, batching))


def add(world: World, count: int = 1, **sampling) -> list[int]:
    """Requests of two prompt tokens and four of answer."""
    sampling = {"max_tokens": 4, "ignore_eos": True, **sampling}
    return [world.add([1, 2], **sampling) for _ in range(count)]


def members(world: World) -> set[int]:
    """The requests of the batch: what runs, and what waits inside."""
    scheduler = world.engine.scheduler
    return {s.request.request_id for s in [*scheduler.running, *scheduler.waiting]}


def idle(world: World) -> bool:
    """Whether nothing is left to do once the engine has told of newcomers that wait."""
    if world.engine.has_work and not members(world):
        world.step()
        assert world.executor.plan.scheduled == []
    return not world.engine.has_work


# ── properties ──────────────────────────────────────────────────────────────────────────────────

operations = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("time"), st.sampled_from([0.01, 0.03, WINDOW_S])),
        st.tuples(st.just("flush")),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1, 2, 3])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    min_size=4,
    max_size=30,
)


class Watched(World):
    """A world that sees batches begin: none may begin before the last one has ended."""

    batch: set[int] = frozenset()

    def step(self):
        outcome = super().step()
        self.look()
        return outcome

    def look(self) -> None:
        now = members(self)
        if self.settings.scheduler.batching != "continuous" and now - self.batch:
            assert not now & self.batch, "a batch was joined"
            size = sum(len(self.of(request_id)) for request_id in now)
            assert len(now) == 1 or size <= self.settings.max_num_seqs + self._dropped(now)
        self.batch = now

    def _dropped(self, request_ids: set[int]) -> int:
        return sum(g.dropped or g.reason is not None for r in request_ids for g in self.of(r))


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(sorted(BATCHING)), shapes, operations)
def test_every_request_ends_once_with_its_own_tokens(batching, shape, chosen):
    """Random arrivals, aborts, failures and moments: the rule decides when, never what."""
    logging.disable(logging.CRITICAL)
    try:
        world = Watched(batched(shape, batching))
        for operation in chosen:
            match operation:
                case ("time", seconds):
                    world.clock.advance(seconds)
                case ("flush",):
                    world.engine.flush()
                case _:
                    perform(world, operation)
            world.engine.check_integrity()
            world.look()
        world.engine.flush()
        world.drain()
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=EXAMPLES // 3)
@given(st.sampled_from(HELD), shapes, operations)
def test_nobody_waits_without_a_reason(batching, shape, chosen):
    """An engine without work has less than a batch, not flushed, and no window that has ended."""
    logging.disable(logging.CRITICAL)
    try:
        world = World(batched(shape, batching))
        for operation in chosen:
            match operation:
                case ("time", seconds):
                    world.clock.advance(seconds)
                case ("flush",):
                    world.engine.flush()
                    assert world.engine.has_work or not world.requests or not len(gate(world))
                case _:
                    perform(world, operation)
            check_reason(world)
    finally:
        logging.disable(logging.NOTSET)


def gate(world: World):
    return world.engine.scheduler.gate


def check_reason(world: World) -> None:
    engine = world.engine
    if engine.has_work or not len(gate(world)):
        return
    assert not members(world)
    assert sum(1 + len(s.forks) for s in gate(world)) < world.settings.max_num_seqs
    if world.settings.scheduler.batching == "static":
        assert engine.wakes_at_s == NOT_YET
    else:
        assert 0 < engine.wakes_at_s - world.clock.now_s() <= WINDOW_S


# ── worked cases ────────────────────────────────────────────────────────────────────────────────


def test_continuous_starts_at_once_and_lets_others_join():
    world = world_of("continuous")
    add(world)
    assert members(world) == {0} and world.engine.has_work
    world.step()
    add(world)
    world.step()
    assert len(world.executor.plan.scheduled) == 2
    world.drain()


@pytest.mark.parametrize("batching", HELD)
def test_a_full_batch_starts_at_once_and_is_held_to_its_end(batching):
    """Four start together; the fifth waits for the longest of them, not for the first to end."""
    world = world_of(batching)
    add(world, 3, max_tokens=2)
    assert idle(world)
    add(world, max_tokens=9)
    add(world)
    assert members(world) == {0, 1, 2, 3}
    while 3 not in world.finished_at:
        world.step()
        assert 4 not in members(world)
        world.clock.advance(WINDOW_S)
    world.engine.flush()
    world.step()
    assert [row.start for row in world.executor.plan.scheduled] == [1], "the rest of its prompt"
    assert members(world) == {4}
    world.drain()


def test_two_batches_that_come_together_run_one_after_the_other():
    world = world_of("static")
    add(world, 8)
    assert members(world) == {0, 1, 2, 3}
    while not {0, 1, 2, 3} <= world.finished_at.keys():
        world.step()
    world.step()
    assert members(world) == {4, 5, 6, 7}
    world.drain()


def test_static_waits_for_ever_and_says_how_many_wait():
    world = world_of("static")
    add(world, 3)
    assert world.engine.has_work, "nobody was told of those who wait"
    _, record = world.step()
    assert (record.num_waiting, record.num_running, record.num_tokens) == (3, 0, 0)
    world.clock.advance(1e6)
    assert not world.engine.has_work and world.engine.wakes_at_s == NOT_YET
    add(world)
    world.drain()


def test_dynamic_starts_what_is_there_when_the_first_has_waited():
    """The window is the oldest's: a newcomer does not prolong it, and an abort passes it on."""
    world = world_of("dynamic")
    start_s = world.clock.now_s()
    (oldest,) = add(world)
    world.clock.advance(0.02)
    add(world)
    assert idle(world) and world.engine.wakes_at_s == pytest.approx(start_s + WINDOW_S)
    world.abort(oldest)
    assert idle(world) and world.engine.wakes_at_s == pytest.approx(start_s + 0.02 + WINDOW_S)
    world.clock.advance(0.04)
    assert idle(world)
    world.clock.advance(0.02)
    assert world.engine.has_work
    world.step()
    assert members(world) == {1}
    world.drain()


def test_an_engine_sleeps_exactly_until_its_window_ends():
    """What the engine's process does: sleep until `wakes_at_s`, then there is work."""
    world = world_of("dynamic")
    world.clock.advance(0.1)
    add(world)
    assert idle(world)
    world.clock.advance(world.engine.wakes_at_s - world.clock.now_s())
    assert world.engine.has_work
    world.drain()


def test_flush_starts_in_batches_and_lasts_until_nobody_waits():
    """Six wait behind a batch of four: flushed, they start as four and two; later ones wait."""
    world = world_of("static")
    add(world, 4, max_tokens=2)
    add(world, 6)
    world.engine.flush()
    seen = []
    while world.engine.has_work:
        world.step()
        if members(world) and members(world) not in seen:
            seen.append(members(world))
    assert seen[-2:] == [{4, 5, 6, 7}, {8, 9}]
    add(world)
    assert idle(world)
    world.engine.flush()
    world.drain()


def test_siblings_count():
    """n = 3 and one more fill a batch of four; n = 3 and n = 2 do not share one."""
    world = world_of("static")
    add(world, n=3)
    assert idle(world)
    add(world)
    assert members(world) == {0, 1}
    world.drain()
    add(world, n=3)
    add(world, n=2)
    assert members(world) == {2}
    world.engine.flush()
    world.drain()


def test_more_siblings_than_a_batch_start_alone():
    world = world_of("static", max_num_seqs=2)
    add(world, n=5)
    assert members(world) == {0}
    world.drain()


def test_siblings_of_an_aborted_parent_keep_its_place():
    """The one that would compute the prompt is dropped in the gate: nobody enters the batch."""
    world = world_of("dynamic")
    add(world, 4, max_tokens=9)
    world.step()
    add(world, n=3)
    add(world)
    world.abort(4, 0)
    assert members(world) == {0, 1, 2, 3}
    assert [s.request.request_id for s in gate(world)] == [4, 4, 5]
    world.engine.flush()
    world.drain()


def test_siblings_of_an_aborted_parent_keep_its_window():
    world = world_of("dynamic")
    add(world, n=3)
    world.clock.advance(0.03)
    world.abort(0, 0)
    assert idle(world)
    world.clock.advance(0.02)
    assert world.engine.has_work
    world.drain()


@pytest.mark.parametrize("batching", HELD)
def test_a_preempted_sequence_is_still_a_member(batching):
    """It is readmitted while its batch runs; the newcomer still waits for the end."""
    world = world_of(batching, block_size=2, num_blocks=(9,), max_num_seqs=2)
    add(world, 2, max_tokens=12)
    add(world)
    while not {0, 1} <= world.finished_at.keys():
        world.step()
        assert 2 not in members(world)
    assert world.engine.scheduler.num_preemptions >= 1
    world.engine.flush()
    world.drain()


@pytest.mark.parametrize("batching", HELD)
def test_aborts_before_the_batch_starts(batching):
    """The aborted leave the count and the queue; the engine is idle and holds nothing."""
    world = world_of(batching)
    ids = add(world, 3)
    for request_id in ids:
        world.abort(request_id)
    assert idle(world) and world.engine.num_requests == 0
    add(world, 3)
    assert idle(world)
    add(world)
    world.drain()


@pytest.mark.parametrize("batching", sorted(BATCHING))
def test_warm_up_waits_for_nobody(batching):
    world = world_of(batching)
    warm_up(world.engine)
    assert not world.engine.has_work and world.engine.num_requests == 0


def test_the_option_is_one_of_the_rules():
    assert set(RULES) == set(BATCHING)
    for text, window_s in [("continuous", 0.05), ("dynamic", 0.05), ("dynamic:80ms", 0.08)]:
        made = SchedulerConfig.of(EngineOptions(batching=text))
        assert (made.batching, made.batch_window_s) == (text.partition(":")[0], window_s)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sometimes", "is not one of continuous, dynamic, static"),
        ("dynamic:", "is no time"),
        ("dynamic:soon", "is no time"),
        ("dynamic:-1s", "is no time"),
        ("dynamic:nan", "is no time"),
        ("static:50ms", "static has no time to wait"),
    ],
)
def test_another_rule_is_refused_with_the_form(text, says):
    with pytest.raises(UsageError, match=says):
        SchedulerConfig.of(EngineOptions(batching=text))
