"""The last block of an answer, filled in part, is found again: whole, in part, below, by its own.

The fake runtime keeps in each slot what its keys and values depend on, so whoever takes over more
than was computed reads what is another's, and the step says so.
"""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_world import CachedWorld
from engine_world import CHEAP, VOCAB, World, make_settings
from headway.core.plan import TierNews
from headway.core.principal import Principal
from headway.engine.calibration import warm_up
from headway.engine.chain import Chain, packed, root_key
from headway.engine.kv import BlockPool
from headway.engine.kv.prefix import Cached, PrefixIndex

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
PROMPT = list(range(1, 15))
"""With an answer of 6 tokens 19 are computed: of blocks of 8 two full ones and 3 tokens."""


def world(**how) -> CachedWorld:
    return CachedWorld(make_settings(**{"block_size": 8, "prefix_cache": "lfu", **how}))


def tiered(**how) -> CachedWorld:
    disk = {"disk_bytes": 10**6, "block_bytes": (CHEAP,) * len(how.get("num_blocks", (1,)))}
    return world(**how, **disk)


def restart(old: CachedWorld) -> CachedWorld:
    """The next process over the same disk."""
    new = CachedWorld(old.settings)
    new.executor.disk, new.executor.owners = old.executor.disk, old.executor.owners
    new.executor.news = TierNews(stored=list(old.executor.disk))
    warm_up(new.engine)
    return new


def listed(talk: CachedWorld, group: int = 0) -> list[int]:
    """Of each block that can be found how many tokens it holds, in order."""
    index = talk.engine.kv.pools[group].index
    return sorted(cached.num_tokens for cached in index.cached if cached is not None)


# ── in memory ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("windows", [(0,), (0, 9), (9,), (0, 1)])
def test_each_turn_computes_what_is_new(windows):
    talk = world(windows=windows, num_blocks=(40,) * len(windows), max_model_len=200)
    text, rng = [], random.Random(0)
    for _ in range(12):
        known = max(len(text) - 1, 0)
        text += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        answer, found = talk.answer_of(text, max_tokens=rng.randint(1, 9), seed=5)
        assert known - found < 2, "less than a quarter of a block is computed again"
        text += answer
    assert talk.copies


def test_who_goes_on_takes_its_place_and_the_old_name_is_gone():
    talk = world()
    answer, _ = talk.answer_of(PROMPT, max_tokens=6)
    assert listed(talk) == [3, 8, 8]
    turn = [*PROMPT, *answer, 30, 31]
    longer, found = talk.answer_of(turn, max_tokens=6)
    assert found == 19 and listed(talk) == [3, 8, 8, 8]
    chain = Chain(turn, root_key("", ""), 8)
    assert chain.part(2, 3) not in talk.engine.kv.pools[0].index.block_of
    assert talk.answer_of([*PROMPT, *answer, 39], max_tokens=1)[1] == 20, "as its full block begins"
    assert talk.answer_of([*turn, *longer, 5], max_tokens=1)[1] == 27


def test_two_who_go_on_otherwise_at_once_both_find_it():
    talk = world()
    answer, _ = talk.answer_of(PROMPT, max_tokens=6)
    asked = [talk.ask([*PROMPT, *answer, other], seed=1) for other in (30, 31, 32)]
    talk.drain()
    assert [talk.num_cached[number] for number in asked] == [19, 19, 19]
    assert len(talk.copies) == 3


def test_as_much_as_is_alike_is_taken():
    talk = world()
    answer, _ = talk.answer_of(PROMPT, max_tokens=8)
    assert listed(talk) == [5, 8, 8]
    other = (answer[4] + 1) % VOCAB
    assert talk.answer_of([*PROMPT, *answer[:4], other, 1], max_tokens=1)[1] == 18
    assert talk.answer_of([*PROMPT, *answer[:3], (answer[3] + 1) % VOCAB], max_tokens=1)[1] == 16


def test_an_aborted_answer_and_a_preempted_one_leave_theirs():
    talk = world()
    request_id = talk.ask(PROMPT, max_tokens=20)
    for _ in range(6):
        talk.step()
    got = talk.gained[request_id, 0].tokens
    scheduler = talk.engine.scheduler
    scheduler.preempt(scheduler.running[0])
    assert listed(talk) == [3, 8, 8]
    talk.step()
    (row,) = talk.plan.scheduled
    assert row.start == 19
    talk.abort(request_id, None)
    assert listed(talk) == [4, 8, 8]
    assert talk.answer_of([*PROMPT, *got, 30], max_tokens=1)[1] >= 19


def test_only_the_same_salt_and_adapter_find_it():
    talk = world()
    answer, _ = talk.answer_of(PROMPT, max_tokens=6, salt="a", adapter="x")
    turn = [*PROMPT, *answer, 30]
    for how in ({}, {"salt": "a"}, {"adapter": "x"}):
        assert talk.answer_of(turn, max_tokens=1, **how)[1] == 0
    talk.engine.forget(Principal(cache_salt="a").block_owner())
    assert talk.answer_of(turn, max_tokens=1, salt="a", adapter="x")[1] == 0


def test_less_than_a_quarter_is_not_listed():
    talk = world()
    talk.answer_of(PROMPT, max_tokens=4)
    assert listed(talk) == [8, 8]


def test_what_a_failed_sequence_leaves_is_not_found(caplog):
    talk = world()
    talk.ask(PROMPT, max_tokens=9)
    for _ in range(6):
        talk.step()
    talk.executor.fail_rows = frozenset({0})
    talk.step()
    assert listed(talk) == []
    talk.drain()


def test_a_copy_that_was_never_made_is_not_found(caplog):
    """The step that copies raises: its rows begin again, and their blocks hold anything."""
    talk = world()
    answer, _ = talk.answer_of(PROMPT, max_tokens=6)
    turn = [*PROMPT, *answer, 30, 31]
    talk.executor.fail_at = "submit"
    request_id = talk.ask(turn, max_tokens=3)
    talk.step()
    assert talk.copies and listed(talk) == [3, 8, 8]
    talk.drain()
    assert talk.gained[request_id, 0].reason == "length"


def test_a_wrong_guess_is_never_listed():
    """Guesses lie in the slots behind what is computed; the block is listed without them."""
    for seed in range(40):
        rng = random.Random(seed)
        shape = make_settings(block_size=8, prefix_cache="lfu", max_model_len=120)
        talk = World(shape, rng)
        texts: list[list[int]] = [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
        for _ in range(4):
            asked = {talk.add([*text], max_tokens=rng.randint(2, 12)): text for text in texts}
            talk.drain()
            for request_id, text in asked.items():
                text += [*talk.gained[request_id, 0].tokens, rng.randrange(VOCAB)]
        index = talk.engine.kv.pools[0].index
        for cached in filter(None, index.cached):
            assert any(cached.packed == packed(text[at : at + cached.num_tokens]) for text in texts
                       for at in range(0, len(text), 8))  # fmt: skip
        assert talk.executor.had_drafts


def test_the_queue_gives_out_a_block_begun_before_a_full_one_of_its_age():
    pool = BlockPool(3, "lfu")
    blocks = [pool.take(), pool.take()]
    pool.insert(blocks[0], Cached(b"full", b"", packed([1, 2, 3, 4]), 1.0))
    pool.insert(blocks[1], Cached(b"begun", b"full", packed([5, 6]), 1.0, uses=0.5))
    for block in blocks:
        pool.release(block)
    assert [pool.take(), pool.take()] == blocks[::-1]


def test_exact_numbers_of_full_blocks_go_first():
    """Two groups, of which one sees an open block alone, with 6 blocks: others' prompts take all of
    them again and again, and leave the two that conversations go on from."""
    talk = world(windows=(0, 1), num_blocks=(60, 7), budget=16, max_model_len=64)
    answers = [talk.answer_of([at, *PROMPT], max_tokens=6)[0] for at in (20, 21)]
    for other in range(5):
        talk.answer_of([30 + other] * 40, max_tokens=1)
    for at, answer in zip((20, 21), answers, strict=True):
        assert talk.answer_of([at, *PROMPT, *answer, 30, 31], max_tokens=1)[1] == 20


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 1), min_size=1, max_size=4),
                          st.booleans()), max_size=30))  # fmt: skip
@settings(max_examples=EXAMPLES)
def test_of_what_begins_alike_the_longest_is_listed(histories):
    """Whatever is listed when: nothing that the newest listed behind the same parent begins with
    can be found apart from it, and no block is lost."""
    pool = BlockPool(40, "lfu")
    held = []
    for parent, tokens, is_released in histories:
        block = pool.take()
        key = bytes([parent, *tokens])
        own = Cached(key, bytes([parent]), packed(tokens), 1.0, uses=len(tokens) / 4)
        pool.insert(block, own)
        index = pool.index
        assert isinstance(index, PrefixIndex)
        newest = index.newest(own.place)
        assert newest is not None
        for count in range(1, newest.num_tokens):
            begins = newest.key[: 1 + count]
            assert not newest.packed.startswith(own.packed) or begins not in index.block_of or (
                begins != key and bytes([parent, *tokens[:count]]) == begins)  # fmt: skip
        if is_released:
            pool.release(block)
        else:
            held.append([block])
        pool.check_integrity(held)


# ── below ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("windows", [(0,), (0, 9), (0, 1)])
def test_the_next_engine_finds_it_on_the_disk(windows):
    first = tiered(windows=windows, num_blocks=(40,) * len(windows))
    answer, _ = first.answer_of(PROMPT, max_tokens=6)
    second = restart(first)
    turn = [*PROMPT, *answer, 30, 31, 32]
    assert second.answer_of(turn, seed=2) == (first.answer_of(turn, seed=2)[0], 19)
    assert not second.copies, "what was read is its own"


def test_of_a_group_that_sees_an_open_block_nothing_else_goes_below():
    talk = tiered(windows=(0, 1), num_blocks=(40, 40))
    talk.answer_of(PROMPT, max_tokens=6)
    chain = Chain([*PROMPT], root_key("", ""), 8)
    written = {group: {key for at, key in talk.executor.disk if at == group} for group in (0, 1)}
    assert len(written[0]) == 3 and len(written[1]) == 1
    assert chain.key(0) in written[0] and written[1] < written[0]


def test_each_turn_through_the_disk_computes_what_is_new():
    talk, text, rng = tiered(max_model_len=200), [], random.Random(1)
    for _ in range(10):
        known = max(len(text) - 1, 0)
        text += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        answer, found = talk.answer_of(text, max_tokens=rng.randint(1, 9), seed=5)
        assert known - found < 2
        text += answer
        talk.engine.kv.forget_free()


def test_tokens_are_told_of_the_tier_that_they_came_from():
    talk = tiered()
    answer, _ = talk.answer_of(PROMPT, max_tokens=6)
    talk.engine.kv.forget_free()
    talk.ask([*PROMPT, *answer, 30], max_tokens=1)
    told = [talk.step()[1].restored_tokens for _ in range(4)]
    talk.drain()
    assert {"disk": 19} in told


def test_what_is_read_and_does_not_come_is_computed():
    first = tiered()
    answer, _ = first.answer_of(PROMPT, max_tokens=6)
    second = restart(first)
    second.executor.bring = lambda: False
    turn = [*PROMPT, *answer, 30, 31]
    assert second.answer_of(turn, seed=2) == (first.answer_of(turn, seed=2)[0], 0)
