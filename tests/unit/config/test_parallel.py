"""How a model is cut over ranks, and which cuts are refused by name."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.options import HALVES, EngineOptions
from headway.config.parallel import (
    KEEPS_ORDER,
    Parallel,
    bounds,
    check_cut,
    check_stages,
    cut_of,
    held_by_all,
    own_part,
)
from headway.config.resolve import Settings, resolve
from headway.core.errors import UsageError
from headway.spec import ExpertsSpec, ModelSpec
from headway.spec.formats import Format
from headway.spec.state import StateSpec
from resolve_cases import machine, model

EXPERTS = ExpertsSpec(count=4, active=2, intermediate_size=64, normalize=True)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 16, 32, 64]))
def test_ranks_have_the_parts_that_one_has(size: int, each: int, groups: int, unit: int):
    inputs, parts = size * each * groups * unit, size * each
    whole = bounds(inputs, parts, unit)
    assert [whole[0], whole[-1]] == [0, inputs] and all(a < b for a, b in pairwise(whole))
    found = [0]
    for rank in range(size):
        own = own_part(inputs, Parallel(size=size, sum_parts=parts), rank, unit)
        assert own[0] == found[-1]
        found += own[1:]
    assert found == whole


def sized(**more: int) -> ModelSpec:
    sizes = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 8960}
    return replace(model(), **sizes | more)


def settled(spec: ModelSpec, **options: object) -> Settings:
    return resolve(EngineOptions(**options), machine(), spec)[0]


def test_threads_are_shared_and_the_part_is_smaller():
    settings = settled(sized(), tensor_parallel_size=2, threads=8, sum_parts=4)
    assert (settings.threads, settings.parallel.num_parts) == (4, 4)
    part = cut_of(sized(), Parallel(size=2), 0, 1).part_of(sized())
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (6, 1, 4480)
    assert settled(sized(), threads=8).threads == 8


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (12, 2, 4, [(3, 1)] * 4),
        (14, 2, 4, [(3, 1), (4, 1), (3, 1), (4, 1)]),
        (3, 1, 2, [(1, 1), (2, 1)]),
        (3, 3, 2, [(1, 1), (2, 2)]),
        (8, 4, 8, [(1, 1)] * 8),
    ],
)
def test_heads_are_whole_and_kv_heads_are_copied(
    heads: int, kv_heads: int, size: int, expected: list[tuple[int, int]]
):
    spec, parallel = sized(num_heads=heads, num_kv_heads=kv_heads), Parallel(size=size)
    check_cut(spec, parallel, 64)
    parts = [cut_of(spec, parallel, rank, 64).part_of(spec) for rank in range(size)]
    assert [(part.num_heads, part.num_kv_heads) for part in parts] == expected
    assert sum(part.intermediate_size for part in parts) == spec.intermediate_size
    copies = sum(count for _, count in expected)
    assert held_by_all(spec, parallel, 64).num_kv_heads == copies
    blocks = {"kv_memory": 2**28, "max_model_len": 128, "max_num_seqs": 256, "kernels": "torch"}
    one, many = settled(spec, **blocks), settled(spec, tensor_parallel_size=size, **blocks)
    (each,) = {size // copies for size in many.cache.block_bytes}
    assert {each * kv_heads} == set(one.cache.block_bytes)
    assert many.cache.num_blocks <= one.cache.num_blocks


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            sized(num_kv_heads=4),
            {"tensor_parallel_size": 3},
            ["query heads 0 to 3 of 12", "rank 0", "the 3 that read one KV head", "2 or 4"],
        ),
        (sized(num_heads=3, num_kv_heads=3), {"tensor_parallel_size": 5}, ["3 query", "2 or 3"]),
        (sized(num_heads=1, num_kv_heads=1), {"tensor_parallel_size": 2}, ["1 query", "No number"]),
        (sized(), {"tensor_parallel_size": 2, "sum_parts": 3}, ["--sum-parts 3", "multiple"]),
        (
            sized(intermediate_size=96),
            {"tensor_parallel_size": 2, "quantization": "int4", "kernels": "torch"},
            ["96 inputs behind the neurons", "groups of 64", "int8"],
        ),
        (
            sized(),
            {"tensor_parallel_size": 2, "speculative_method": "ngram"},
            ["--speculative-method", "--replicas"],
        ),
        (sized(), {"tensor_parallel_size": 2, "kv_disk": "1GB"}, ["--kv-disk"]),
        (sized(), {"pipeline_parallel_size": 2, "kv_disk": "1GB"}, ["--pipe", "--kv-disk"]),
        (sized(), {"pipeline_parallel_size": 64}, ["--pipeline-parallel-size 64", "layers"]),
        (
            sized(),
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 2, "kv_disk": "1GB"},
            ["--tensor-parallel-size 2", "--kv-disk"],
        ),
        (sized(), {"tensor_parallel_size": 2, "kv_read": "25%"}, ["--kv-read"]),
        (
            sized(),
            {
                **{"tensor_parallel_size": 2, "kv_keep": "25%", "speculative_method": "off"},
                "attention_backend": "reference",
            },
            ["--kv-keep"],
        ),
        (sized(), {"tensor_parallel_size": 2, "kv_host_memory": 2**20}, ["--kv-host-memory"]),
    ],
)
def test_what_cannot_be_cut_is_refused(
    spec: ModelSpec, options: dict[str, object], words: list[str]
):
    with pytest.raises(UsageError) as refused:
        settled(spec, **options)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            {"experts": replace(EXPERTS, shared=1)},
            "experts that every token visits",
        ),
        ({"qk_norm": "row"}, "norms over all heads"),
        ({"experts": replace(EXPERTS, count=1)}, "1 experts are fewer than 2 ranks"),
        (
            {"formats": (("layers.0.mlp.down", Format("int4", 32, permuted=True)),)},
            "stand in another order",
        ),
    ],
)
def test_families_that_are_not_cut_are_named(change: dict[str, object], word: str):
    spec = replace(sized(), **change)
    check_cut(spec, Parallel(), 1)
    with pytest.raises(UsageError, match=word):
        check_cut(spec, Parallel(size=2), 1)


def test_stages_with_a_step_each_share_the_threads():
    settings = settled(sized(), pipeline_parallel_size=2, threads=8)
    parallel = settings.parallel
    assert (settings.threads, parallel.num_ranks, parallel.transport) == (4, 2, "socket")
    assert not parallel.is_cut and settings.scheduler.overlap == 1


def test_stages_that_work_in_turns_have_all_threads():
    settings = settled(sized(), pipeline_parallel_size=2, threads=8, overlap=0)
    assert (settings.threads, settings.scheduler.overlap) == (8, 0)


def test_ranks_of_a_stage_are_neighbours_and_share_its_threads():
    """As vLLM numbers them, but that the first ranks have the last layers."""
    both = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    of_order = replace(machine(), cpu_flags=frozenset({KEEPS_ORDER}))
    settings, _ = resolve(EngineOptions(threads=8, **both), of_order, sized())
    parallel = settings.parallel
    assert (settings.threads, parallel.num_ranks, parallel.transport) == (2, 4, "shared")
    assert settings.scheduler.overlap == 1
    assert settled(sized(), threads=8, overlap=0, **both).threads == 4
    settings = settled(sized(), threads=2, **both)
    assert (settings.threads, settings.scheduler.overlap) == (1, 0), "fewer threads than ranks"
    assert [parallel.stage_of(rank) for rank in range(4)] == [1, 1, 0, 0]
    assert [parallel.place_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert settled(sized(), **both).parallel.transport == "gloo"


def test_halves_of_layers_are_two_ranks_with_all_threads():
    settings = settled(sized(), pipeline_parallel_size=HALVES, threads=8)
    parallel = settings.parallel
    assert (settings.threads, parallel.num_ranks, parallel.transport) == (8, 2, "socket")
    assert parallel.halves and parallel.stages == 1 and not parallel.is_cut
    refused = {"tensor_parallel_size": "halves", "decode_context_parallel_size": "halves"}
    for other, word in refused.items():
        with pytest.raises(UsageError, match=word):
            settled(sized(), pipeline_parallel_size=HALVES, **{other: 2})


def test_layers_that_read_the_keys_of_others_are_no_pipeline():
    layers = sized().layers
    reads = replace(layers[-1], kv_from=0)
    spec = replace(sized(), layers=(*layers[:-1], reads))
    with pytest.raises(UsageError, match="more between its layers"):
        settled(spec, pipeline_parallel_size=2)
    with pytest.raises(UsageError, match=r"halves: .* more between its layers"):
        settled(spec, pipeline_parallel_size=HALVES)


def test_models_that_keep_a_state_are_on_one_rank():
    states = StateSpec(rule="delta", heads=4, groups=2, key_dim=8, value_dim=8, conv=4)
    spec = replace(sized(), states=states)
    with pytest.raises(UsageError, match="keeps a state of each sequence"):
        check_stages(spec, 2)
    with pytest.raises(UsageError, match="layers that keep a state"):
        check_cut(spec, Parallel(size=2), 1)
