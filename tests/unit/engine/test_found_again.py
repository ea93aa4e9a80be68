"""What a newcomer finds is looked up once while the same blocks can be found, and anew after."""

import random

import pytest

from headway.config.cache_config import CacheConfig
from headway.core.request import Request, SamplingParams
from headway.engine.kv import KVCache
from headway.engine.kv.listing import list_full, release_and_list
from headway.engine.sequence import Sequence

SIZE = 4


def cache(num_blocks: int = 12) -> KVCache:
    config = CacheConfig(
        block_size=SIZE, num_blocks=(num_blocks,), windows=(0,), prefix_cache="lru"
    )
    return KVCache(config, 64)


def sequence(number: int, tokens: list[int]) -> Sequence:
    request = Request(number, tokens, SamplingParams(max_tokens=4))
    return Sequence(number, request, 0, num_groups=1, stop_ids=frozenset(), max_len=64, seed=0)


def compute(kv: KVCache, one: Sequence) -> None:
    """All its tokens, as a step does it."""
    kv.reuse(one, kv.match_prefix(one))
    assert kv.extend(one, len(one.tokens)) is not None
    one.computed = len(one.tokens)
    list_full(kv, one)


def test_a_newcomer_finds_what_came_since_it_was_looked_up():
    kv, asks = cache(), sequence(1, [*range(1, 11)])
    assert kv.match_prefix(asks).num_tokens == 0
    assert kv.match_prefix(asks) is kv.match_prefix(asks)
    compute(kv, sequence(2, [*range(1, 9), 90]))
    found = kv.match_prefix(asks)
    assert found.num_tokens == 8 and found is kv.match_prefix(asks)
    assert kv.match_prefix(asks, partly=False) is not found


def test_it_does_not_find_what_was_evicted():
    kv, asks, before = cache(8), sequence(1, [*range(1, 11)]), sequence(2, [*range(1, 10)])
    compute(kv, before)
    assert kv.match_prefix(asks).num_tokens == 8
    release_and_list(kv, before, is_sound=True)
    assert kv.match_prefix(asks).num_tokens == 9, "the begun block is listed"
    compute(kv, sequence(3, [*range(100, 128)]))  # all blocks
    assert kv.match_prefix(asks).num_tokens == 0


def test_it_finds_more_when_it_knows_more_tokens():
    kv, asks = cache(), sequence(1, [*range(1, 8)])
    compute(kv, sequence(2, [*range(1, 14)]))
    assert kv.match_prefix(asks).num_tokens == 6
    asks.tokens += [8, 9, 10]
    assert kv.match_prefix(asks).num_tokens == 9


@pytest.mark.parametrize("seed", range(3))
def test_many_lookups_are_those_of_a_fresh_sequence(seed):
    """Blocks come and go; each look-up is compared with one that was never asked before."""
    rng, kv, running = random.Random(seed), cache(14), list[Sequence]()
    waiting = [sequence(n, [rng.randrange(2) for _ in range(rng.randint(3, 16))]) for n in range(6)]
    number = 100
    for _ in range(300):
        for asks in rng.sample(waiting, 3):
            whole = rng.random() < 0.3
            fresh = sequence(0, [*asks.tokens])
            assert kv.match_prefix(asks, partly=whole) == kv.match_prefix(fresh, partly=whole)
        if running and (len(running) > 2 or rng.random() < 0.4):
            release_and_list(
                kv, running.pop(rng.randrange(len(running))), is_sound=rng.random() < 0.8
            )
        else:
            number += 1
            one = sequence(number, [rng.randrange(2) for _ in range(rng.randint(1, 14))])
            hit = kv.find_room(one, [0])
            if hit is not None:
                compute(kv, one)
                running.append(one)
        kv.check_integrity(running)
