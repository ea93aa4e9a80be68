"""Preempted sequences whose KV is copied to host memory and back: the same tokens, nothing lost.

The fake runtime copies as late as it may, and then checks that both ends are as they were when the
transfer began: a block that was given back too early is seen.
"""

import logging
import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from cached_world import CachedWorld, Machine, prompts, sinks_of
from engine_world import CHEAP, DEAR, World, swap_settings, terms
from fakes import with_cache
from headway.core.terms import Terms
from headway.engine.sequence import RUNNING, WAITING, WAITING_FOR_KV
from headway.perf.model import Prior, StepModel

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "100"))


def two_that_do_not_fit(**how) -> World:
    """A world of two sequences that outgrow its pool of 8 blocks of 2."""
    shape = swap_settings(block_size=2, num_blocks=(9,), max_num_seqs=2, **how)
    world = World(shape).expect_nothing()
    world.add([1, 2, 3], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    world.add([4, 5, 6], max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    return world


def run(world: World) -> list:
    """Step to the end; the records."""
    records = []
    while world.engine.has_work:
        records.append(world.step()[1])
    world.check_end()
    return records


# ── the choice ──────────────────────────────────────────────────────────────────────────────────


def test_a_cheap_copy_is_copied():
    """The victim's KV leaves and comes back: nothing is computed twice."""
    records = run(two_that_do_not_fit(block_bytes=CHEAP))
    assert sum(record.num_swapped for record in records) >= 1
    assert sum(record.num_swapped_tokens for record in records) >= 6
    assert sum(record.num_lost_tokens for record in records) == 0
    assert sum(record.num_tokens for record in records) == 2 * (3 + 12 - 1)


def test_who_would_be_preempted_at_once_does_not_start():
    """Two users: below its share one of a low priority came back, was copied out for one of a
    better priority, and came back before that one could start; nobody computed a token."""
    shape = swap_settings(
        block_bytes=CHEAP,
        host=(9, 9),
        num_blocks=(20, 20),
        block_size=1,
        windows=(9, 0),
        max_num_seqs=3,
        budget=13,
        policy="priority",
    )
    world = World(shape)
    world.executor.delay = lambda: 3
    low, high = Terms(priority=1), Terms(priority=-1)
    world.add([1] * 17, user="a", terms=Terms(priority=-2), max_tokens=1)
    world.add([1, 2] * 4 + [3], user="", terms=low, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        world.step()
    for _ in range(2):
        world.add([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 2, 2, 2, 2, 2], user="a", terms=high)
    world.drain(limit=500)


def test_a_dear_copy_is_computed_again():
    """What was lost is counted, to the token."""
    records = run(two_that_do_not_fit(block_bytes=DEAR))
    assert sum(record.num_swapped for record in records) == 0
    lost = sum(record.num_lost_tokens for record in records)
    assert lost > 0
    assert sum(record.num_tokens for record in records) == 2 * (3 + 12 - 1) + lost


def test_without_room_in_host_memory_it_is_computed_again():
    records = run(two_that_do_not_fit(host=(2,)))
    assert sum(record.num_swapped for record in records) == 0
    assert records[-1].num_preemptions >= 1


def choice(byte_s: float, token_s: float, *, shared: bool = False) -> bool:
    """Whether a sequence of 12 computed tokens, in blocks of 4 and of 1,000 bytes, is copied."""
    engine_settings = swap_settings(num_blocks=(33,), block_bytes=1000, prefix_cache="cost")
    world = World(engine_settings)
    for number in range(1 + shared):
        world.add([1] * 12 if shared else [number] * 12, max_tokens=8, ignore_eos=True)
        world.step()
    transfers = world.engine.scheduler.transfers
    transfers.cost = StepModel(Prior(weights_s=0, token_s=token_s))
    transfers.rate.byte_s = byte_s
    return transfers.is_cheaper(world.engine.scheduler.running[-1])


def test_the_choice_is_the_cheaper_of_the_two():
    """3 blocks out and back: 6 kB. 12 tokens again: 12 ms and the 0.3 ms of a step."""
    assert choice(byte_s=1e-6, token_s=1e-3)
    assert not choice(byte_s=3e-6, token_s=1e-3)
    assert not choice(byte_s=1e-6, token_s=1e-5)


def test_what_others_keep_in_memory_is_not_computed_again():
    """The same copy does not pay where two of the three blocks are another's prompt as well."""
    assert not choice(byte_s=1e-6, token_s=1e-3, shared=True)


def test_the_rate_is_learned_from_transfers():
    """The prior's until something was copied; then what was measured, the newest most."""
    transfers = two_that_do_not_fit().engine.scheduler.transfers
    assert transfers.rate.byte_s == transfers.cost.prior.copied_byte_s
    transfers.rate.observe(1000, 0.0)
    assert transfers.rate.byte_s == transfers.cost.prior.copied_byte_s
    transfers.rate.observe(1000, 1e-3)
    assert transfers.rate.byte_s == pytest.approx(1e-6)
    for _ in range(50):
        transfers.rate.observe(1000, 4e-3)
    assert transfers.rate.byte_s == pytest.approx(4e-6, rel=0.01)


def test_a_rate_that_stops_all_copies_is_not_for_ever():
    """One hiccup of a second a byte: nothing is copied, until the rate is near the prior again."""
    world = World(swap_settings(num_blocks=(33,)))
    world.add([1] * 12, max_tokens=8, ignore_eos=True)
    world.step()
    transfers, (victim,) = world.engine.scheduler.transfers, world.engine.scheduler.running
    transfers.rate.observe(1, 1.0)
    choices = [transfers.is_cheaper(victim) for _ in range(200)]
    assert not any(choices[:50]) and all(choices[150:])


# ── out and in ──────────────────────────────────────────────────────────────────────────────────


def test_blocks_are_pinned_until_the_copy_is_done():
    """A copy of three steps: the decode that needs the blocks waits, then both go on."""
    world = two_that_do_not_fit()
    world.executor.delay = lambda: 3
    scheduler = world.engine.scheduler
    while not scheduler.transfers.is_busy:
        world.step()
    (victim,) = scheduler.waiting
    computed, used = victim.computed, world.engine.kv.num_used
    assert victim.state == WAITING and victim.host_tables and any(victim.block_tables)
    for _ in range(2):
        world.step()
        assert scheduler.transfers.is_busy and world.engine.kv.num_used >= used
    states = set()
    while victim.state != RUNNING:
        world.step()
        states.add(victim.state)
        assert victim.computed == computed
    assert states >= {WAITING, WAITING_FOR_KV}
    world.drain()


@pytest.mark.parametrize(
    ("state", "flying"), [(WAITING, True), (WAITING, False), (WAITING_FOR_KV, True)]
)
def test_an_abort_on_the_way_frees_everything_once(state, flying):
    """Leaving, in host memory, or coming back: blocks of both sides are free when copies end."""
    world = two_that_do_not_fit()
    world.executor.delay = lambda: 2
    scheduler = world.engine.scheduler
    while not scheduler.transfers.is_busy:
        world.step()
    (victim,) = scheduler.waiting
    while (victim.state, scheduler.transfers.is_in_transfer(victim)) != (state, flying):
        world.step()
    request_id = victim.request.request_id
    world.abort(request_id)
    assert scheduler.transfers.host.num_used == (len(victim.host_tables[0]) if flying else 0)
    world.drain()


def test_transfers_of_a_step_that_raised_are_told_again():
    """Out and in, whatever the runtime had done of them."""
    for stage in ("submit", "sample", "collect"):
        for delay in (0, 2):
            world = two_that_do_not_fit()
            world.executor.delay = lambda delay=delay: delay
            transfers = world.engine.scheduler.transfers
            take, raised = transfers.take_unsent, set()

            def failing(take=take, world=world, raised=raised, stage=stage):
                unsent = take()
                for transfer in unsent:
                    if transfer.direction not in raised:
                        raised.add(transfer.direction)
                        world.executor.fail_at = stage
                return unsent

            transfers.take_unsent = failing
            logging.disable(logging.CRITICAL)
            world.drain()
            logging.disable(logging.NOTSET)
            assert raised == {"out", "in"}


def step_often(world: World) -> None:
    for _ in range(200):
        world.engine.step()


def test_a_runtime_that_never_copies_ends_the_engine():
    """Its requests go on in the next one; here the step raises instead of trying for ever."""
    world = two_that_do_not_fit()

    def refuse(transfer):
        raise OSError("no copy")

    world.executor._begin = refuse
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(RuntimeError, match="does not copy blocks"):
            step_often(world)
    finally:
        logging.disable(logging.NOTSET)


def test_a_newcomer_of_a_higher_priority_waits_for_the_copy():
    """It preempts no more than it needs: one of two copies is enough for it."""
    shape = swap_settings(num_blocks=(9,), max_num_seqs=4, budget=64, policy="priority")
    world = World(shape).expect_nothing()
    world.executor.delay = lambda: 2
    for number in range(2):
        world.add([number] * 15, max_tokens=2, ignore_eos=True, terms=Terms(priority=5))
    world.step()
    world.add([9] * 12, max_tokens=2, ignore_eos=True, terms=Terms())
    world.step()
    world.step()
    assert len(world.engine.scheduler.running) == 1
    assert world.engine.scheduler.num_preemptions == 1
    world.drain()


# ── state machine ───────────────────────────────────────────────────────────────────────────────


class SwapMachine(Machine):
    """Admit, extend, fork, abort, fail, evict, preempt, copy out and in, under every policy."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair", "slo"]),
        cache=st.sampled_from(["", "cost"]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(9, 24),
        windows=st.sampled_from([(0,), (0, 6), (6,), (9, 0, 1)]),
        sinks=st.sampled_from([0, 0, 3, 7]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        num_host=st.integers(1, 40),
        block_bytes=st.sampled_from([CHEAP, CHEAP, 10**8, DEAR]),
        slowest=st.integers(0, 5),
        seed=st.integers(0, 1000),
    )
    def begin(self, policy, cache, block_size, num_blocks, windows, sinks, budget, max_num_seqs,
              num_host, block_bytes, slowest, seed):  # fmt: skip
        logging.disable(logging.CRITICAL)
        shape = swap_settings(
            block_size=block_size,
            num_blocks=(num_blocks,) * len(windows),
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
            policy=policy,
            host=(num_host,) * len(windows),
            block_bytes=block_bytes,
        )
        self.world = CachedWorld(
            with_cache(shape, windows=windows, sinks=sinks_of(windows, sinks), prefix_cache=cache)
        )
        draw = random.Random(seed)
        self.world.executor.delay = lambda: draw.randint(0, slowest)

    @rule(prompt=prompts, promised=terms, user=st.sampled_from(["", "a"]))
    def promise(self, prompt, promised, user):
        """A request with objectives, a weight, a priority."""
        prompt = prompt[: self.world.settings.max_model_len - 1]
        self.world.add(prompt, user=user, terms=promised, max_tokens=6, ignore_eos=True)

    @rule(number=st.integers(0, 9), may_copy=st.booleans())
    def preempt(self, number, may_copy):
        scheduler = self.world.engine.scheduler
        here = [s for s in scheduler.running if s.state == RUNNING]
        if here:
            scheduler.preempt(here[number % len(here)], may_copy=may_copy)

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.engine.check_integrity()


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
