"""Which rank holds which blocks of a context, and what its pools have to hold."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.options import EngineOptions
from headway.config.resolve import Settings, resolve
from headway.core.errors import CapacityError, UsageError
from headway.spec import ModelSpec
from headway.spec.context_shards import SPLIT_TOKENS, ContextShards, shard_kv_groups
from resolve_cases import machine, model

ROOT = Path(__file__).parents[3]
SIZES = st.sampled_from([8, 16, 64, 256, 512])


def test_splits_are_those_of_native_attention():
    source = (ROOT / "native" / "attention_split.inl").read_text()
    (tokens,) = re.findall(r"split_tokens = (\d+);", source)
    assert int(tokens) == SPLIT_TOKENS


@given(st.integers(1, 5), SIZES, st.integers(0, 400), st.integers(0, 400))
def test_counts_are_those_of_owners(ranks: int, size: int, begin: int, more: int):
    shards = ContextShards(ranks, size)
    owners = [shards.owner(at) for at in range(begin, begin + more)]
    assert shards.counts(begin, begin + more) == [owners.count(rank) for rank in range(ranks)]


@given(st.integers(1, 5), SIZES, st.integers(1, 200))
def test_the_longest_context_is_the_longest(ranks: int, size: int, count: int):
    shards = ContextShards(ranks, size)
    for rank in range(ranks):
        longest = shards.longest(rank, count)
        assert shards.counts(0, longest)[rank] == count < shards.counts(0, longest + 1)[rank]


def settled(spec: ModelSpec | None = None, **options: object) -> Settings:
    spec = spec or model()
    given = {"decode_context_parallel_size": 2, "kv_memory": 2**26}
    native = replace(machine(), native="avx512")
    return resolve(EngineOptions(**given | options), native, spec)[0]


def test_each_rank_has_half_of_the_blocks_and_its_own_threads():
    one = settled(decode_context_parallel_size=1, threads=8)
    two = settled(threads=8)
    assert two.threads == 4 and two.parallel.num_ranks == 2 and two.cache.ranks == 2
    (whole,), (first, second) = one.cache.num_blocks, two.cache.num_blocks
    assert abs(first - second) <= 1 and abs(first + second - whole) <= 2
    assert two.cache.windows == (0, 0)


def test_ranks_that_share_layers_hold_parts_of_contexts():
    """Of a pool each of 2 ranks has its own KV heads, so there are as many blocks as without."""
    two = settled(threads=8)
    four = settled(threads=8, tensor_parallel_size=2)
    parallel = four.parallel
    assert (four.threads, parallel.num_ranks, parallel.num_together) == (2, 4, 4)
    assert four.cache.ranks == 2 and four.cache.num_blocks == two.cache.num_blocks
    assert four.scheduler.overlap == two.scheduler.overlap == 0


def test_stages_hold_parts_of_contexts_each_with_a_thread_of_its_own():
    """Of 2 stages each has 2 ranks; with fewer threads than ranks they take turns."""
    four = settled(threads=8, pipeline_parallel_size=2)
    parallel = four.parallel
    assert (four.threads, parallel.num_ranks, parallel.num_together) == (2, 4, 2)
    assert four.scheduler.overlap == 1 and four.cache == settled(threads=8).cache
    assert [parallel.stage_of(rank) for rank in range(4)] == [1, 1, 0, 0]
    few = settled(threads=2, pipeline_parallel_size=2)
    assert (few.threads, few.scheduler.overlap) == (1, 0)


def test_a_context_ends_where_one_of_the_ranks_is_full():
    """Of a budget of 44 blocks each rank has 21 beside its null block: the first split of 32 does
    not fit, and a context is 336 tokens."""
    size = 16 * model().kv_bytes_per_token("bfloat16")
    settings = settled(kv_memory=44 * size, dtype="bfloat16")
    assert settings.cache.num_blocks == (22, 22) and settings.max_model_len == 21 * 16
    with pytest.raises(CapacityError, match="Lower --max-model-len to 336"):
        settled(kv_memory=44 * size, dtype="bfloat16", max_model_len=400)


def test_one_group_is_dealt():
    (group,) = model().kv_groups
    assert shard_kv_groups((group,), 1) == (group,)
    assert [(one.rank, one.ranks) for one in shard_kv_groups((group,), 3)] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4"),
        ({}, {"attention_backend": "sdpa"}, "--attention-backend sdpa"),
        ({}, {"block_size": 24}, "--block-size 24"),
        ({}, {"speculative_method": "ngram"}, "--speculative-method"),
        ({}, {"kv_host_memory": 2**20}, "--kv-host-memory"),
        ({}, {"kv_disk": "1GB"}, "--kv-disk"),
        ({"window": 64}, {}, "layers with a window"),
        ({"kv_from": 0}, {}, "read the keys and values of others"),
    ],
)
def test_what_cannot_be_dealt_is_refused_by_name(
    change: dict[str, int], options: dict[str, object], words: str
):
    spec = model()
    layers = (*spec.layers[:-1], replace(spec.layers[-1], **change))
    with pytest.raises(UsageError) as refused:
        settled(replace(spec, layers=layers) if change else spec, **options)
    assert words in str(refused.value)
    assert "--decode-context-parallel-size 2" in str(refused.value)
