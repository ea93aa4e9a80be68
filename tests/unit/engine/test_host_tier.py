"""Host memory below the device's: what is evicted is found there, and preempted ones go first."""

import logging
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from cached_world import CachedWorld, Machine, sinks_of
from engine_world import CHEAP, DEAR, make_settings
from fakes import with_cache
from headway.core.plan import TierNews
from headway.core.principal import Principal
from headway.engine.kv.eviction import POLICIES
from headway.engine.kv.host import HostBlocks

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
PROMPT = list(range(1, 21))
OTHERS = [list(range(begin, begin + 18)) for begin in (21, 15, 8)]


class Told(CachedWorld):
    """The same, and what the steps have told."""

    def step(self):
        updates, record = super().step()
        self.told = [*getattr(self, "told", []), record]
        return updates, record


def world(block_bytes=CHEAP, host=12, num_blocks=9, **how) -> Told:
    """A world whose memory holds one prompt; the host holds two and more."""
    num_blocks = (num_blocks,) * len(how.get("windows", (0,)))
    below = {"host_blocks": (host,) * len(num_blocks)}
    below["block_bytes"] = (block_bytes,) * len(num_blocks)
    made = make_settings(
        num_blocks=num_blocks, prefix_cache="lfu", max_model_len=32, **below, **how
    )
    talk = Told(made)
    talk.engine.kv.tiers.host.is_expensive = lambda group: True
    return talk


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
def test_what_was_evicted_is_found_in_host_memory(windows):
    talk = world(windows=windows)
    answer, found = talk.answer_of(PROMPT, seed=1)
    assert found == 0
    for other in OTHERS[:2]:
        talk.answer_of(other, seed=1)
    assert talk.engine.scheduler.transfers.host.lent[0]
    assert talk.answer_of(PROMPT, seed=1) == (answer, 16)
    assert talk.told[-1].kv_tiers[1].tier == "host"
    restored = [record.restored_tokens for record in talk.told if record.restored_tokens]
    assert restored and set(restored[-1]) == {"host"}


def test_sinks_are_restored_with_what_the_window_sees():
    talk = world(windows=(6,), sinks=(5,), num_blocks=8, host=15)
    answer, _ = talk.answer_of(PROMPT, seed=1)
    for other in OTHERS:
        talk.answer_of(other, seed=1)
    for _ in range(2):
        assert talk.answer_of(PROMPT, seed=1)[0] == answer
    restored = [record.restored_tokens for record in talk.told if record.restored_tokens]
    assert restored and set(restored[-1]) == {"host"}


def test_what_costs_more_to_copy_than_to_compute_is_computed():
    talk = world(DEAR)
    answer, _ = talk.answer_of(PROMPT, seed=1)
    for other in OTHERS:
        talk.answer_of(other, seed=1)
    assert talk.answer_of(PROMPT, seed=1) == (answer, 0)


def test_what_was_used_once_and_is_cheap_is_not_kept():
    talk = world()
    talk.engine.kv.tiers.host.is_expensive = lambda group: False
    for prompt in (PROMPT, *OTHERS):
        talk.answer_of(prompt, seed=1)
    assert not talk.engine.scheduler.transfers.host.lent[0]
    talk.answer_of([*OTHERS[2], 1], seed=1)
    talk.answer_of(PROMPT, seed=1)
    talk.answer_of(OTHERS[0], seed=1)
    assert talk.engine.scheduler.transfers.host.lent[0]


def test_a_copy_that_was_lost_with_its_step_is_not_believed():
    """The step that was to copy what was evicted raises before it has: its key means nothing."""
    talk = world()
    answer, _ = talk.answer_of(PROMPT, seed=1)
    keep = talk.executor._keep
    talk.executor._keep = lambda transfer: None
    for other in OTHERS:
        talk.answer_of(other, seed=1)
    talk.executor._keep = keep
    assert talk.engine.scheduler.transfers.host.lent[0]
    assert talk.answer_of(PROMPT, seed=1) == (answer, 0)


def test_who_is_forgotten_is_not_found_in_host_memory():
    talk = world()
    for salt in ("a", "b"):
        talk.answer_of(PROMPT, salt=salt, seed=1)
    for other in OTHERS[:1]:
        talk.answer_of(other, seed=1)
    talk.engine.forget(Principal(cache_salt="a").block_owner())
    talk.drain()
    owners = {lent.owner for lent in talk.engine.scheduler.transfers.host.lent[0].values()}
    assert owners and Principal(cache_salt="a").block_owner() not in owners
    assert talk.answer_of(PROMPT, salt="a", seed=1)[1] == 0


# ── the blocks themselves ───────────────────────────────────────────────────────────────────────


def test_preempted_ones_take_what_is_lent_the_oldest_first():
    host = HostBlocks((3,))
    first, second = host.lend(0, b"one"), host.lend(0, b"two")
    host.touch(0, b"one")
    assert host.take(7, [2]) == [[2, second]]
    assert list(host.lent[0]) == [b"one"] and host.lent[0][b"one"].block == first
    host.check_integrity({7: [[2, second]]})
    assert host.take(8, [2]) is None


def test_what_is_being_read_stays():
    host = HostBlocks((2,))
    for key in (b"one", b"two"):
        host.lend(0, key)
    block = host.pin(0, b"one")
    assert block == host.block_of(0, b"one")
    assert not host.has_room([2]) and host.has_room([1])
    host.drop(0, b"one")
    host.check_integrity({})
    assert host.lend(0, b"three") is not None and b"two" not in host.lent[0]
    assert not host.has_room([2])
    host.unpin(0, block)
    assert host.has_room([2])
    host.check_integrity({})


def test_nothing_is_lent_where_sequences_own_all():
    host = HostBlocks((1,))
    host.take(7, [1])
    assert host.lend(0, b"one") is None


class HostMachine(Machine):
    """The same in any order, with host memory below, a disk below that, and copies that wait."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(9, 24),
        windows=st.sampled_from([(0,), (0, 6), (6,), (9, 0, 1)]),
        sinks=st.sampled_from([0, 0, 3, 7]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        host=st.integers(1, 12),
        disk=st.sampled_from([0, 10**6]),
    )
    def begin(
        self, policy, block_size, num_blocks, windows, sinks, budget, max_num_seqs, host, disk
    ):
        logging.disable(logging.CRITICAL)
        shape = make_settings(
            block_size=block_size,
            num_blocks=(num_blocks,) * len(windows),
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
            host_blocks=(host,) * len(windows),
            disk_bytes=disk,
            block_bytes=(CHEAP,) * len(windows),
        )
        config = {"windows": windows, "sinks": sinks_of(windows, sinks), "prefix_cache": policy}
        self.world = CachedWorld(with_cache(shape, **config))

    @rule(dear=st.booleans())
    def worth(self, dear):
        self.world.engine.kv.tiers.host.is_expensive = lambda group: dear

    @rule(steps=st.integers(0, 4), brings=st.booleans())
    def below(self, steps, brings):
        self.world.executor.delay = lambda: steps
        self.world.executor.bring = lambda: brings

    @rule(share=st.integers(1, 3))
    def lose(self, share):
        lost = list(self.world.executor.disk)[::share]
        for block in lost:
            del self.world.executor.disk[block]
        self.world.executor.news = TierNews(lost=lost)

    @rule(salt=st.sampled_from(["", "a"]))
    def forget_owner(self, salt):
        self.world.engine.forget(Principal(cache_salt=salt).block_owner())


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
