"""Settings from options, machine and model: worked numbers, reasons, and each way not to fit."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.cache_config import CacheConfig
from headway.config.memory_plan import gib
from headway.config.options import Bytes, EngineOptions
from headway.config.resolve import Settings, resolve
from headway.core.errors import CapacityError, UsageError
from headway.spec.formats import INT8, PLAIN, ROTATED_INT8, Format
from headway.spec.quantization import Quantization, bytes_per_weight, planned_bytes
from resolve_cases import BLOCK, GIB, TOKEN, WEIGHTS, decide, gpu, machine, model


def test_worked_example():
    """Qwen2.5-0.5B with 10 GiB free: 0.92 GiB of weights, 40% of the rest in blocks of 192 KiB."""
    settings, why = decide()
    budget = int((10 * GIB - WEIGHTS) * 0.4)
    assert budget // BLOCK - 1 == 19_834
    assert settings.cache.num_blocks == (19_835,)  # with the null block, all within the budget
    assert settings.cache.num_blocks[0] * BLOCK <= budget
    assert settings == Settings(
        device="cpu",
        dtype="bfloat16",
        load_format="auto",
        attention_backend="sdpa",
        max_model_len=32768,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        cache=CacheConfig(
            dtype="bfloat16",
            block_size=16,
            num_blocks=(19_835,),
            windows=(0,),
            sinks=(0,),
            prefix_cache="lfu",
            attention_cost=settings.cache.attention_cost,
            block_bytes=(BLOCK,),
        ),
        threads=8,
        seed=0,
    )
    assert 1 + 8192 * settings.cache.attention_cost == pytest.approx(2, abs=0.02)
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
    assert why["pack_weights"].why == "fp32 GEMMs are the fastest here; 942 MiB if not"

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
        (options := Quantization.of(*given)): planned_bytes(options, model(), "bfloat16")
        for given in [("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128)]
    }
    for quantization, found in planned.items():
        kind, group = quantization.main.kind, quantization.main.group
        each = {"int8": 1, "int4": 0.5 + 2 / (group or 1)}[kind]
        assert found == pytest.approx(embeddings + head + 357.9e6 * each, rel=2e-3)
        settings, why = decide(
            dataclasses.replace(machine(), native="avx2"),
            quantization=kind,
            quantization_group=group or 64,
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
    int4 = Quantization.of("int4", 64)
    formats = [
        int4.format_of(name) for name in ("layers.0.mlp.router", "head", "layers.3.mlp.down")
    ]
    assert formats == [PLAIN, ROTATED_INT8, Format("int4", 64)]
    assert Quantization().format_of("head") == PLAIN


def test_a_head_may_have_four_bits_beside_int4_layers():
    """Qwen2.5-0.5B's: 136 MB in int8, 72 in int4 by 64."""
    native = dataclasses.replace(machine(), native="avx2")
    found = [
        decide(native, quantization="int4", quantization_head=head)[0].quantization
        for head in ("int8", "int4")
    ]
    assert [one.format_of("head") for one in found] == [ROTATED_INT8, Format("int4", 64)]
    eight, four = (planned_bytes(one, model(), "bfloat16") for one in found)
    assert eight - four == 151_936 * (896 + 4) - 151_936 * 14 * (32 + 2)
    with pytest.raises(UsageError, match="is for --quantization int4"):
        decide(native, quantization="int8", quantization_head="int4")


def test_bytes_are_those_of_each_modules_own_format():
    """One layer's down in int8, another's plain: Qwen2.5-0.5B's has 896 outputs, 4,864 inputs."""
    int4 = Quantization.of("int4", 64)
    kept = (("layers.3.mlp.down", INT8), ("layers.1.mlp.down", PLAIN))
    mixed = Quantization((*kept, *int4.formats))
    more = planned_bytes(mixed, model(), "bfloat16") - planned_bytes(int4, model(), "bfloat16")
    rounded = 896 * 4864 * (0.5 + 2 / 64)
    assert more == 896 * (4864 + 4) - rounded + 896 * 4864 * 2 - rounded
    assert bytes_per_weight(mixed, model(), "bfloat16") > bytes_per_weight(
        int4, model(), "bfloat16"
    )
    assert str(mixed) == str(int4) and mixed.rounded == (INT8, ROTATED_INT8, Format("int4", 64))


def test_every_setting_has_its_reason():
    """All that is not an option as it stands: a new setting needs a reason or a row here."""
    settings, why = decide()
    own = {"load_format", "block_size", "seed"}
    own |= {"batch_window_s", "late", "long_prefill_s", "lane_share", "aging_tokens"}
    options = own | {"windows", "sinks", "block_bytes", "open_blocks"}  # the model's, the format's
    options |= {"narrowed", "bounded", "read", "state_every"}  # kv_layers, kv_read, the model
    options |= {"rope"}  # the model
    options |= {"chooses", "choosing", "keep"}  # kv_keep
    options |= {"disk_folder", "disk_bytes", "disk_write_bytes_s"}  # all three of kv_disk
    nested = [settings, settings.scheduler, settings.cache]
    names = {field.name for one in nested for field in dataclasses.fields(one)} - options
    derived = {"scheduler", "cache", "speculation", "parallel", "num_blocks", "ranks"}
    assert names - derived <= why.keys()
    assert {"kv_dtype", "kv_disk"} <= why.keys()
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
    assert (settings.seed, settings.cache.block_size) == (9, 32)
    for name in (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"),
        *("dtype", "device", "attention_backend"),
    ):
        assert why[name].endswith(": given"), name


def test_attention_is_native_where_the_kernels_are():
    """auto follows the kernels; asking for what cannot be is an error with the fix."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    settings, _ = resolve(EngineOptions(), native, model())
    assert (settings.attention_backend, settings.cache.dtype) == ("native", "bfloat16")
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
    assert settings.cache.dtype == "int8"
    assert settings.cache.num_blocks == (GIB // (16 * 6528),)
    with pytest.raises(UsageError, match="kv-cache-dtype") as refused:
        resolve(dataclasses.replace(options, attention_backend="sdpa"), native, model())
    assert "--attention-backend native" in str(refused.value.fix)


def test_int4_kv_holds_still_more_and_keeps_open_blocks():
    """3,648 bytes a token, blocks of 64; where that is short, an open one for each 1,024 tokens."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    options = EngineOptions(kv_cache_dtype="int4", kv_memory=Bytes(GIB), max_model_len=32768)
    settings, reasons = resolve(options, native, model())
    cache = settings.cache
    assert (cache.dtype, cache.block_size, cache.open_blocks) == ("int4", 64, True)
    rounded, open_blocks = (count - 1 for count in cache.num_blocks)
    assert cache.windows == (0,) and cache.token_blocks == (rounded + 1,)
    assert open_blocks == 64 + 512 // 64  # one a sequence, and a step's chunks
    taken = (rounded + 1) * 64 * 3648 + (open_blocks + 1) * 64 * 12288
    assert GIB - 64 * 3648 < taken <= GIB
    assert rounded * 64 > 1.6 * GIB / 6528
    why = {reason.name: reason.why for reason in reasons}
    assert "3.5625 KiB" in why["kv_blocks_0"] and "not rounded yet" in why["kv_blocks_1"]
    short, _ = resolve(dataclasses.replace(options, kv_memory=Bytes(GIB // 6)), native, model())
    each = 1024 * 3648 + 64 * 12288
    assert short.cache.num_blocks[1] - 1 == GIB // 6 // each + 2


@pytest.mark.parametrize(
    ("more", "cause", "fix"),
    [
        ({"block_size": 16}, "rounded in blocks of 64", "--block-size 64"),
        ({"attention_backend": "sdpa"}, "sdpa attention reads no such KV", "native"),
    ],
)
def test_what_int4_kv_is_not_for_is_refused(more, cause, fix):
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    with pytest.raises(UsageError, match=cause) as refused:
        resolve(EngineOptions(kv_cache_dtype="int4", **more), native, model())
    assert fix in str(refused.value.fix)
    odd = dataclasses.replace(model(), head_dim=80)
    with pytest.raises(UsageError, match="no whole groups of 32"):
        resolve(EngineOptions(kv_cache_dtype="int4"), native, odd)


def test_no_more_blocks_than_all_contexts_need():
    """3 sequences of 1,000 tokens need 3 · 63 blocks, however much memory there is."""
    settings, why = decide(max_model_len=1000, max_num_seqs=3)
    assert settings.cache.num_blocks == (3 * 63 + 1,)
    assert "enough for 3 full contexts" in why["kv_blocks"]


def test_shares_and_absolute_numbers():
    free = 10 * GIB - WEIGHTS
    assert decide(kv_memory=Bytes(GIB))[0].cache.num_blocks == (GIB // BLOCK,)
    assert decide(kv_memory=Bytes(-10))[0].cache.num_blocks == (int(free * 0.1) // BLOCK,)
    assert "10% of" in decide(kv_memory=Bytes(-10))[1]["kv_memory"]
    assert decide(kv_memory=Bytes(GIB))[1]["kv_memory"] == "1.00 GiB: given"


def test_budget_holds_the_null_block_too():
    """Eleven blocks of memory are ten to give out."""
    settings, why = decide(kv_memory=Bytes(11 * BLOCK))
    assert settings.cache.num_blocks == (11,)
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
    assert (settings.cache.num_blocks, settings.max_model_len) == ((2,), 16)


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
    assert settings.cache.num_blocks == (min(budget // BLOCK, 256 * 2048 + 1),)
    assert "90% of the GPU less weights and activations" in why["kv_memory"]


def test_full_gpu_counts_as_what_is_free():
    """Another process holds most of it: the free bytes rule, not the share of the total."""
    settings, _ = decide(machine(gpu_free=8 * GIB))
    assert settings.cache.num_blocks == ((8 * GIB - WEIGHTS - 2 * GIB) // BLOCK,)
    with pytest.raises(CapacityError, match=r"2\.00 GiB are free"):
        decide(machine(gpu_free=2 * GIB))


def test_a_gpu_has_kernels_of_its_own():
    """Attention, formats and KV in int8 follow them; without Triton torch's are left."""
    settings = gpu()
    assert (settings.kernels, settings.attention_backend) == ("cuda", "triton")
    assert gpu(attention_backend="varlen").attention_backend == "varlen"
    assert gpu(kv_cache_dtype="int8").cache.dtype == "int8"
    assert [str(gpu(quantization=q).quantization.main.kind) for q in ("int8", "int4")] == [
        "int8",
        "int4",
    ]
    assert gpu(kernels="torch").attention_backend == "sdpa"
    settings = gpu(has_kernels=False)
    assert (settings.kernels, settings.attention_backend) == ("torch", "sdpa")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"has_kernels": False, "kernels": "cuda"}, "--kernels cuda: why"),
        ({"has_kernels": False, "attention_backend": "triton"}, "our own kernels are not used"),
        ({"has_kernels": False, "quantization": "int4"}, "int4 is not there on cuda"),
        ({"attention_backend": "varlen", "kv_cache_dtype": "int8"}, "reads no such KV"),
        ({"kv_cache_dtype": "int4"}, "int4"),
        ({"device": "cpu", "attention_backend": "varlen"}, "the device is cpu"),
        ({"device": "cpu", "kernels": "cuda"}, "the device is cpu"),
    ],
)
def test_what_a_gpu_does_not_do_is_refused(options, cause):
    with pytest.raises(UsageError, match=cause):
        gpu(**options)


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
    (num_blocks,) = settings.cache.num_blocks
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
