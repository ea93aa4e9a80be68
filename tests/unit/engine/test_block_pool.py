"""Blocks many at a time: given out, listed and given back as one after the other."""

import gc
import random

import pytest

from headway.config.cache_config import CacheConfig
from headway.core.request import Request, SamplingParams
from headway.engine.chain import packed
from headway.engine.kv import KVCache
from headway.engine.kv.listing import list_full, release_and_list
from headway.engine.kv.pool import BlockPool
from headway.engine.kv.prefix import Cached, PrefixIndex
from headway.engine.sequence import Sequence

SIZE = 4


@pytest.mark.parametrize("seed", range(8))
def test_what_was_given_back_goes_first_and_then_what_nobody_had(seed):
    """As from a stack of all blocks, the first on top."""
    rng, pool, stack = random.Random(seed), BlockPool(40), list(range(39, 0, -1))
    held: list[int] = []
    for _ in range(200):
        count = rng.randint(1, 6)
        assert pool.num_free == len(stack)
        if len(stack) >= count and rng.random() < 0.55:
            taken = pool.take_some(count) if rng.random() < 0.7 else [pool.take()]
            assert taken == [stack.pop() for _ in taken]
            held += taken
        else:
            rng.shuffle(held)
            held, back = held[count:], held[:count]
            pool.release_all(back)
            stack += back
        pool.check_integrity([held])


def contents(rng: random.Random) -> list[Cached]:
    """A run of blocks that continue each other, of tokens that others may have too."""
    parent, found = b"root", []
    for _ in range(rng.randint(1, 4)):
        tokens = [rng.randint(1, 2) for _ in range(rng.choice((2, 4, 4)))]
        key = parent + b"/" + bytes(tokens)
        uses = rng.choice((0.5, 1.0))
        found.append(Cached(key, parent, packed(tokens), rng.random(), uses=uses))
        parent = key
    return found


def state(index: PrefixIndex) -> object:
    listed = [
        None if c is None else (c.key, c.parent, c.packed, c.cost, c.owner, c.uses)
        for c in index.cached
    ]
    return index.block_of, listed, index._newest, index.num_changes


def test_the_garbage_collector_looks_at_nothing_of_a_block():
    """There are as many as the memory has blocks, and while they are young it would visit all."""
    pool = BlockPool(30, "lfu")
    blocks, made = pool.take_some(8), contents(random.Random(0)) + contents(random.Random(1))
    pool.insert_all(blocks[: len(made)], made)
    pool.release_all(blocks)
    index = pool.index
    assert index is not None and len(index.queue) == len(index) > 3
    tables = (index.block_of, index._newest, index.queue._entries)
    held = [each for table in tables for item in table.items() for each in item]
    assert not any(map(gc.is_tracked, [*held, *made]))


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
@pytest.mark.parametrize("seed", range(6))
def test_many_at_once_are_as_many_one_by_one(seed, policy):
    """Two pools, the same histories of blocks that are taken, listed, given back and evicted."""
    pools = BlockPool(30, policy), BlockPool(30, policy)
    rng, held = random.Random(seed), list[list[int]]()
    for _ in range(150):
        made, again = (contents(random.Random(number)) for number in [rng.random()] * 2)
        if pools[0].num_free >= len(made) and rng.random() < 0.6:
            held.append(pools[0].take_some(len(made)))
            assert held[-1] == [pools[1].take() for _ in again]
            pools[0].insert_all(held[-1], made)
            for block, cached in zip(held[-1], again, strict=True):
                pools[1].insert(block, cached)
        elif held:
            back = held.pop(rng.randrange(len(held)))[::-1]
            pools[0].release_all(back)
            for block in back:
                pools[1].release(block)
        first, second = (pool.index for pool in pools)
        assert isinstance(first, PrefixIndex) and isinstance(second, PrefixIndex)
        assert state(first) == state(second)
        for pool in pools:
            pool.check_integrity(held)


@pytest.mark.parametrize("seed", range(4))
def test_one_table_is_listed_as_one_of_several(seed):
    """Prompts that share beginnings, computed in chunks of any length and let go."""
    config = CacheConfig(block_size=SIZE, num_blocks=(40,), windows=(0,), prefix_cache="cost")
    plain, slow = KVCache(config, 64), KVCache(config, 64)
    slow.is_one_table = False
    plain.attention_cost = slow.attention_cost = 0.37
    found = []
    for kv in (plain, slow):
        rng = random.Random(seed)
        for number in range(40):
            tokens = [rng.randint(1, 2) for _ in range(rng.randint(5, 30))]
            request = Request(number, tokens, SamplingParams(max_tokens=4))
            one = Sequence(
                number, request, 0, num_groups=1, stop_ids=frozenset(), max_len=64, seed=0
            )
            kv.reuse(one, kv.match_prefix(one))
            while one.computed < len(tokens):
                end = min(one.computed + rng.randint(1, 12), len(tokens))
                assert kv.extend(one, end) is not None
                one.computed = end
                list_full(kv, one)
            release_and_list(kv, one, is_sound=True)
            kv.check_integrity([])
        index = kv.pools[0].index
        assert isinstance(index, PrefixIndex)
        found.append(state(index))
    assert found[0] == found[1]
