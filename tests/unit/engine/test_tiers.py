"""Blocks on a disk: the right tokens whatever it holds, loses, delays or refuses; chosen by cost.

The fake runtime keeps in each slot, and so in each block on its disk, what keys and values depend
on. A restore of anything else is seen in the step that reads it.
"""

import logging
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from cached_world import CachedWorld, Machine
from engine_world import CHEAP, DEAR, make_settings
from fakes import with_cache
from headway.config.kv_disk import DEFAULT_BYTES, read_kv_disk, read_write_limit
from headway.core.errors import UsageError
from headway.core.plan import Moved, TierNews
from headway.core.principal import Principal
from headway.engine.calibration import warm_up
from headway.engine.kv.eviction import POLICIES
from headway.engine.kv.prefix import Read
from headway.engine.kv.tiers import MIN_READ_LIMIT_S

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
PROMPT = list(range(1, 21))


def world(block_bytes=CHEAP, **how) -> CachedWorld:
    """A world with a disk; restarts keep what it holds."""
    groups = len(how.get("num_blocks", (1,)))
    disk = {"disk_bytes": 10**6, "block_bytes": (block_bytes,) * groups}
    return CachedWorld(make_settings(**how, prefix_cache="lfu", **disk))


def restart(old: CachedWorld) -> CachedWorld:
    """The next process: nothing in memory, the same disk, told at its first step."""
    new = CachedWorld(old.settings)
    new.executor.disk, new.executor.owners = old.executor.disk, old.executor.owners
    new.executor.news = TierNews(stored=list(old.executor.disk))
    warm_up(new.engine)
    return new


def test_what_was_computed_before_a_restart_is_restored():
    first = world()
    answer, found = first.answer_of(PROMPT)
    assert found == 0 and len(first.executor.disk) == 6
    second = restart(first)
    again, found = second.answer_of(PROMPT)
    assert (again, found) == (answer, 16)


def test_a_longer_beginning_on_disk_goes_on_from_the_device():
    talk = world()
    talk.answer_of(PROMPT)
    talk.engine.kv.forget_free()
    talk.answer_of(PROMPT[:9])
    assert talk.answer_of([*PROMPT, 1, 2])[1] == 20


def test_a_window_restores_only_what_is_seen():
    first = world(num_blocks=(30, 30), windows=(0, 6))
    answer, _ = first.answer_of(PROMPT)
    second = restart(first)
    reads = []
    take = second.executor._read_disk
    second.executor._read_disk = lambda t: (reads.append((t.group, len(t.keys))), take(t))
    assert second.answer_of(PROMPT) == (answer, 16)
    assert reads == [(0, 4), (1, 2)]


def test_dear_reads_are_not_made():
    cheap = world()
    cheap.answer_of(PROMPT)
    dear = world(DEAR)
    dear.executor.disk, dear.executor.news = (
        cheap.executor.disk,
        TierNews(list(cheap.executor.disk)),
    )
    warm_up(dear.engine)
    assert dear.answer_of(PROMPT)[1] == 0


def test_a_read_that_brings_nothing_is_computed_once_and_not_asked_for_again():
    first = world()
    answer, _ = first.answer_of(PROMPT)
    second = restart(first)
    second.executor.bring = lambda: False
    assert second.answer_of(PROMPT) == (answer, 0)


def test_others_go_on_while_one_waits_for_the_disk():
    first = world()
    first.answer_of(PROMPT)
    second = restart(first)
    second.executor.delay = lambda: 5
    slow, quick = second.ask(PROMPT), second.ask([30, 31], max_tokens=3)
    for _ in range(4):
        second.step()
    assert second.gained[quick, 0].reason == "length"
    assert not second.gained[slow, 0].tokens
    second.drain()


def test_an_abort_on_the_way_keeps_its_blocks_until_the_read_ends():
    first = world()
    first.answer_of(PROMPT)
    second = restart(first)
    second.executor.delay = lambda: 3
    second.ask(PROMPT)
    second.step()
    second.abort(0)
    assert second.engine.kv.num_used == 4
    second.drain()
    assert second.engine.kv.num_used == 0


def test_what_the_disk_lost_is_not_asked_for():
    talk = world()
    talk.answer_of(PROMPT)
    talk.engine.kv.forget_free()
    talk.executor.news = TierNews(lost=list(talk.executor.disk), num_bad=2)
    talk.executor.disk = {}
    talk.answer_of([30, 31])
    assert talk.answer_of(PROMPT)[1] == 0


def test_who_is_forgotten_is_found_nowhere():
    talk = world()
    talk.answer_of(PROMPT, salt="a")
    talk.ask(PROMPT, salt="a")
    talk.step()
    talk.engine.forget(Principal(cache_salt="a").block_owner())
    talk.step()
    assert [talk.plan.forget] == [[Principal(cache_salt="a").block_owner()]]
    talk.drain()
    assert talk.engine.kv.pools[0].num_cached == 0


def test_who_is_forgotten_takes_nobody_elses_blocks_along():
    talk = world()
    talk.answer_of(PROMPT, salt="a")
    talk.answer_of(PROMPT, salt="b")
    listed = talk.engine.kv.pools[0].num_cached
    talk.engine.forget(Principal(cache_salt="b").block_owner())
    assert talk.engine.kv.pools[0].num_cached == listed - 6
    talk.drain()
    assert len(talk.executor.disk) == 6
    assert talk.answer_of(PROMPT, salt="a")[1] == 19
    assert talk.answer_of(PROMPT, salt="b")[1] == 0


def test_writing_is_limited_and_goes_on_by_itself():
    """At a block a second: six blocks of 100 bytes take six seconds of an idle engine."""
    disk = {"disk_bytes": 10**6, "block_bytes": (100,), "disk_write_bytes_s": 100.0}
    talk = CachedWorld(make_settings(prefix_cache="lfu", **disk))
    talk.engine.kv.tiers.disk.is_expensive = lambda group: True
    talk.answer_of(PROMPT)
    written = len(talk.executor.disk)
    assert 0 < written < 6 and not talk.engine.has_work
    while talk.engine.wakes_at_s != float("inf"):
        talk.clock.advance(talk.engine.wakes_at_s - talk.clock.now_s() + 0.01)
        assert talk.engine.has_work
        talk.drain()
    assert len(talk.executor.disk) == 6


def test_what_is_cheap_to_compute_is_written_when_it_was_used_twice():
    disk = {"disk_bytes": 10**6, "block_bytes": (100,), "disk_write_bytes_s": 10.0**9}
    talk = CachedWorld(make_settings(prefix_cache="lfu", **disk))
    talk.engine.kv.tiers.disk.is_expensive = lambda group: False
    talk.answer_of(PROMPT)
    assert not talk.executor.disk
    talk.answer_of([*PROMPT, 1])
    assert len(talk.executor.disk) == 5


def test_the_rate_is_learned_from_reads():
    tiers = world(10**6).engine.kv.tiers
    rate, before = tiers.disk.rate, tiers.disk.rate.byte_s
    for _ in range(9):
        tiers.take([Moved("disk", "in", 10**6, 0, 5.0)], None)
    assert rate.byte_s > 100 * before and tiers.num_failed == 9
    assert tiers.limit_s([]) == MIN_READ_LIMIT_S


def test_a_read_may_take_as_long_as_computing_would():
    """So a slow disk costs at most the time that a first token takes without it."""
    tiers = world(10**6).engine.kv.tiers
    reads = [Read(0, at, b"", tiers.disk) for at in range(4)]
    assert tiers.limit_s(reads, recompute_s=0.1) == MIN_READ_LIMIT_S
    assert tiers.limit_s(reads, recompute_s=9.0) == 9.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", ("", 0)),
        ("20GB", ("", 20 * 10**9)),
        ("/var/kv", ("/var/kv", DEFAULT_BYTES)),
        ("/var/kv:512MiB", ("/var/kv", 512 * 2**20)),
        ("/var/kv:here", ("/var/kv:here", DEFAULT_BYTES)),
    ],
)
def test_a_folder_or_a_size(text, meant):
    assert read_kv_disk(text) == meant


@pytest.mark.parametrize("text", ["1kB", "/var/kv:5", "0"])
def test_a_disk_that_is_too_small_is_refused(text):
    with pytest.raises(UsageError, match="too few"):
        read_kv_disk(text)


def test_a_write_limit_is_a_rate_or_through():
    assert (read_write_limit("through"), read_write_limit("100MB")) == (0.0, 1e8)
    for text in ("fast", "0", "40%"):
        with pytest.raises(UsageError):
            read_write_limit(text)


class TieredMachine(Machine):
    """The same in any order, with a disk below that is slow, brings nothing, or lost something."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(9, 24),
        windows=st.sampled_from([(0,), (0, 6), (6,), (9, 0, 1)]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
    )
    def begin(self, policy, block_size, num_blocks, windows, budget, max_num_seqs):
        logging.disable(logging.CRITICAL)
        shape = make_settings(
            block_size=block_size,
            num_blocks=(num_blocks,) * len(windows),
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
            disk_bytes=10**6,
            block_bytes=(CHEAP,) * len(windows),
        )
        self.world = CachedWorld(with_cache(shape, windows=windows, prefix_cache=policy))

    @rule(steps=st.integers(0, 4), brings=st.booleans())
    def disk(self, steps, brings):
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


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
