"""Settings from options, machine and model: worked numbers, reasons, and each way not to fit."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import CapacityError, UsageError
from headway.core.machine import Accelerator, Machine
from headway.core.memory_plan import gib, share_blocks
from headway.core.model_spec import spec_from_config
from headway.core.options import Bytes, EngineOptions
from headway.core.quantization import Quantization, planned_bytes
from headway.core.resolve import Settings, resolve

GIB = 2**30
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
WEIGHTS = 2 * 494_032_768
TOKEN = 12_288  # 2 · 24 layers · 2 heads · 64 dims · 2 bytes
BLOCK = 16 * TOKEN


def machine(free=10 * GIB, *, cores=8, gpu_free=None, gpu_total=80 * GIB) -> Machine:
    accelerator = None
    if gpu_free is not None:
        accelerator = Accelerator(name="H200", total_bytes=gpu_total, free_bytes=gpu_free)
    return Machine(
        num_cores=cores,
        total_bytes=64 * GIB,
        free_bytes=free,
        cpu_flags=frozenset({"avx512_bf16"}),
        accelerator=accelerator,
    )


def model(**changes):
    return spec_from_config({**QWEN, **changes}, {})


def decide(on=None, spec=None, **options) -> tuple[Settings, dict[str, str]]:
    """The settings and name → "value: why"."""
    settings, reasons = resolve(EngineOptions(**options), on or machine(), spec or model())
    told = {reason.name: f"{reason.value}: {reason.why}" for reason in reasons}
    assert len(told) == len(reasons), "a setting has two reasons"
    return settings, told


def test_worked_example():
    """Qwen2.5-0.5B with 10 GiB free: 0.92 GiB of weights, 40% of the rest in blocks of 192 KiB."""
    settings, why = decide()
    budget = int((10 * GIB - WEIGHTS) * 0.4)
    assert budget // BLOCK - 1 == 19_834
    assert settings.num_blocks == (19_835,)  # with the null block, all within the budget
    assert settings.num_blocks[0] * BLOCK <= budget
    assert settings == Settings(
        device="cpu",
        dtype="bfloat16",
        load_format="auto",
        attention_backend="sdpa",
        kv_dtype="bfloat16",
        max_model_len=32768,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        block_size=16,
        num_blocks=(19_835,),
        windows=(0,),
        threads=8,
        seed=0,
        prefix_cache="lfu",
        attention_cost=settings.attention_cost,
    )
    assert 1 + 8192 * settings.attention_cost == pytest.approx(2, abs=0.02)
    assert (
        why["attention_cost"]
        == "0.00012: the last token of 32768 takes 4.94 times the first's FLOPs"
    )
    assert why["weights"] == "942 MiB: 494,032,768 parameters of bfloat16"
    assert why["kv_memory"] == ("3.63 GiB: 40% of the 9.08 GiB of RAM left free after the weights")
    assert why["kv_blocks"] == (
        "19834: 3.63 GiB for KV, blocks of 16 tokens of 12 KiB; holds 317,344 tokens"
    )
    assert why["max_model_len"] == "32768: the model's max_position_embeddings"


def test_weights_are_packed_where_the_cpu_does_not_multiply_them():
    """Twice the bytes beside the plain ones, if that leaves half of the memory."""
    plain = dataclasses.replace(machine(), cpu_flags=frozenset({"avx2"}))
    settings, reasons = resolve(EngineOptions(), plain, model())
    why = {reason.name: reason for reason in reasons}
    assert settings.pack_weights
    assert why["weights"].value == gib(3 * WEIGHTS)
    assert why["pack_weights"].why == "fp32 products are the fastest here; 942 MiB if not"

    small = dataclasses.replace(plain, free_bytes=3 * GIB)
    settings, reasons = resolve(EngineOptions(), small, model())
    assert not settings.pack_weights
    assert {r.name: r.value for r in reasons}["weights"] == gib(WEIGHTS)

    settings, _ = resolve(EngineOptions(dtype="float32"), machine(), model())
    assert settings.pack_weights


def test_rounded_weights_are_planned_in_bytes():
    """Qwen2.5-0.5B: embeddings in bf16, the head in int8, and 358 million weights in between."""
    embeddings, head = 151_936 * 896 * 2, 151_936 * (896 + 4)
    planned = {
        (options := Quantization(*given)): planned_bytes(options, model(), "bfloat16")
        for given in [("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128)]
    }
    for quantization, found in planned.items():
        each = {"int8": 1, "int4": 0.5 + 2 / quantization.group}[quantization.format]
        assert found == pytest.approx(embeddings + head + 357.9e6 * each, rel=2e-3)
        settings, why = decide(
            dataclasses.replace(machine(), native="avx2"),
            quantization=quantization.format,
            quantization_group=quantization.group,
        )
        assert settings.quantization == quantization
        assert why["weights"].startswith(gib(found))
        assert "24.9 MiB more on the way" in why["weights"]
        assert not settings.pack_weights


def test_quantization_is_refused_where_it_is_not_there():
    with pytest.raises(UsageError, match="not one of"):
        decide(quantization="int4", quantization_group=48)
    with pytest.raises(UsageError, match="cuda"):
        decide(machine(gpu_free=70 * GIB), quantization="int8")


def test_routers_stay_plain_and_heads_have_eight_bits():
    int4 = Quantization("int4", 64)
    formats = [
        int4.format_of(name) for name in ("layers.0.mlp.router", "head", "layers.3.mlp.down")
    ]
    assert formats == ["none", "int8", "int4"]
    assert Quantization().format_of("head") == "none"


def test_every_setting_has_its_reason():
    """All that is not an option as it stands: a new setting needs a reason or a row here."""
    settings, why = decide()
    own = {"load_format", "block_size", "seed"}
    own |= {"batch_window_s", "late", "long_prefill_s", "lane_share", "aging_tokens"}
    options = own | {"windows", "block_bytes"}  # the model's
    fields = [*dataclasses.fields(settings), *dataclasses.fields(settings.scheduler)]
    names = {field.name for field in fields} - options - {"scheduler"}
    assert names - {"num_blocks"} <= why.keys()
    assert {"kv_blocks", "kv_memory", "weights"} <= why.keys()
    assert all(text.partition(": ")[2] for text in why.values())


def test_same_arguments_same_answer():
    options, on, spec = EngineOptions(), machine(), model()
    before = dataclasses.replace(options)
    assert resolve(options, on, spec) == resolve(options, on, spec)
    assert options == before


def test_given_values_are_taken_as_given():
    settings, why = decide(
        **{"max_model_len": 1000, "max_num_seqs": 3, "max_num_batched_tokens": 77, "threads": 2},
        **{"dtype": "float32", "device": "cpu", "seed": 9, "block_size": 32},
        attention_backend="reference",
    )
    assert (settings.max_model_len, settings.max_num_seqs) == (1000, 3)
    assert (settings.max_num_batched_tokens, settings.threads) == (77, 2)
    assert (settings.dtype, settings.attention_backend) == ("float32", "reference")
    assert (settings.seed, settings.block_size) == (9, 32)
    for name in (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"),
        *("dtype", "device", "attention_backend"),
    ):
        assert why[name].endswith(": given"), name


def test_attention_is_native_where_the_kernels_are():
    """auto follows the kernels; asking for what cannot be is an error with the fix."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    settings, _ = resolve(EngineOptions(), native, model())
    assert (settings.attention_backend, settings.kv_dtype) == ("native", "bfloat16")
    settings, _ = resolve(EngineOptions(kernels="torch"), native, model())
    assert settings.attention_backend == "sdpa"
    settings, _ = resolve(EngineOptions(), machine(), model())
    assert settings.attention_backend == "sdpa"
    with pytest.raises(UsageError, match="attention-backend") as refused:
        resolve(EngineOptions(attention_backend="native"), machine(), model())
    assert "--attention-backend auto" in str(refused.value.fix)


def test_int8_kv_holds_more_tokens():
    """24 layers of 2 heads: K and V of 64 + 4 bytes each, 6,528 bytes a token instead of 12,288."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    options = EngineOptions(kv_cache_dtype="int8", kv_memory=Bytes(GIB))
    settings, _ = resolve(options, native, model())
    assert settings.kv_dtype == "int8"
    assert settings.num_blocks == (GIB // (16 * 6528),)
    with pytest.raises(UsageError, match="kv-cache-dtype") as refused:
        resolve(dataclasses.replace(options, attention_backend="sdpa"), native, model())
    assert "--attention-backend native" in str(refused.value.fix)


def test_no_more_blocks_than_all_contexts_need():
    """3 sequences of 1,000 tokens need 3 · 63 blocks, however much memory there is."""
    settings, why = decide(max_model_len=1000, max_num_seqs=3)
    assert settings.num_blocks == (3 * 63 + 1,)
    assert "enough for 3 full contexts" in why["kv_blocks"]


def test_shares_and_absolute_numbers():
    free = 10 * GIB - WEIGHTS
    assert decide(kv_memory=Bytes(GIB))[0].num_blocks == (GIB // BLOCK,)
    assert decide(kv_memory=Bytes(-10))[0].num_blocks == (int(free * 0.1) // BLOCK,)
    assert "10% of" in decide(kv_memory=Bytes(-10))[1]["kv_memory"]
    assert decide(kv_memory=Bytes(GIB))[1]["kv_memory"] == "1.00 GiB: given"


def test_budget_holds_the_null_block_too():
    """Eleven blocks of memory are ten to give out."""
    settings, why = decide(kv_memory=Bytes(11 * BLOCK))
    assert settings.num_blocks == (11,)
    assert settings.max_model_len == 160
    assert why["max_model_len"] == "160: what the KV blocks hold; the model allows 32768"


def test_huge_context_of_the_model_is_cut_to_the_memory():
    """Ten million positions and 1 GiB: what the blocks hold, and the reason says so."""
    settings, why = decide(spec=model(max_position_embeddings=10_000_000), kv_memory=Bytes(GIB))
    assert settings.max_model_len == (GIB // BLOCK - 1) * 16 == 87_360
    assert "the model allows 10000000" in why["max_model_len"]


def test_batched_tokens_cover_every_sequence():
    assert decide(max_num_seqs=2000)[0].max_num_batched_tokens == 2000
    with pytest.raises(UsageError, match="smaller than max_num_seqs") as caught:
        decide(max_num_seqs=100, max_num_batched_tokens=99)
    assert "a token a step" in caught.value.fix


def test_small_models_get_one_thread():
    small = model(vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=5)
    settings, why = decide(spec=small)
    assert settings.threads == 1
    assert "32.0 MiB" in why["threads"]
    assert decide(spec=small, threads=3)[0].threads == 3


# ── does not fit ────────────────────────────────────────────────────────────────────────────────


def test_weights_do_not_fit():
    with pytest.raises(CapacityError, match=r"weights need 942 MiB; 500 MiB are free") as caught:
        decide(machine(500 * 2**20))
    assert caught.value.exit_code == 3
    with pytest.raises(CapacityError, match="weights need"):
        decide(machine(WEIGHTS))


def test_not_one_block():
    for free in (WEIGHTS + 1, WEIGHTS + 4 * BLOCK):
        with pytest.raises(CapacityError, match="does not hold one block of 192 KiB"):
            decide(machine(free))
    with pytest.raises(CapacityError, match="0 B for KV does not hold one block"):
        decide(kv_memory=Bytes(0))


def test_two_blocks_are_a_start():
    settings, _ = decide(kv_memory=Bytes(2 * BLOCK))
    assert (settings.num_blocks, settings.max_model_len) == ((2,), 16)


def test_context_asked_for_does_not_fit():
    with pytest.raises(CapacityError, match="One context of 20000 tokens needs 234 MiB") as caught:
        decide(max_model_len=20000, kv_memory=Bytes(100 * BLOCK))
    assert caught.value.fix == "Lower --max-model-len to 1584 or raise --kv-memory."
    settings, _ = decide(max_model_len=1584, kv_memory=Bytes(100 * BLOCK))
    assert settings.max_model_len == 1584


def test_context_beyond_the_model():
    with pytest.raises(UsageError, match="beyond what the model was made for") as caught:
        decide(max_model_len=32769)
    assert "32768" in caught.value.fix


def test_more_kv_than_memory():
    with pytest.raises(CapacityError, match=r"--kv-memory 20\.0 GiB is more than the 9\.08 GiB"):
        decide(kv_memory=Bytes(20 * GIB))


# ── a GPU ───────────────────────────────────────────────────────────────────────────────────────


def test_gpu_is_taken_when_there_is_one():
    settings, why = decide(machine(gpu_free=80 * GIB))
    assert (settings.device, why["device"]) == ("cuda", "cuda: H200 is there")
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (256, 4096)
    budget = int(80 * GIB * 0.9) - WEIGHTS - 2 * GIB
    assert settings.num_blocks == (min(budget // BLOCK, 256 * 2048 + 1),)
    assert "90% of the GPU less weights and activations" in why["kv_memory"]


def test_full_gpu_counts_as_what_is_free():
    """Another process holds most of it: the free bytes rule, not the share of the total."""
    settings, _ = decide(machine(gpu_free=8 * GIB))
    assert settings.num_blocks == ((8 * GIB - WEIGHTS - 2 * GIB) // BLOCK,)
    with pytest.raises(CapacityError, match=r"2\.00 GiB are free"):
        decide(machine(gpu_free=2 * GIB))


def test_cpu_beside_a_gpu():
    settings, why = decide(machine(gpu_free=80 * GIB), device="cpu")
    assert (settings.device, why["device"]) == ("cpu", "cpu: given")


def test_gpu_that_is_not_there():
    with pytest.raises(UsageError, match="shows no CUDA device") as caught:
        decide(device="cuda")
    assert "--device cpu" in caught.value.fix


@given(
    free=st.integers(0, 200 * GIB),
    kv_memory=st.none() | st.integers(-100, 100 * GIB).map(Bytes),
    max_model_len=st.none() | st.integers(1, 40_000),
    max_num_seqs=st.none() | st.integers(1, 4096),
    block_size=st.integers(1, 1024),
    max_len=st.integers(1, 2**31 - 1),
    gpu_free=st.none() | st.integers(0, 140 * GIB),
)
def test_what_is_resolved_can_run(free, kv_memory, max_len, gpu_free, block_size, **given_values):
    """Either an error in words, or settings in which one full context fits within the memory."""
    spec = model(max_position_embeddings=max_len)
    on = machine(free, gpu_free=gpu_free, gpu_total=141 * GIB)
    options = {**given_values, "kv_memory": kv_memory, "block_size": block_size}
    try:
        settings, _ = decide(on, spec, **options)
    except (CapacityError, UsageError):
        return
    (num_blocks,) = settings.num_blocks
    memory = free if gpu_free is None else gpu_free
    assert num_blocks >= 2
    assert WEIGHTS + num_blocks * block_size * TOKEN <= memory
    assert 1 <= settings.max_model_len <= min(max_len, (num_blocks - 1) * block_size)
    assert settings.max_num_seqs <= settings.max_num_batched_tokens
    if given_values["max_model_len"]:
        assert settings.max_model_len == given_values["max_model_len"]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (24 * 1024, "24.0 KiB")),
        *((150 * 2**20, "150 MiB"), (int(6.1 * GIB), "6.10 GiB"), (5000 * GIB, "5000 GiB")),
    ],
)
def test_bytes_in_words(count, words):
    assert gib(count) == words


# ── windows ─────────────────────────────────────────────────────────────────────────────────────

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
    window, full = settings.num_blocks
    assert settings.windows == (512, 0)
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
    assert settings.num_blocks == (51, 51)
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
    assert (settings.num_blocks, settings.max_model_len) == ((one + 1,), 32768)
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
    assert settings.num_blocks == here.num_blocks and here.host_blocks == ()
    sizes = [group.bytes_per_token("bfloat16") * 16 for group in gemma.kv_groups]
    assert list(settings.block_bytes) == sizes
    taken = sum(n * size for n, size in zip(settings.host_blocks, sizes, strict=True))
    assert 0.99 * GIB / 2 < taken <= GIB / 2
    for count, host in zip(here.num_blocks, settings.host_blocks, strict=True):
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
