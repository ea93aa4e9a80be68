"""What was computed is found again: always the right tokens, never another key's, never too much.

The fake runtime keeps in each slot what its keys and values depend on: salt, adapter and all tokens
before. A hit on anything else is seen in the step that reads it.
"""

import hashlib
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_world import CachedWorld, Machine
from engine_world import make_settings
from fakes import with_cache
from headway.core.clock import VirtualClock
from headway.core.principal import Principal
from headway.engine.chain import Chain, packed, root_key
from headway.engine.kv import BlockPool
from headway.engine.kv.eviction import POLICIES, EvictionQueue
from headway.engine.kv.prefix import Cached
from headway.telemetry.stats import take_snapshot
from telemetry_cases import step, telemetry

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
SIZE = 4
NO_TIME = {"schedule_s": 0.0, "update_s": 0.0}


def world(**how) -> CachedWorld:
    policy = how.pop("policy", "cost")
    return CachedWorld(make_settings(**how, prefix_cache=policy))


# ── state machine ───────────────────────────────────────────────────────────────────────────────

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)


# ── what is found ───────────────────────────────────────────────────────────────────────────────


def test_the_key_of_a_block_is_a_link_of_a_sha256_chain():
    def sha(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    root = sha(sha(b"salt") + sha(b"adapter"))
    first = sha(root + struct.pack("<4i", 1, 2, 3, 4))
    second = sha(first + struct.pack("<4i", 5, 6, 7, 70_000))
    chain = Chain([1, 2, 3, 4, 5, 6, 7, 70_000, 9], root_key("salt", "adapter"), SIZE)
    assert [chain.key(1), chain.key(0), chain.key(-1)] == [second, first, root]
    assert root_key("salta", "dapter") != root


def test_the_next_turn_finds_prompt_and_answer():
    """8 prompt tokens and 9 answer tokens, the last of which is known but never computed."""
    talk = world()
    answer, found = talk.answer_of(list(range(8)), max_tokens=9)
    assert found == 0
    turn = [*range(8), *answer, 1, 2, 3]
    again, found = talk.answer_of(turn)
    assert found == 16
    assert talk.executor.sequences == {}
    assert talk.expected(1, 0)[0] == again


def test_a_prompt_that_is_found_whole_computes_its_last_token_in_a_copy():
    talk = world()
    prompt = list(range(8))
    first, _ = talk.answer_of(prompt, seed=1)
    again, found = talk.answer_of(prompt, seed=1)
    assert (again, found) == (first, 7)
    assert [(copy.index, copy.group) for copy in talk.copies] == [(1, 0)]


@pytest.mark.parametrize(("alike", "found"), [(8, 8), (9, 8), (10, 10), (15, 15)])
def test_a_quarter_of_a_block_alike_is_shared_and_copied(alike, found):
    talk = world(block_size=8)
    talk.answer_of(list(range(16)))
    prompt = [*range(alike), *[30] * 6]
    _, num_cached = talk.answer_of(prompt)
    assert num_cached == found
    assert len(talk.copies) == (found > 8)


def test_only_the_same_salt_and_adapter_find():
    talk = world()
    prompt = list(range(12))
    for how in ({}, {"salt": "a"}, {"adapter": "x"}, {"salt": "a", "adapter": "x"}):
        assert talk.answer_of(prompt, **how)[1] == 0
        assert talk.answer_of(prompt, **how)[1] == 11


def test_a_salt_of_the_request_stays_within_its_key():
    """Whatever the salts, two principals meet only if both have the same of both."""
    keys = [Principal(cache_salt=salt) for salt in ("", "a", "ab")]
    salts = [None, "", "a", "b", "ab", Principal(cache_salt="a").salted("b").cache_salt]
    mixed = {principal.salted(salt).cache_salt for principal in keys for salt in salts}
    assert len(mixed) == len(keys) * len(salts)
    assert keys[1].salted("b") == Principal(cache_salt="a").salted("b")


def test_without_it_nothing_is_found():
    talk = world(policy="")
    assert [talk.answer_of(list(range(12)))[1] for _ in range(2)] == [0, 0]
    assert talk.engine.kv.pools[0].num_cached == 0


def test_prompt_logprobs_need_the_whole_prompt():
    talk = world()
    talk.answer_of(list(range(12)))
    assert talk.answer_of(list(range(12)), prompt_logprobs=0)[1] == 0


def test_equal_prompts_at_once_are_listed_once():
    talk = world(budget=64)
    for _ in range(3):
        talk.ask(list(range(12)), max_tokens=1)
    talk.step()
    assert talk.engine.kv.pools[0].num_cached == 3
    talk.drain()
    assert talk.engine.kv.pools[0].num_cached == 3
    assert talk.engine.kv.pools[0].num_free == 64


def test_who_arrives_while_a_prompt_is_computed_finds_what_is_there():
    talk = world(budget=8)
    prompt = list(range(20))
    talk.ask(prompt)
    talk.step()
    late = talk.ask(prompt)
    talk.drain()
    assert talk.num_cached[late] == 16


def test_a_preempted_sequence_finds_what_it_had():
    talk = world(budget=16)
    talk.ask(list(range(16)), max_tokens=8)
    talk.step()
    talk.step()
    scheduler = talk.engine.scheduler
    scheduler.preempt(scheduler.running[0])
    talk.step()
    (row,) = talk.plan.scheduled
    assert row.start == 17 and row.sample
    talk.drain()


def test_blocks_of_a_failed_sequence_are_not_found(caplog):
    """Nor those it had found itself: nobody knows which of them was at fault."""
    talk = world(budget=8)
    talk.answer_of(list(range(8)))
    talk.answer_of(list(range(8)), salt="other")
    talk.ask([*range(8), *range(20, 36)])
    talk.step()
    assert talk.engine.kv.pools[0].num_cached == 3 + 3 + 2
    talk.executor.fail_rows = frozenset({0})
    talk.step()
    assert talk.engine.kv.pools[0].num_cached == 3 + 1
    talk.drain()


def test_a_step_that_fails_whenever_it_copies_comes_to_an_end(caplog):
    """What comes back without a copy is found out as any other."""
    talk = world()
    talk.answer_of([30, 1, 2, 3, 4, 5, 6, 7])
    talk.executor.poison = 30
    poisonous = talk.ask([30, 1, 2, 3, 4, 5, 6, 7])
    healthy = talk.ask([1, 2])
    talk.drain(limit=50)
    assert talk.gained[poisonous, 0].reason == "error"
    assert talk.gained[healthy, 0].reason == "length"


def test_a_copy_without_room_is_done_without():
    """The prompt takes all blocks there are: one more for a copy would never be free."""
    talk = world(num_blocks=(4,), max_model_len=12)
    talk.answer_of(list(range(11)), max_tokens=1)
    assert talk.answer_of([*range(10), 30], max_tokens=1)[1] == 8
    assert not talk.copies


# ── window groups ───────────────────────────────────────────────────────────────────────────────


def test_a_window_group_needs_only_what_the_next_token_sees():
    """Blocks of 4, a window of 6: of 24 tokens the last two blocks; the full group has all six."""
    talk = world(num_blocks=(9, 9), windows=(0, 6), budget=4)
    prompt = list(range(24))
    talk.answer_of(prompt, max_tokens=1)
    full, window = talk.engine.kv.pools
    assert (full.num_cached, window.num_cached) == (6, 6)
    busy = [30 + i for i in range(8)]
    talk.answer_of(busy, max_tokens=1, salt="other")
    assert full.num_cached == 8 and window.num_cached == 8
    taken = [window.take() for _ in range(4)]  # the first four of the prompt, released first
    for block in taken:
        window.release(block)
    assert window.num_cached == 4
    assert talk.answer_of([*prompt, 1], max_tokens=1)[1] == 24


def test_a_hole_in_the_window_group_shortens_the_hit():
    talk = world(num_blocks=(20, 20), windows=(0, 6), budget=64)
    prompt = list(range(24))
    talk.answer_of(prompt, max_tokens=1)
    index = talk.engine.kv.pools[1].index
    key = Chain(prompt, root_key("", ""), SIZE).key(4)
    block = index.block_of[key]
    talk.engine.kv.pools[1].reuse(block)
    talk.engine.kv.pools[1].forget(block)
    talk.engine.kv.pools[1].release(block)
    assert talk.answer_of([*prompt, 1], max_tokens=1)[1] == 16


def test_a_hole_in_the_sinks_ends_the_hit():
    """Behind a window of 6, 5 sinks are the blocks 0 and 1: without block 1 one block is of use."""
    shape = make_settings(num_blocks=(20, 20), windows=(0, 6), budget=64, prefix_cache="cost")
    talk = CachedWorld(with_cache(shape, sinks=(0, 5)))
    prompt = list(range(24))
    talk.answer_of(prompt, max_tokens=1)
    assert talk.answer_of([*prompt, 1], max_tokens=1)[1] == 24
    pool = talk.engine.kv.pools[1]
    block = pool.index.block_of[Chain(prompt, root_key("", ""), SIZE).key(1)]
    pool.reuse(block)
    pool.forget(block)
    pool.release(block)
    assert talk.answer_of([*prompt, 2], max_tokens=1)[1] == 4


# ── eviction ────────────────────────────────────────────────────────────────────────────────────


def listed(pool: BlockPool, names: str, parents: str) -> dict[str, int]:
    """Take and list a block for each name, "-" for no parent; name → block."""
    blocks = {name: pool.take() for name in names}
    for name, parent in zip(names, parents, strict=True):
        key, before = name.encode(), parent.encode()
        pool.index.add(blocks[name], Cached(key, before, packed([ord(name)]), 1.0))
    return blocks


def test_blocks_that_hold_nothing_are_handed_out_first():
    pool = BlockPool(6, "lru")
    blocks = listed(pool, "ab", "-a")
    for name in "ba":
        pool.release(blocks[name])
    others = [pool.take() for _ in range(3)]
    assert not set(others) & set(blocks.values()) and pool.num_cached == 2
    assert [pool.take(), pool.take()] == [blocks["b"], blocks["a"]]
    assert pool.num_cached == pool.num_free == 0


def test_no_block_goes_before_its_continuations():
    """a ─ b ─ c and b ─ d: whatever the order of release, b goes behind c and d, a last."""
    for order in ("abcd", "dcba", "badc"):
        pool = BlockPool(5, "lru")
        blocks = listed(pool, "abcd", "-abb")
        names = {block: name for name, block in blocks.items()}
        for name in order:
            pool.release(blocks[name])
        gone = "".join(names[pool.take()] for _ in range(4))
        assert sorted(gone[:2]) == ["c", "d"] and gone[2:] == "ba"


@pytest.mark.parametrize(("policy", "first"), [("lru", "often"), ("lfu", "once"), ("cost", "once")])
def test_what_the_policies_keep(policy, first):
    """`often` was used four times and then not for a while, `once` a moment ago."""
    queue = EvictionQueue(policy)
    queue.push("often", None, 4, 1.0)
    queue.push("once", None, 1, 1.0)
    assert queue.pop() == first


def test_what_was_used_often_long_ago_goes_in_the_end():
    """The floor rises with each that goes, and with it the value of what comes."""
    for policy in ("lfu", "cost"):
        queue = EvictionQueue(policy)
        queue.push("old", None, 5, 1.0)
        gone = []
        for number in range(20):
            queue.push(number, None, 1, 1.0)
            gone.append(queue.pop())
        assert "old" in gone and gone[0] != "old"


def test_what_is_dearer_to_compute_stays_longer():
    queue = EvictionQueue("cost")
    queue.push("deep", None, 1, 2.0)
    queue.push("shallow", None, 1, 1.0)
    assert queue.pop() == "shallow"


class Naive:
    """The queue by its definition: of all that nothing continues, the least value goes first."""

    def __init__(self, policy: str) -> None:
        self.value, self.floor, self.tick = POLICIES[policy], 0.0, 0
        self.entries: dict[int, tuple[float, int, int]] = {}

    def push(self, key: int, parent: int, uses: int, cost: float) -> None:
        self.tick += 1
        self.entries[key] = self.value(self.floor, self.tick, uses, cost), self.tick, parent

    def pop(self) -> int:
        parents = {parent for _, _, parent in self.entries.values()}
        key = min(self.entries.keys() - parents, key=lambda key: self.entries[key][:2])
        self.floor = max(self.floor, self.entries.pop(key)[0])
        return key


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "remove"]),
            st.integers(1, 30),
            st.integers(1, 5),
            st.sampled_from([1.0, 1.5, 3.0]),
        ),
        max_size=120,
    ),
)
@settings(max_examples=EXAMPLES)
def test_the_queue_is_what_it_is_defined_to_be(policy, chosen):
    """Key k continues key k // 2."""
    queue, naive = EvictionQueue(policy), Naive(policy)
    for operation, key, uses, cost in chosen:
        if operation == "push" and key not in naive.entries:
            queue.push(key, key // 2, uses, cost)
            naive.push(key, key // 2, uses, cost)
        elif operation == "pop" and naive.entries:
            assert queue.pop() == naive.pop()
        elif operation == "remove" and key in naive.entries:
            queue.remove(key)
            del naive.entries[key]
        queue.check_integrity(naive.entries)
        assert len(queue) == len(naive.entries)


# ── what is told of it ──────────────────────────────────────────────────────────────────────────


def test_saved_seconds_and_the_price_of_cached_input():
    """1 ms a prompt token is predicted: 400 found are 0.4 s, at a tenth of the price of others."""
    clock = VirtualClock()
    told = telemetry(clock, price_per_hour=3600.0, cached_price=0.1)
    told.on_step(step(0, num_tokens=500, num_decode_tokens=20, execute_s=0.5, **NO_TIME))
    found = {"num_queried_tokens": 800, "num_cached_tokens": 400, "alone_s_per_token": 1e-3}
    told.on_step(step(1, num_tokens=1, **found))
    clock.advance(1.0)
    shown = take_snapshot(told)
    assert shown.totals.cached_tokens == 400
    assert shown.totals.cache_saved_s == pytest.approx(0.4)
    window = shown.windows[0]
    assert (window.cache_hit_rate, window.cache_saved_s) == (0.5, pytest.approx(0.4))
    assert b"prefix_cache_saved_seconds_total" in told.render()
    cost = window.cost
    assert cost.usd_per_million_cached == pytest.approx(0.1 * cost.usd_per_million_input)
    spent = cost.usd_per_million_input * 480 + cost.usd_per_million_cached * 400
    assert spent / 1e6 < cost.usd
