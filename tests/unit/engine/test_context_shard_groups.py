"""Context shards: the rank that holds a block, and that no token is on two ranks."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, World, additions, make_settings, perform, shapes
from fakes import FakeExecutor
from headway.core.plan import NULL_BLOCK
from headway.spec import context_shards

SPLIT = 16
"""In place of 512 tokens, so that short contexts lie on several ranks."""


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_shards, "SPLIT_TOKENS", SPLIT)


class Ranks(FakeExecutor):
    """Ranks whose memories are looked at together: a token lies on one of them."""

    def _slot(self, sequence, group, position):
        owner = position // SPLIT % len(self.num_blocks)
        for other, table in enumerate(sequence.tables):
            assert other == owner or table[position // self.block_size] == NULL_BLOCK
        return super()._slot(sequence, owner, position)


def world(**how) -> World:
    blocks = how.pop("num_blocks", (21, 21))
    shape = make_settings(num_blocks=blocks, ranks=len(blocks), prefix_cache="cost", **how)
    return World(shape, kind=Ranks)


operations = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("raise"), st.sampled_from(["submit", "sample", "collect"])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=max(EXAMPLES // 3, 1))
@given(shapes, st.sampled_from([1, 2, 4, 8, 16]), st.integers(2, 3), st.booleans(), operations)
def test_whatever_happens_the_same_tokens_come_out(shape, block_size, ranks, is_kept, chosen):
    """Small pools, chunks, siblings, hits, preemption, aborts and failures."""
    blocks = max(shape.cache.num_blocks[0], 3)
    cache = replace(
        shape.cache,
        block_size=block_size,
        num_blocks=(blocks,) * ranks,
        windows=(0,) * ranks,
        ranks=ranks,
        prefix_cache="cost" if is_kept else "",
    )
    most = (blocks - 1) * block_size
    shape = replace(shape, cache=cache, max_model_len=max(2, min(shape.max_model_len, most)))
    logging.disable(logging.CRITICAL)
    try:
        found = World(shape, kind=Ranks)
        for operation in chosen:
            perform(found, operation)
        found.drain()
    finally:
        logging.disable(logging.NOTSET)


def test_a_long_context_lies_on_all_ranks():
    """Of 50 tokens in blocks of 4 rank 0 has the first 16 and the third, rank 1 the rest."""
    one = world(budget=64)
    one.add([5] * 49, max_tokens=2, ignore_eos=True)
    one.step()
    (sequence,) = one.engine.scheduler.running
    held = [[block != NULL_BLOCK for block in table] for table in sequence.block_tables]
    assert held[0] == [at // 4 % 2 == 0 for at in range(13)]
    assert held[1] == [not is_held for is_held in held[0]]
    assert [pool.num_used for pool in one.engine.kv.pools] == [8, 5]
    _, record = one.step()
    assert record.group_blocks_used == (0,) and one.engine.cost.windows == (0,)
    one.drain()


def test_a_prompt_is_found_on_all_ranks_and_within_a_block():
    one = world(budget=64)
    prompt = [at % 37 for at in range(46)]
    one.add(prompt, max_tokens=1, ignore_eos=True)
    one.drain()
    one.add([*prompt, 1, 2], max_tokens=1, ignore_eos=True)
    _, record = one.step()
    assert record.num_tokens == 48 - 46  # rank 1 has half of the last block
    one.drain()
    one.add([*prompt[:43], 1, 2], max_tokens=1, ignore_eos=True)
    _, record = one.step()
    assert record.num_tokens == 45 - 43  # the last block is begun alike: its copy is on rank 0
    one.drain()


def test_who_finds_no_room_on_one_rank_waits():
    """Short contexts lie on rank 0 alone: two of 40 tokens do not fit in its 8 blocks of 4."""
    one = world(num_blocks=(9, 9), budget=64)
    for number in range(2):
        one.add([number] * 30, max_tokens=6, ignore_eos=True)
    most = 0
    while one.engine.has_work:
        one.step()
        most = max(most, one.engine.kv.pools[0].num_used)
    assert most <= 8
    one.check_end()
