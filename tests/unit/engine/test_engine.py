"""The engine against a runtime that checks every plan: whatever happens, the same tokens come out.

Random requests, aborts and failures run on tiny pools. After every operation all invariants hold;
at the end each sequence that was let run has exactly the tokens it would have had alone.
"""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import (
    EOS,
    EXAMPLES,
    VOCAB,
    World,
    additions,
    make_settings,
    perform,
    shapes,
    sight,
    tokens,
)
from headway.core.errors import RequestError
from headway.core.request import Request, SamplingParams

# ── properties ──────────────────────────────────────────────────────────────────────────────────

operations = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1, 2, 3])),
        st.tuples(st.just("raise"), st.sampled_from(["submit", "sample", "collect"])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=EXAMPLES)
@given(shapes, operations)
def test_every_request_gets_its_own_tokens(shape, chosen):
    """Batching, chunking, forks, preemption, aborts and failures never change a token."""
    logging.disable(logging.CRITICAL)
    try:
        world = World(shape)
        for operation in chosen:
            perform(world, operation)
        world.drain()
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(shapes, operations, st.randoms(use_true_random=False))
def test_guesses_change_no_token(shape, chosen, random):
    """Nor do drafts, right or wrong, whatever happens beside them."""
    logging.disable(logging.CRITICAL)
    try:
        world = World(shape, guesses=random)
        for operation in chosen:
            perform(world, operation)
        world.drain()
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=max(EXAMPLES // 6, 1))
@given(
    shapes.filter(
        lambda s: s.max_num_batched_tokens >= s.max_num_seqs and s.scheduler.policy != "priority"
    ),
    st.lists(tokens, min_size=1, max_size=32),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_oldest_request_is_not_starved(shape, prompt, stream):
    """Under an endless stream of younger requests the first ones still end, in bounded time."""
    world = World(shape)
    longest = world.settings.max_model_len
    for number in range(3):
        world.add([number, *prompt][: longest - 1], ignore_eos=True, max_tokens=None)
    for at in range(24 * longest):
        if len(world.finished_at) >= 3 and {0, 1, 2} <= world.finished_at.keys():
            break
        length, n = stream[at % len(stream)]
        world.add([at % VOCAB] * min(length, longest - 1), n=n, ignore_eos=True, max_tokens=None)
        world.step()
    assert {0, 1, 2} <= world.finished_at.keys(), "starved"
    for request_id in list(world.requests):
        world.abort(request_id)
    world.drain()


@settings(max_examples=max(EXAMPLES // 6, 1))
@given(shapes, st.lists(additions, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_answer_does_not_depend_on_the_machine(shape, added, random):
    """The same seeded requests give the same tokens in any order and on a roomy engine."""
    roomy = make_settings(
        block_size=5,
        num_blocks=(400,),
        windows=(sight(shape),),
        max_model_len=shape.max_model_len,
        max_num_seqs=64,
    )
    answers = []
    for chosen, order in ((shape, list(added)), (roomy, random.sample(added, len(added)))):
        world = World(chosen)
        ids = {}
        for addition in order:
            _, prompt, sampling, *_ = addition
            request_id = world.add(prompt[: shape.max_model_len - 1], **{**sampling, "seed": 3})
            ids[id(addition)] = request_id
        world.drain()
        answers.append([[g.tokens for g in world.of(ids[id(a)])] for a in added])
    assert answers[0] == answers[1]


# ── worked cases ────────────────────────────────────────────────────────────────────────────────


def test_worked_example_of_the_seam():
    """The plan of core.plan's docstring: prompt [5 6 7 8 9] in blocks of 4."""
    world = World(make_settings(num_blocks=(5,), budget=8))
    world.add([5, 6, 7, 8, 9], max_tokens=2, ignore_eos=True)
    world.step()
    plan = world.executor.plan
    (row,) = plan.scheduled
    assert (plan.step, [new.token_ids for new in plan.new]) == (0, [[5, 6, 7, 8, 9]])
    assert (row.start, row.token_ids, row.sample) == (0, [5, 6, 7, 8, 9], True)
    assert [len(blocks) for blocks in row.new_blocks] == [2]
    world.step()
    (row,) = world.executor.plan.scheduled
    assert (row.start, len(row.token_ids), row.new_blocks) == (5, 1, ((),))
    assert world.engine.has_work, "the runtime must still be told of the end"
    world.step()
    assert (world.executor.plan.scheduled, world.executor.plan.finished) == ([], [0])
    world.check_end()


def test_prompt_is_spread_over_steps_by_the_budget():
    """Thirty tokens at a budget of 8: 8 8 8 6, and one sample, at the end."""
    world = World(make_settings(budget=8))
    world.add(list(range(30)), max_tokens=1, ignore_eos=True)
    rows = []
    while not world.finished_at:
        updates, _ = world.step()
        rows += [
            (row.start, len(row.token_ids), row.sample) for row in world.executor.plan.scheduled
        ]
    assert rows == [(0, 8, False), (8, 8, False), (16, 8, False), (24, 6, True)]
    assert [update.index for update in updates] == [0]


def test_decodes_ride_along_with_a_long_prompt():
    """A running sequence gains a token in every step while another's prompt is computed."""
    world = World(make_settings(budget=8, max_num_seqs=2))
    first = world.add([1, 2, 3], max_tokens=20, ignore_eos=True)
    world.step()
    world.add(list(range(30)), max_tokens=2, ignore_eos=True)
    for _ in range(4):
        updates, _ = world.step()
        assert first in [update.request_id for update in updates]
        assert world.executor.plan.num_tokens <= 8
    world.drain()


def test_siblings_share_the_prompt():
    """n = 4 over a prompt of four blocks costs four blocks and one copy each, not sixteen."""
    world = World(make_settings(budget=64, max_num_seqs=4))
    world.add(list(range(15)), n=4, max_tokens=3, ignore_eos=True)
    world.step()
    assert world.engine.kv.num_used == 4
    world.step()
    assert [len(row.token_ids) for row in world.executor.plan.scheduled] == [1, 1, 1, 1]
    assert len(world.executor.plan.copies) == 3
    assert world.engine.kv.num_used == 3 + 4
    world.drain()
    assert len({tuple(gained.tokens) for gained in world.of(0)}) == 4


def test_fork_on_a_block_border_copies_one_block_less():
    """A prompt of 13 = 3 · 4 + 1: the shared blocks are full, so nothing is copied."""
    world = World(make_settings(budget=64, max_num_seqs=2))
    world.add(list(range(13)), n=2, max_tokens=3, ignore_eos=True)
    world.step()
    world.step()
    assert world.executor.plan.copies == []
    world.drain()


def test_shared_full_blocks_ask_for_no_block_of_their_own():
    """A pool that exactly holds both siblings: no copy is due, so nobody is preempted."""
    world = World(make_settings(block_size=4, num_blocks=(6,), max_model_len=16, budget=64))
    world.add(list(range(13)), n=2, max_tokens=3, ignore_eos=True)  # 3 shared + 1 + 1 = 5 blocks
    world.drain()
    assert world.engine.scheduler.num_preemptions == 0


def test_preemption_gives_back_and_resumes():
    """Two sequences that outgrow the pool: one steps back, both end with their own tokens."""
    shape = make_settings(block_size=2, num_blocks=(9,), budget=16, max_num_seqs=2)
    world = World(shape).expect_nothing()
    world.add([1, 2, 3], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    world.add([4, 5, 6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    world.drain()
    assert world.engine.scheduler.num_preemptions >= 1


def test_chunk_without_a_block_waits_for_the_decodes():
    """A prompt stuck between a decode and its fork: neither is thrown out of a plan it is in."""
    waited = 0
    for num_blocks in range(19, 24):
        world = World(make_settings(block_size=1, num_blocks=(num_blocks,), budget=4))
        world.add([1, 2], n=2, max_tokens=12, ignore_eos=True)
        world.add(list(range(14)), max_tokens=2, ignore_eos=True)
        while world.engine.has_work:
            world.step()
            advanced = {row.sequence_id for row in world.executor.plan.scheduled}
            running = {s.sequence_id for s in world.engine.scheduler.running}
            waited += bool(advanced and running - advanced)
        world.check_end()
    assert waited, "the case did not arise"


def test_prompt_logprobs_are_told_once_when_the_prompt_is_computed_twice():
    """A sequence preempted in the middle of its prompt tells each position once."""
    world = World(make_settings(block_size=2, num_blocks=(12,), budget=4, max_num_seqs=2))
    world.add([1, 2, 3], max_tokens=18, ignore_eos=True)
    world.step()
    world.add(list(range(12)), max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    world.step()
    victim = world.engine.scheduler.running[-1]
    assert 0 < victim.computed < victim.num_prompt
    world.engine.scheduler.preempt(victim)
    assert victim.state == "waiting"
    world.drain()


def test_failed_row_ends_alone(caplog):
    """The runtime names one culprit: its neighbours in the step go on."""
    world = World(make_settings(max_num_seqs=3))
    for _ in range(3):
        world.add([1, 2], max_tokens=4, ignore_eos=True)
    world.executor.fail_rows = frozenset({1})
    with caplog.at_level(logging.ERROR):
        world.drain()
    assert [world.of(i)[0].reason for i in range(3)] == ["length", "error", "length"]
    assert "request 1 failed: told to fail" in caplog.text


def test_failed_parent_leaves_its_siblings(caplog):
    """When the sequence that computes the prompt fails, the others compute it themselves."""
    world = World(make_settings(max_num_seqs=3))
    world.add([1, 2, 3], n=3, max_tokens=4, ignore_eos=True)
    world.executor.fail_rows = frozenset({0})
    with caplog.at_level(logging.CRITICAL, logger="headway.engine.engine"):
        world.drain()
    assert [gained.reason for gained in world.of(0)] == ["error", "length", "length"]


def test_abort_frees_the_blocks_at_once():
    world = World(make_settings(budget=64))
    world.add(list(range(20)), n=3, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert world.engine.kv.num_used > 0
    world.abort(0)
    assert (world.engine.kv.num_used, world.engine.num_requests) == (0, 0)
    world.abort(0)
    world.abort(12345, 3)
    world.drain()


def test_eos_and_min_tokens():
    """The end token stops, is told, and is held back until min_tokens are out."""
    for seed in range(30):
        world = World(make_settings(budget=64, seed=seed))
        world.add([1, 2, 3], max_tokens=200, min_tokens=5)
        world.add([1, 2, 3], max_tokens=200, stop_token_ids=[3], ignore_eos=True)
        world.drain()
        assert len(world.of(0)[0].tokens) > 5
        assert EOS not in world.of(0)[0].tokens[:5]
        assert (3 in world.of(1)[0].tokens) == (world.of(1)[0].reason == "stop")


def test_time_comes_from_the_clock():
    """A virtual clock that stands still makes durations zero."""
    world = World(make_settings())
    world.clock.advance(5)
    world.add([1], max_tokens=1)
    _, record = world.step()
    assert (record.started_s, record.schedule_s, record.execute_s) == (5, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ([], "empty_array", "empty"),
        ([1] * 16, "context_length_exceeded", "16 tokens"),
        ([1, VOCAB], "invalid_value", f"0 … {VOCAB - 1}"),
        ([-1, 1], "invalid_value", f"0 … {VOCAB - 1}"),
    ],
)
def test_prompt_that_can_never_run_is_refused(prompt, code, words):
    world = World(make_settings(max_model_len=16))
    with pytest.raises(RequestError, match=words) as caught:
        world.add(prompt)
    assert (caught.value.param, caught.value.code) == ("prompt", code)
    assert world.engine.num_requests == 0
    assert not world.engine.has_work


def test_longest_prompt_that_fits_gets_one_token():
    world = World(make_settings(max_model_len=16))
    world.add([1] * 15, max_tokens=None, ignore_eos=True)
    world.drain()
    assert len(world.of(0)[0].tokens) == 1


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_id_beyond_the_logits_is_refused(name):
    world = World(make_settings())
    with pytest.raises(RequestError, match=name):
        world.add([1], **{name: [VOCAB]})


def test_request_id_in_use_is_refused():
    world = World(make_settings())
    world.add([1])
    with pytest.raises(RequestError, match="in use"):
        world.engine.add(Request(0, [1], SamplingParams()))
    world.drain()
