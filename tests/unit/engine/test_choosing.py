"""Tables that shrink behind a prompt: which blocks, what room they take, who finds what."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choosing_world import ChoosingMachine
from headway.config.cache_config import CacheConfig
from headway.core.plan import Shrink
from headway.core.request import Request, SamplingParams
from headway.engine.kv import KVCache
from headway.engine.kv.listing import list_full
from headway.engine.kv.states import whole_tables
from headway.engine.sequence import Sequence

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
PROMPT = list(range(102))
"""In blocks of 4 it takes 26, and shrinks by 9: 64 of 102 tokens, in whole blocks 66, are kept."""


def sequence(
    tokens: list[int],
    sequence_id: int = 0,
    *,
    keep: float = 0.25,
    scored: bool = False,
) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=0 if scored else None)
    request = Request(sequence_id, list(tokens), sampling)
    return Sequence(
        sequence_id,
        request,
        0,
        num_groups=2,
        stop_ids=frozenset(),
        max_len=999,
        seed=0,
        kv_keep=keep,
    )


def kv_cache(blocks: int = 99, policy: str = "lfu") -> KVCache:
    """Blocks of 4: of layers that keep everything, and of such that choose."""
    config = CacheConfig(
        num_blocks=(blocks, blocks),
        block_size=4,
        windows=(0, 0),
        choosing=(1,),
        keep=0.25,
        prefix_cache=policy,
    )
    return KVCache(config, 64)


def advance(kv: KVCache, one: Sequence, end: int) -> list[Shrink]:
    """Compute the tokens before `end`; the tables that shrank for it."""
    assert kv.choosing is not None and kv.extend(one, end) is not None
    one.computed = end
    list_full(kv, one)
    return kv.choosing.take()


def test_a_table_shrinks_with_the_first_token_behind_the_prompt():
    kv, one = kv_cache(), sequence(PROMPT)
    assert kv.choosing is not None
    assert kv.choosing.cut(one, 500) == 102
    assert kv.still_needed(one) == [26, 26 + 26 - 9]
    assert advance(kv, one, 102) == []
    before = list(one.block_tables[1])
    one.tokens += [200, 201, 202]
    assert kv.still_needed(one) == [1, 27 - 9]
    (shrink,) = advance(kv, one, 103)
    table = one.block_tables[1]
    assert (shrink.sequence_id, shrink.group, shrink.num_tokens) == (0, 1, 102)
    assert (shrink.sources, shrink.blocks) == (before, table) and len(table) == 17
    assert one.dropped == [0, 9] and len(one.block_tables[0]) == 26
    assert not set(before) & set(table)
    kv.check_integrity([one])
    assert advance(kv, one, 105) == []
    assert [len(each) for each in one.block_tables] == [27, 18]
    assert kv.still_needed(one) == [0, 0]
    kv.check_integrity([one])
    kv.release(one)
    assert kv.num_used == 0 and one.dropped == [0, 0]


def test_others_find_the_prompt_and_nothing_behind_it():
    """The whole blocks of the prompt, not what was computed from a part of it."""
    kv, one = kv_cache(), sequence(PROMPT)
    advance(kv, one, 102)
    one.tokens += list(range(300, 320))
    advance(kv, one, 122)
    kv.release(one)
    for keep in (0.25, 1.0):
        next_turn = sequence([*one.tokens, 5, 6], 1, keep=keep)
        assert kv.match_prefix(next_turn).num_tokens == 100


def test_one_that_goes_on_finds_no_more_than_its_prompt():
    """Another listed more of the same tokens; behind its prompt it computes for itself."""
    kv, other = kv_cache(), sequence(list(range(140)), keep=1.0)
    advance(kv, other, 140)
    again = sequence(PROMPT, 1)
    again.resume(list(range(102, 130)))
    assert kv.match_prefix(again).num_tokens == 102


def test_half_of_a_scored_prompt_is_chosen_from():
    kv, one = kv_cache(), sequence(list(range(200)), scored=True)
    assert kv.choosing is not None
    assert one.chooses_at == 100 and kv.choosing.cut(one, 150) == 100
    advance(kv, one, 100)
    assert kv.choosing.cut(one, 100) == 100
    (shrink,) = advance(kv, one, 200)
    assert shrink.num_tokens == 100 and one.dropped == [0, 9]


@pytest.mark.parametrize("tokens", [1, 40, 64, 67])
def test_short_prompts_stay_whole(tokens: int):
    kv, one = kv_cache(), sequence(list(range(tokens)))
    assert kv.still_needed(one) == [-(-tokens // 4)] * 2
    advance(kv, one, tokens)
    one.tokens += [1, 2]
    assert advance(kv, one, tokens + 2) == [] and one.dropped == [0, 0]


def test_siblings_shrink_each_for_itself():
    """They share the prompt's blocks, and copy what they write to."""
    kv, parent = kv_cache(), sequence(PROMPT)
    advance(kv, parent, 102)
    child = sequence(PROMPT, 1)
    kv.fork(parent, child, 101)
    found = []
    for one, first in ((child, 102), (parent, 103), (child, 103)):
        one.tokens += [300] * (first - len(one.tokens))
        found += advance(kv, one, first)
        kv.check_integrity([parent, child])
    assert [shrink.sequence_id for shrink in found] == [0, 1]
    assert len({*parent.block_tables[1], *child.block_tables[1]}) == 34
    for one in (parent, child):
        kv.release(one)
    assert kv.num_used == 0


def test_without_room_nothing_is_taken():
    kv, one = kv_cache(blocks=40), sequence(PROMPT)
    advance(kv, one, 102)
    free = [pool.num_free for pool in kv.pools]
    one.tokens.append(5)
    assert kv.extend(one, 103) is None
    assert kv.choosing is not None and kv.choosing.take() == []
    assert [pool.num_free for pool in kv.pools] == free and one.dropped == [0, 0]
    kv.check_integrity([one])


def test_what_is_copied_away_comes_back_as_short():
    kv, one = kv_cache(), sequence(PROMPT)
    advance(kv, one, 102)
    one.tokens += [5] * 9
    advance(kv, one, 111)
    counts = [len(blocks) for blocks in kv.live_blocks(one)]
    assert counts == [28, 19]
    kv.leave(one)
    assert (one.computed, one.dropped, kv.num_used) == (111, [0, 9], 0)
    one.host_tables = [[1], [1]]
    assert kv.still_needed(one) == [28, 19]
    one.host_tables = []
    kv.take_for_swap_in(one, counts)
    assert whole_tables(kv.states, one) == one.block_tables and one.introduction().dropped == [0, 9]
    kv.check_integrity([one])
    assert advance(kv, one, 111) == []


@settings(max_examples=60, deadline=None)
@given(
    st.integers(60, 99),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(0, 5)), max_size=30),
)
def test_any_order_of_chunks_keeps_the_books(blocks: int, steps: list):
    """Three that begin alike advance, fork into one another's place, end and begin again."""
    kv = kv_cache(blocks)
    assert kv.choosing is not None
    prompts = [PROMPT[: 70 + 16 * i] + [500 + i] * 20 for i in range(3)]
    running: list[Sequence | None] = [None] * 3
    for which, count, action in steps:
        one = running[which]
        if one is None:
            one = sequence(prompts[which], which, keep=(0.25, 0.5, 1.0)[which])
            hit = kv.find_room(one, [0, 0])
            if hit is None:
                continue
            kv.reuse(one, hit)
            running[which] = one
        if action == 5:
            kv.release(one)
            running[which] = None
        else:
            if one.computed == len(one.tokens):
                one.tokens += [600] * min(count, 30)
            end = one.computed + kv.choosing.cut(one, min(count, one.num_missing))
            if kv.extend(one, end) is not None:
                one.computed = end
                list_full(kv, one)
            for shrink in kv.choosing.take():
                kept = len(shrink.blocks) * 4 >= 64
                assert kept and len(shrink.sources) == -(-shrink.num_tokens // 4)
        kv.check_integrity([each for each in running if each is not None])


# ── a whole engine ──────────────────────────────────────────────────────────────────────────────


TestChoosingMachine = ChoosingMachine.TestCase
TestChoosingMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30)
