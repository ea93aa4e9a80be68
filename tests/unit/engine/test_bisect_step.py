"""A step that raises fails whoever makes it raise, and nobody else loses a token.

The fake holds the engine to the seam in every attempt: rows tried again must read their own
KV back through the tables they are introduced with.
"""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, VOCAB, World, additions, make_settings, perform, shapes
from headway.core.request import Request, SamplingParams

STAGES = ["submit", "sample", "collect"]
POISON = VOCAB - 1


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture):
    """Tracebacks of what is told to fail are of no interest."""
    with caplog.at_level(logging.CRITICAL):
        yield


def reasons(world: World) -> list[str | None]:
    return [gained.reason for gained in world.gained.values()]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_step_that_raises_once_costs_nobody_anything(stage: str, count: int):
    world = World(make_settings(max_num_seqs=8, budget=64))
    for number in range(count):
        world.add([1, 2, number], max_tokens=4, ignore_eos=True)
    world.executor.fail_at = stage
    world.drain()
    assert reasons(world) == ["length"] * count


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("culprits", [{0}, {5}, {7}, {2, 3}, {0, 7}, {1, 3, 5}])
def test_only_the_culprits_fail(stage: str, culprits: set[int]):
    world = World(make_settings(max_num_seqs=8, budget=64))
    world.executor.poison, world.executor.poisoned_stage = POISON, stage
    for number in range(8):
        world.add([1, POISON if number in culprits else 2], max_tokens=4, ignore_eos=True)
    world.drain()
    assert reasons(world) == ["error" if n in culprits else "length" for n in range(8)]


def test_one_culprit_among_many_costs_few_attempts():
    """64 rows: one step that raises, two attempts for each time 64 can be halved, one more."""
    world = World(make_settings(max_num_seqs=64, num_blocks=(200,), budget=256))
    world.executor.poison = POISON
    for number in range(64):
        world.add([1, POISON if number == 41 else 2], max_tokens=1, ignore_eos=True)
    world.step()
    assert world.executor.num_submits == 1 + 2 * 6 + 1
    world.drain()


def test_a_lone_culprit_is_tried_again_and_the_runtime_tested(caplog: pytest.LogCaptureFixture):
    world = World(make_settings())
    world.executor.poison = POISON
    world.add([POISON], max_tokens=4)
    with caplog.at_level(logging.ERROR):
        world.step()
    assert reasons(world) == ["error"]
    assert world.executor.num_submits == 4, "the step, twice alone, and one of nobody's"
    assert "request 0 failed: RuntimeError: poison in 0" in caplog.text
    world.drain()


def test_a_culprit_in_the_middle_of_its_answer():
    """It decodes for a while beside others before its step begins to raise."""
    world = World(make_settings(max_num_seqs=4, budget=64))
    for number in range(4):
        world.add([1, POISON if number == 2 else number], max_tokens=9, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.executor.poison = POISON
    world.drain()
    assert reasons(world) == ["length", "length", "error", "length"]
    assert len(world.of(2)[0].tokens) == 4


def test_siblings_that_copy_a_block_when_the_step_raises():
    """n = 4 over one prompt: the second step copies three blocks, and raises."""
    world = World(make_settings(budget=64, max_num_seqs=4))
    world.add(list(range(15)), n=4, max_tokens=5, ignore_eos=True)
    world.step()
    world.executor.fail_at = "collect"
    world.step()
    assert len(world.plan.copies) == 3
    world.drain()
    assert reasons(world) == ["length"] * 4


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(
    shapes,
    st.lists(
        st.one_of(
            additions,
            additions,
            st.tuples(st.just("step"), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
            st.tuples(st.just("raise"), st.sampled_from(STAGES)),
        ),
        min_size=4,
        max_size=20,
    ),
    st.sampled_from(STAGES),
)
def test_the_innocent_get_the_tokens_they_get_alone(shape, chosen, stage):
    """Any mix, with culprits in it (their prompts hold the poison) from the first step on."""
    logging.disable(logging.CRITICAL)
    try:
        world = World(shape)
        world.executor.poison, world.executor.poisoned_stage = POISON, stage
        for operation in chosen:
            perform(world, operation)
        world.drain()
        for (request_id, _), gained in world.gained.items():
            if not gained.dropped:
                poisoned = world.is_poison(world.requests[request_id])
                assert (gained.reason == "error") == poisoned
    finally:
        logging.disable(logging.NOTSET)


def test_a_runtime_that_fails_everybody_ends_the_engine():
    world = World(make_settings())
    world.add([1, 2], max_tokens=4)
    world.add([1, 3], max_tokens=4)
    world.executor.is_broken = True
    with pytest.raises(RuntimeError, match="broken"):
        world.step()


# ── requests that go on in another engine ───────────────────────────────────────────────────────


@pytest.mark.parametrize("num_told", [0, 1, 3, 7])
def test_a_resumed_request_goes_on_as_if_nothing_had_been(num_told: int):
    world = World(make_settings(budget=64))
    expected = World(make_settings(budget=64))
    expected.add([1, 2, 3], n=3, max_tokens=8, ignore_eos=True, seed=5, prompt_logprobs=0)
    expected.drain()
    whole = [gained.tokens for gained in expected.of(0)]

    told = [whole[0][:num_told], None, whole[2][: num_told // 2]]
    sampling = SamplingParams(n=3, max_tokens=8, ignore_eos=True, seed=5, prompt_logprobs=0)
    world.engine.add(Request(0, [1, 2, 3], sampling), told)
    world.engine.check_integrity()
    found: dict[int, list[int]] = {0: [], 2: []}
    while world.engine.has_work:
        for update in world.engine.step()[0]:
            found[update.index] += update.token_ids
            assert (update.prompt_logprobs is not None) == (
                update.index == 0 and num_told == 0 and len(found[0]) == 1
            )
        world.engine.check_integrity()
    assert found == {0: whole[0][num_told:], 2: whole[2][num_told // 2 :]}


def test_a_request_that_is_over_resumes_to_nothing():
    world = World(make_settings())
    world.engine.add(Request(0, [1], SamplingParams(n=2)), [None, None])
    assert not world.engine.has_work
    assert world.engine.num_requests == 0
