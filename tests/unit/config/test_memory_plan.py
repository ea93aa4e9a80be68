"""Memory of several KV groups: windows, shares of each group, rounding, blocks in host memory."""

import dataclasses

import pytest

from headway.config.memory_plan import share_blocks
from headway.config.options import Bytes
from headway.core.errors import CapacityError, UsageError
from headway.spec import spec_from_config
from headway.spec.quantization import planned_bytes
from resolve_cases import GIB, QWEN, WEIGHTS, decide, machine, model

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
}


def test_window_layers_leave_their_memory_to_the_full_ones():
    """Gemma 3 1B: 22 layers see 512 tokens, 4 see all."""
    gemma = spec_from_config(GEMMA, {})
    assert [(len(g.layers), g.window) for g in gemma.kv_groups] == [(22, 512), (4, 0)]
    settings, why = decide(spec=gemma, kv_memory=Bytes(3 * GIB))
    window_block, full_block = (16 * g.bytes_per_token("bfloat16") for g in gemma.kv_groups)
    window, full = settings.cache.num_blocks
    assert settings.cache.windows == (512, 0)
    assert window - 1 == 64 * (512 // 16 + 1) + 512 // 16  # 64 windows and one step's chunks
    assert 3 * GIB - full_block < window * window_block + full * full_block <= 3 * GIB
    alike = 3 * GIB // (window_block + full_block)
    assert full > 3 * alike
    assert "22 layers of a window of 512 tokens" in why["kv_blocks_0"]
    assert "4 layers of full attention" in why["kv_blocks_1"]


def test_groups_share_alike_while_memory_is_short():
    """Memory for 800 tokens in all layers: as many blocks for each group, and that context."""
    gemma = spec_from_config(GEMMA, {})
    per_block = 16 * gemma.kv_bytes_per_token()
    settings, _ = decide(spec=gemma, kv_memory=Bytes(51 * per_block))
    assert settings.cache.num_blocks == (51, 51)
    assert settings.max_model_len == 800
    with pytest.raises(CapacityError, match="One context of 4096 tokens"):
        decide(spec=gemma, kv_memory=Bytes(51 * per_block), max_model_len=4096)


def test_a_model_of_windows_alone_has_no_longest_context():
    """Mistral 7B v0.1 sees 4,096 tokens: blocks for one window and one chunk serve 32,768."""
    config = {**QWEN, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    mistral = spec_from_config(config, {})
    block = 16 * mistral.kv_bytes_per_token()
    one = (4096 + 512) // 16 + 1
    settings, _ = decide(spec=mistral, kv_memory=Bytes((one + 1) * block))
    assert (settings.cache.num_blocks, settings.max_model_len) == ((one + 1,), 32768)
    settings, _ = decide(spec=mistral, kv_memory=Bytes(one * block))
    assert settings.max_model_len == (one - 1) * 16


@pytest.mark.parametrize(
    ("useful", "block_bytes", "expected"),
    [
        ([1000, 1000], [10, 30], [24, 24]),
        ([1000, 8], [10, 30], [72, 8]),
        ([8, 1000], [10, 30], [8, 29]),
        ([8, 8], [10, 30], [8, 8]),
        ([1000], [10], [99]),
        ([5, 1000, 20], [10, 20, 30], [5, 19, 17]),
        ([1000], [2000], [0]),
    ],
)
def test_share_blocks(useful, block_bytes, expected):
    assert share_blocks(1000, useful, block_bytes) == expected


def test_rounding_wants_room_for_the_largest_matrix():
    """One matrix at a time: int4 fits where the plain weights do not."""
    with pytest.raises(CapacityError, match="to round the largest matrix"):
        decide(machine(745 * 2**20), quantization="int8")
    with pytest.raises(CapacityError, match="weights need"):
        decide(machine(WEIGHTS - 1))
    native = dataclasses.replace(machine(WEIGHTS - 1), native="avx2")
    assert decide(native, quantization="int4")[1]["weights"].startswith("571 MiB")


def test_without_native_kernels_int4_takes_a_byte_each():
    native = dataclasses.replace(machine(), native="avx2")
    packed, _ = decide(native, quantization="int4")
    plain, _ = decide(native, quantization="int4", kernels="torch")
    sizes = [planned_bytes(s.quantization, model(), "bfloat16") for s in (packed, plain)]
    assert (packed.kernels, plain.kernels) == ("native", "torch")
    assert sizes[1] > sizes[0] + WEIGHTS // 10


def test_native_kernels_are_not_a_gpus():
    with pytest.raises(UsageError, match="a CPU's, not cuda's"):
        decide(machine(gpu_free=80 * GIB), kernels="native")


def test_host_memory_holds_blocks_of_each_group_in_proportion():
    """Beside 60 and 40 blocks here, 30 and 20 there are half the bytes."""
    gemma = spec_from_config(GEMMA, {})
    here = decide(spec=gemma, kv_memory=Bytes(GIB))[0]
    settings, why = decide(spec=gemma, kv_memory=Bytes(GIB), kv_host_memory=Bytes(GIB // 2))
    assert settings.cache.num_blocks == here.cache.num_blocks and here.cache.host_blocks == ()
    sizes = [group.bytes_per_token("bfloat16") * 16 for group in gemma.kv_groups]
    assert list(settings.cache.block_bytes) == sizes
    taken = sum(n * size for n, size in zip(settings.cache.host_blocks, sizes, strict=True))
    assert 0.99 * GIB / 2 < taken <= GIB / 2
    for count, host in zip(here.cache.num_blocks, settings.cache.host_blocks, strict=True):
        assert host == pytest.approx(count / 2, rel=0.02)
    assert "512 MiB for preempted requests" in why["host_blocks"]
    assert decide()[1]["host_blocks"] == "0: what is preempted is computed again"


@pytest.mark.parametrize(
    ("host", "words"), [(9 * GIB, "of RAM left"), (1, "does not hold a block")]
)
def test_host_memory_that_cannot_be_is_refused(host, words):
    with pytest.raises(CapacityError, match=words) as caught:
        decide(kv_memory=Bytes(GIB), kv_host_memory=Bytes(host))
    assert "--kv-host-memory" in caught.value.fix
