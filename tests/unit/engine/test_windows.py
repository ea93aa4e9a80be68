"""KV groups with a window: what is given back, and how much a long context holds."""

import pytest

from engine_world import World, make_settings
from headway.config.cache_config import CacheConfig
from headway.core.plan import NULL_BLOCK
from headway.core.request import Request, SamplingParams
from headway.engine.kv import KVCache
from headway.engine.sequence import Sequence


def sequence(tokens: int, num_groups: int = 2) -> Sequence:
    request = Request(0, list(range(tokens)), SamplingParams())
    return Sequence(0, request, 0, num_groups=num_groups, stop_ids=frozenset(), max_len=99, seed=0)


def kv_cache(num_blocks: tuple[int, int], *, max_chunk: int) -> KVCache:
    """Blocks of 4 for layers that see all, and for layers that see 6 tokens."""
    config = CacheConfig(num_blocks=num_blocks, block_size=4, windows=(0, 6), prefix_cache="")
    return KVCache(config, max_chunk)


def test_worked_example_of_a_window():
    """Blocks of 4, a window of 6, 14 tokens computed: blocks 0 and 1 are out of sight."""
    kv = kv_cache((9, 9), max_chunk=16)
    one = sequence(20)
    kv.extend(one, 14)
    one.computed = 14
    kv.check_integrity([one])
    assert [len(table) for table in one.block_tables] == [4, 4]
    new, copies = kv.extend(one, 15)
    assert (new, copies) == (((), ()), [])
    full, window = one.block_tables
    assert NULL_BLOCK not in full
    assert window[:2] == [NULL_BLOCK] * 2
    assert NULL_BLOCK not in window[2:]
    assert [pool.num_used for pool in kv.pools] == [4, 2]
    kv.check_integrity([one])
    kv.release(one)
    assert kv.num_used == 0
    kv.check_integrity([one])


def test_sinks_stay_beside_a_window():
    """Blocks of 4, a window of 6, 3 sinks, 14 tokens computed: of two blocks out of sight one."""
    config = CacheConfig(
        num_blocks=(9, 9), block_size=4, windows=(0, 6), sinks=(0, 3), prefix_cache=""
    )
    kv, one = KVCache(config, 16), sequence(20)
    kv.extend(one, 14)
    one.computed = 14
    first = one.block_tables[1][0]
    kv.extend(one, 15)
    window = one.block_tables[1]
    assert window[:2] == [first, NULL_BLOCK] and NULL_BLOCK not in window[2:]
    assert [pool.num_used for pool in kv.pools] == [4, 3]
    kv.check_integrity([one])
    kv.release(one)
    assert kv.num_used == 0


def test_still_needed_counts_the_window_and_one_chunk():
    """The docstring's example: blocks of 4, a window of 6, chunks of 8 → 5, a full group all."""
    kv = kv_cache((99, 99), max_chunk=8)
    one = sequence(60)
    assert kv.still_needed(one) == [15, 5]
    kv.extend(one, 8)
    assert kv.still_needed(one) == [13, 3]
    one.computed = 59
    assert kv_cache((99, 99), max_chunk=8).still_needed(sequence(3)) == [1, 1]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_a_long_context_holds_a_window_and_a_chunk(budget):
    """4,000 tokens, blocks of 16: the full group ends with 250 blocks, the window group never
    holds more than (64 - 1 + chunk) / 16 + 1."""
    world = World(
        make_settings(block_size=16, num_blocks=(260, 260), windows=(0, 64), budget=budget)
    )
    world.add([3] * 2000, max_tokens=2000 if budget == 64 else 20, ignore_eos=True)
    most = -(-(63 + budget) // 16) + 1
    full, window = world.engine.kv.pools
    held = 0
    while world.engine.has_work:
        world.step()
        held = max(held, window.num_used)
        assert window.num_used <= most
        assert full.num_used == 0 or full.num_used >= window.num_used
    assert held >= 4
    world.check_end()


def test_windows_leave_room_for_others():
    """A pool that holds one long context in full serves eight of them with a window."""
    world = World(
        make_settings(block_size=4, num_blocks=(51,), windows=(8,), max_num_seqs=8, budget=16)
    )
    for number in range(8):
        world.add([number] * 100, max_tokens=60, ignore_eos=True)
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, len(world.engine.scheduler.running))
    assert most == 8
    assert world.engine.scheduler.num_preemptions == 0
    world.check_end()


def test_forks_share_what_a_window_still_shows():
    """n = 3 after a prompt far beyond the window: the siblings refer to its live blocks alone."""
    world = World(make_settings(block_size=4, num_blocks=(40, 40), windows=(5, 0), budget=8))
    world.add([1, 2, 3] * 15, n=3, max_tokens=20, ignore_eos=True)
    while not any(s.index for s in world.engine.scheduler.running):
        world.step()
    world.step()
    window, full = world.engine.kv.pools
    assert window.num_used < full.num_used
    world.drain()
    world.check_end()


def test_preempted_after_its_window_overflowed():
    """Two contexts that do not fit together: one is preempted, comes back, and says the same."""
    world = World(
        make_settings(block_size=2, num_blocks=(30, 30), windows=(0, 6), max_num_seqs=2, budget=8)
    ).expect_nothing()
    for number in range(2):
        world.add([number] * 14, max_tokens=26, ignore_eos=True)
    world.drain()
    assert world.engine.scheduler.num_preemptions > 0
    world.check_end()


def test_room_is_what_extend_need_not_be_asked_for():
    """Blocks of 4: with 6 tokens there is room for 8; a fork, a copy out and the end take it."""
    config = CacheConfig(num_blocks=(9,), block_size=4, windows=(0,), prefix_cache="")
    kv, one, child = KVCache(config, 16), sequence(20, 1), sequence(20, 1)
    kv.extend(one, 6)
    one.computed = 6
    assert kv.extend(one, 7) == (((),), []) and one.capacity == 8
    kv.check_integrity([one])
    kv.fork(one, child, 6)
    assert one.capacity == child.capacity == 0, "the first to write needs a copy"
    assert kv.extend(one, 7)[1], "and gets one"
    kv.extend(one, 8)
    assert one.capacity == 8
    kv.live_blocks(one)
    assert one.capacity == 0
    kv.extend(one, 8)
    kv.release(one)
    assert one.capacity == 0
    kv.release(child)
    kv.check_integrity([one, child])


def test_what_slides_has_no_room_without_asking():
    """Each token may give back a block."""
    kv, one = kv_cache((9, 9), max_chunk=16), sequence(20)
    kv.extend(one, 6)
    one.computed = 6
    kv.extend(one, 7)
    assert one.capacity == 0


def test_what_many_need_is_the_sum_of_what_each_needs():
    rows = [sequence(tokens) for tokens in (3, 9, 17)]
    for windows in ((0, 0), (0, 6)):
        config = CacheConfig(num_blocks=(9, 9), block_size=4, windows=windows, prefix_cache="")
        kv = KVCache(config, 8)
        kv.extend(rows[1], 5)
        each = [kv.still_needed(row) for row in rows]
        assert kv.needed_by(rows) == [sum(counts) for counts in zip(*each)]
        assert kv.needed_by([]) == [0, 0]
        assert kv.num_live(rows) == [2, 2]
        kv.release(rows[1])
