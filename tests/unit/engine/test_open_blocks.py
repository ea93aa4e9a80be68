"""Open blocks of a format that rounds full ones: one for each that runs, however few there are."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from cached_world import CachedWorld, Machine
from engine_world import EXAMPLES, additions, perform, swap_settings
from fakes import with_cache
from headway.engine.kv.open_blocks import limit_to_open_blocks
from headway.spec.kv_format import LEAST_OPEN
from open_world import OpenExecutor, check_open, open_world, with_open

operations = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("raise"), st.sampled_from(["submit", "sample", "collect"])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    max_size=25,
)


def test_worked_example_of_open_blocks():
    """Blocks of 64, a prompt of 300, 4 open blocks free: chunks of 256 and 44; 3: 192 and 108."""
    for num_open, chunks in ((4, [256, 44]), (3, [192, 108])):
        world = open_world((9,), num_open, block_size=64, budget=512)
        world.add([1] * 300, max_tokens=40, ignore_eos=True)
        found = []
        while world.engine.has_work:
            world.step()
            found += [row.token_ids for row in world.executor.plan.scheduled]
            check_open(world)
        assert [len(tokens) for tokens in found][:3] == [*chunks, 1]
        world.check_end()


def test_an_open_block_of_its_own_is_not_free():
    """70 tokens computed, 2 free: 58 tokens in its own block, 128 in these."""
    world = open_world((9,), 3, block_size=64, budget=70)
    world.add([1] * 300, max_tokens=1)
    world.step()
    (sequence,) = world.engine.scheduler.running
    assert sequence.computed == 70
    assert limit_to_open_blocks(world.engine.kv, sequence, 200) == 58 + 128
    assert limit_to_open_blocks(world.engine.kv, sequence, 10) == 10


@pytest.mark.parametrize("policy", ["fcfs", "slo", "fair", "priority"])
def test_as_many_run_as_there_are_open_blocks(policy):
    """8 rows, 9 open blocks: all decode at once, beside the chunks of those that come, and nobody
    is preempted. Two blocks promised to each would let 4 run."""
    world = open_world((99,), 9, block_size=4, max_num_seqs=8, budget=32, policy=policy)
    for number in range(8):
        world.add([number] * 11, max_tokens=30, ignore_eos=True)
    most = 0
    while world.engine.has_work:
        world.step()
        check_open(world)
        running = world.engine.scheduler.running
        most = max(most, sum(s.num_generated > 0 for s in running))
    assert most == 8 and world.engine.scheduler.num_preemptions == 0
    world.check_end()


def test_siblings_begin_in_the_open_block_of_their_prompt():
    """A prompt that ends with its block: the block is full, and open until siblings have begun."""
    for length in (7, 8, 9):
        world = open_world((40,), 6, block_size=4, max_num_seqs=4, budget=32)
        world.add([2] * length, n=4, max_tokens=9, ignore_eos=True)
        while world.engine.has_work:
            world.step()
            check_open(world)
        assert world.engine.scheduler.num_preemptions == 0
        world.check_end()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(LEAST_OPEN, 6),
    st.integers(1, 8),
    st.integers(8, 24),
    st.sampled_from([(0,), (0, 6)]),
    st.sampled_from(["fcfs", "slo", "fair", "priority"]),
    st.one_of(st.none(), st.randoms(use_true_random=False)),
    operations,
)
def test_few_open_blocks_stop_nobody(num_open, size, budget, windows, policy, guesses, operations):
    """Any requests over the fewest open blocks come to their end with the tokens of each alone."""
    logging.disable(logging.CRITICAL)
    try:
        how = {"block_size": size, "budget": budget, "max_num_seqs": 8, "policy": policy}
        world = open_world((14,) * len(windows), num_open, guesses, windows=windows, **how)
        for operation in operations:
            perform(world, operation)
            check_open(world)
        while world.engine.has_work:
            world.step()
            check_open(world)
        world.drain()
    finally:
        logging.disable(logging.NOTSET)


class OpenMachine(Machine):
    """The same over blocks that are found again, preempted and copied out, in any order."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair", "slo"]),
        cache=st.sampled_from(["", "lfu"]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(9, 24),
        num_open=st.integers(LEAST_OPEN, 5),
        windows=st.sampled_from([(0,), (0, 6)]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        num_host=st.sampled_from([0, 3, 40]),
    )
    def begin(
        self, policy, cache, block_size, num_blocks, num_open, windows, budget, max_num_seqs,
        num_host,
    ):  # fmt: skip
        logging.disable(logging.CRITICAL)
        shape = swap_settings(
            host=(num_host,) * (len(windows) + 1) if num_host else (),
            block_size=block_size,
            num_blocks=(num_blocks,) * len(windows),
            windows=windows,
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
            policy=policy,
        )
        shape = with_cache(with_open(shape, num_open), prefix_cache=cache)
        self.world = CachedWorld(shape, kind=OpenExecutor)

    @invariant()
    def one_open_block_each(self):
        if hasattr(self, "world"):
            check_open(self.world)


TestOpenMachine = OpenMachine.TestCase
TestOpenMachine.settings = settings(
    max_examples=EXAMPLES // 3, stateful_step_count=30, deadline=None
)
