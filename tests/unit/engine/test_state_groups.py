"""The group of states: one block a sequence, checkpoints, siblings, little memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.cache_config import CacheConfig
from headway.config.kv_states import checkpoint_blocks, plan_states, refuse_unread
from headway.config.options import EngineOptions
from headway.config.reasons import Reasons
from headway.core.errors import CapacityError, UsageError
from headway.core.request import Request, SamplingParams
from headway.engine.kv import KVCache
from headway.engine.kv.listing import list_full
from headway.engine.kv.states import whole_tables
from headway.engine.sequence import Sequence
from headway.spec import ModelSpec, spec_from_config

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}


def hybrid() -> ModelSpec:
    return spec_from_config(QWEN3_NEXT, {})


def sequence(tokens: list[int], sequence_id: int = 0) -> Sequence:
    request = Request(sequence_id, tokens, SamplingParams())
    return Sequence(
        sequence_id, request, 0, num_groups=2, stop_ids=frozenset(), max_len=999, seed=0
    )


def kv_cache(*, states: int = 9, every: int = 2, policy: str = "lfu") -> KVCache:
    """Blocks of 4 for layers that see all, and states with a checkpoint each `every` blocks."""
    config = CacheConfig(
        num_blocks=(99, states),
        block_size=4,
        windows=(0, 2),
        state_every=every,
        prefix_cache=policy,
    )
    return KVCache(config, 64)


def advance(kv: KVCache, one: Sequence, end: int) -> None:
    """Compute the tokens before `end`."""
    assert kv.extend(one, end) is not None
    one.computed = end
    list_full(kv, one)


def test_worked_example():
    """The docstring's: blocks of 4, a checkpoint each 2, a prompt of 18 in chunks of 9."""
    kv, one = kv_cache(), sequence(list(range(18)))
    advance(kv, one, 9)
    nothing, checkpoint, newest = one.block_tables[1]
    assert nothing == 0 and checkpoint != newest and 0 not in (checkpoint, newest)
    advance(kv, one, 18)
    table = one.block_tables[1]
    assert table[:3] == [0, 0, 0] and table[4] == newest and table[3] not in (0, newest)
    kv.check_integrity([one])
    one.tokens += [100, 101, 102, 103]
    advance(kv, one, 22)
    assert one.block_tables[1] == [0, 0, 0, 0, 0, newest]
    other = sequence(list(range(18)), 1)
    hit = kv.match_prefix(other)
    assert (hit.num_tokens, hit.tables[1][:3]) == (16, [0, 0, 0])
    kv.reuse(other, hit)
    advance(kv, other, 18)
    assert other.block_tables[1][-1] not in (0, newest, hit.tables[1][3])
    kv.check_integrity([one, other])
    for each in (one, other):
        kv.release(each)
    assert kv.num_used == 0


def test_without_a_prefix_cache_one_block_is_all():
    kv, one = kv_cache(policy="", states=2), sequence(list(range(64)))
    for end in (5, 8, 9, 40, 64):
        advance(kv, one, end)
        assert kv.pools[1].num_used == 1
        kv.check_integrity([one])


def test_where_no_block_is_free_a_checkpoint_is_left_out():
    kv, one = kv_cache(states=2, every=1), sequence(list(range(40)))
    for end in (13, 16, 17, 40):
        advance(kv, one, end)
        assert kv.pools[1].num_used == 1
        kv.check_integrity([one])


def test_siblings_write_to_blocks_of_their_own():
    """Behind 17 tokens of 18: the last of two takes the shared block along, or a copy of it."""
    for shared in (16, 17):
        kv, one = kv_cache(), sequence(list(range(shared + 1)))
        advance(kv, one, shared)
        child = sequence(list(range(shared + 1)), 1)
        kv.fork(one, child, shared)
        kv.check_integrity([one, child])
        newest = []
        for each in (one, child):
            assert kv.extend(each, shared + 1) is not None
            assert whole_tables(kv.states, each)[1][(shared - 1) // 4] != 0
            each.computed = shared + 1
            newest.append(each.block_tables[1][-1])
        assert len(set(newest)) == 2
        kv.check_integrity([one, child])


def test_prompts_that_part_leave_a_state_there():
    kv = kv_cache(every=9, states=20)
    first, second, third = (sequence(list(range(20)) + [last] * 9, last) for last in (50, 51, 52))
    advance(kv, first, 29)
    assert kv.match_prefix(second).num_tokens == 0 and second.diverges_at == 4
    advance(kv, second, 29)
    assert kv.match_prefix(third).num_tokens == 20


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(3, 12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 3)), max_size=25),
)
def test_any_order_of_chunks_keeps_the_books(every: int, states: int, steps: list):
    """Three prompts with a common beginning advance, are released and begin again."""
    kv = kv_cache(every=every, states=states)
    prompts = [list(range(30)) + [70 + i] * 40 for i in range(3)]
    running: list[Sequence | None] = [None] * 3
    for which, count, action in steps:
        one = running[which]
        if one is None:
            one = sequence(prompts[which], which)
            hit = kv.find_room(one, [0, 0])
            if hit is None:
                continue
            kv.reuse(one, hit)
            running[which] = one
        end = min(one.computed + count, len(one.tokens))
        if action == 3:
            kv.release(one)
            running[which] = None
        elif end > one.computed and kv.extend(one, end) is not None:
            one.computed = end
            list_full(kv, one)
            assert one.block_tables[1][(end - 1) // 4] != 0, "the newest state has no block"
        kv.check_integrity([each for each in running if each is not None])


def test_memory_of_states():
    model = hybrid()
    group = model.kv_groups[-1]
    assert (model.num_parameters, model.slot_bytes) == (79_674_391_296, 79_036_416)
    assert (group.kind, group.bytes_per_token("bfloat16")) == ("state", 0)
    assert checkpoint_blocks(model, "bfloat16", 16) == 201
    options = EngineOptions()
    planned = (options, group, model.kv_bytes_per_token(), 3216)
    assert plan_states(*planned, 2**32, 8, 32768, Reasons()) == 8 + 1 + 22
    with pytest.raises(CapacityError, match="states"):
        plan_states(*planned, 2**28, 8, 32768, Reasons())


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_method": "ngram"},
        {"kv_disk": "1GB"},
        {"kv_layers": "windows.yaml"},
        {"kv_cache_dtype": "int4"},
    ],
    ids=str,
)
def test_what_states_do_not_do_is_refused_by_name(options: dict):
    (name,) = options
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        refuse_unread(EngineOptions(**options), hybrid())
