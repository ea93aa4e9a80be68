"""What a step takes beside weights and KV, counted over `meta`: known sizes, and bounds."""

import gc
from dataclasses import replace

import pytest
import torch

from headway.config.memory_plan import CUDA_ACTIVATION_BYTES, CUDA_LIBRARY_BYTES
from headway.config.options import EngineOptions
from headway.config.resolve import Settings, resolve
from headway.runtime.attention.flashinfer import workspace_and_plan_bytes
from headway.runtime.cuda.memory import (
    DeviceMemory,
    LiveBytes,
    count_step_bytes,
    sample_layers,
    step_bytes,
)
from headway.spec import ModelSpec, spec_from_config
from resolve_cases import GIB, machine

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
MIB = 2**20
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def llama(**changes: object) -> ModelSpec:
    return spec_from_config({**LLAMA, **changes}, {})


def on_gpu(spec: ModelSpec, activations: int | None = None, **options: object) -> Settings:
    on = machine(gpu_free=80 * GIB)
    assert on.accelerator is not None
    on = replace(on, accelerator=replace(on.accelerator, has_kernels=True))
    return resolve(EngineOptions(**options), on, spec, activations=activations)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_peak_is_of_what_is_alive_at_once(device: str):
    """Views keep their storage; what nobody refers to is gone; what was there before is not new."""
    weight = torch.empty(1000, 1000, device=device)
    gc.collect()
    with LiveBytes() as alive:
        first = weight @ weight
        part = first[:10].view(-1)
        del first
        assert alive.live == 4_000_000, "a view of it is left"
        second = part + 1
        assert (alive.live, alive.peak) == (4_040_000, 4_040_000)
        del part, second
        weight.add_(1)
        assert alive.live == 0
        third = weight.t().contiguous()
        assert alive.live == 4_000_000
        del third
    assert (alive.live, alive.peak) == (0, 4_040_000)


def test_a_prompt_of_an_8b_model():
    """At the widest place: the residual, gate and up of 28,672, and their product."""
    spec = llama()
    settings = on_gpu(spec, max_num_batched_tokens=4096)
    tokens, element = 4096, 2
    floor = tokens * (4096 + 28_672 + 14_336) * element
    found = count_step_bytes(spec, settings, tokens, 1)
    assert floor <= found <= 2.2 * floor
    assert count_step_bytes(spec, settings, 2 * tokens, 1) == pytest.approx(2 * found, rel=0.05)


def test_more_layers_take_no_more():
    """They follow each other: what one has made is gone when the next begins."""
    few, many = llama(num_hidden_layers=3), llama(num_hidden_layers=40)
    settings = on_gpu(few)
    assert count_step_bytes(few, settings, 512, 1) == count_step_bytes(many, settings, 512, 1)


def test_a_decode_has_its_logits_and_the_parts_of_its_contexts():
    """256 rows of a vocabulary of 128,256 in fp32, beside them in bf16, are edited as a copy."""
    spec = llama()
    settings = on_gpu(spec, max_num_seqs=256, max_model_len=8192)
    found = count_step_bytes(spec, settings, 256, 256)
    logits = 256 * 128_256
    assert 6 * logits <= found <= 12 * logits
    longer = on_gpu(spec, max_num_seqs=256, max_model_len=131_072)
    parts = 256 * 256 * 32 * 130 * 4
    assert parts <= count_step_bytes(spec, longer, 256, 256) <= 1.3 * parts


def test_a_prompt_beside_decodes_has_what_both_have():
    """The parts of 255 contexts beside the residual and the queries of 4,096 tokens."""
    spec = llama()
    settings = on_gpu(spec, max_num_seqs=256, max_model_len=131_072)
    parts, tokens = 255 * 256 * 32 * 130 * 4, 4096 * (2 * 4096 + 6144) * 2
    found = count_step_bytes(spec, settings, 4096, 256)
    assert parts + tokens <= found <= 1.3 * (parts + tokens)
    assert found > max(
        count_step_bytes(spec, settings, 4096, 1), count_step_bytes(spec, settings, 256, 256)
    )


def test_what_flashinfer_keeps_is_counted():
    """1,024 parts of 2,048 tokens are 66,048 bytes each: 96 MiB are held, and four plans of 8."""
    spec = llama()
    room = {"max_num_seqs": 256, "max_model_len": 8192}
    on = machine(gpu_free=80 * GIB)
    assert on.accelerator is not None
    on = replace(on, accelerator=replace(on.accelerator, has_flashinfer=True))
    settings = resolve(EngineOptions(attention_backend="flashinfer", **room), on, spec)[0]
    assert workspace_and_plan_bytes(spec, settings) == (96 + 32) * 2**20
    ours = on_gpu(spec, graphs=False, **room)
    ours_found = step_bytes(spec, ours)
    found = step_bytes(spec, replace(ours, attention_backend="flashinfer"))
    assert found is not None and ours_found is not None
    assert 0 < found - workspace_and_plan_bytes(spec, settings) <= ours_found


def test_the_plan_keeps_what_was_counted():
    """More tokens a step leave less for KV; what cannot be counted keeps the estimate."""
    spec = llama()
    first = on_gpu(spec)
    small, large = (step_bytes(spec, on_gpu(spec, max_num_batched_tokens=n)) for n in (1024, 16384))
    assert small is not None and large is not None and small < large
    planned = on_gpu(spec, small)
    assert planned.step_bytes == small + CUDA_LIBRARY_BYTES
    assert first.step_bytes == CUDA_ACTIVATION_BYTES
    more, less = (
        on_gpu(spec, count, max_model_len=4096).cache.num_blocks for count in (small, large)
    )
    assert more[0] > less[0]


def test_graphs_have_a_pool_of_their_own():
    spec = llama()
    settings = on_gpu(spec)
    assert settings.graphs
    without = step_bytes(spec, replace(settings, graphs=False))
    found = step_bytes(spec, settings)
    assert found is not None and without is not None
    assert found - without == count_step_bytes(
        spec, settings, settings.max_num_seqs, settings.max_num_seqs
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Gemma2ForCausalLM"], "head_dim": 128, "sliding_window": 4096},
        {"architectures": ["Gemma3ForCausalLM"], "head_dim": 128, "sliding_window": 1024},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
        {"architectures": ["Olmo2ForCausalLM"]},
    ],
    ids=lambda changes: changes["architectures"][0],
)
def test_families_are_counted(changes: dict):
    spec = llama(**changes, hidden_activation="gelu_pytorch_tanh")
    found = step_bytes(spec, on_gpu(spec))
    assert found is not None and 100 * MIB < found < 20 * GIB


def mixture(**changes: object) -> ModelSpec:
    shape: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return llama(**{**shape, **changes})


def test_a_mixture_is_counted():
    """Its visits are rows: two of four times the tokens, gate and up of each; not with torch's own
    kernels, which ask who was chosen."""
    spec = mixture()
    settings = on_gpu(spec, max_num_batched_tokens=4096)
    tokens, element = 4096, 2
    visits = 2 * tokens * (4096 + 2 * 512 + 512) * element
    found = count_step_bytes(spec, settings, tokens, 1)
    assert visits <= found <= 6 * visits
    assert step_bytes(spec, settings) is not None and settings.graphs
    alone = replace(settings, kernels="torch")
    assert step_bytes(spec, alone) is None
    wide = mixture(num_experts_per_tok=8)
    assert count_step_bytes(wide, on_gpu(wide), 512, 1) > 1.8 * count_step_bytes(
        spec, on_gpu(spec), 512, 1
    )


def test_latent_rows_are_counted():
    """DeepSeek-V3's attention: queries of 128 heads over rows of 576 are the widest; the first
    layers are dense, and a sparse one is counted with them."""
    spec = spec_from_config(DEEPSEEK, {})
    settings = on_gpu(spec, max_num_batched_tokens=1024)
    assert (settings.attention_backend, settings.graphs) == ("triton", True)
    assert [layer.sparse for layer in sample_layers(spec).layers] == [False, False, False, True]
    queries = 1024 * 128 * 576 * 2
    found = count_step_bytes(spec, settings, 1024, 1)
    assert 2 * queries <= found <= 8 * queries
    assert step_bytes(spec, settings) is not None
    assert step_bytes(spec, replace(settings, attention_backend="sdpa")) is None


def test_what_steps_took_is_told_beside_the_plan():
    """Torch's counters of a GPU: what is held from the start is no step's."""

    class Counters(DeviceMemory):
        allocated, most = 5000, 5000

        def _allocated(self) -> int:
            return self.allocated

        def _max_allocated(self) -> int:
            return self.most

    memory = Counters("cuda")
    assert memory.peak == 0
    Counters.most = 5300
    assert memory.peak == 300
