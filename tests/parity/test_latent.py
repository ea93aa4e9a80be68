"""Latent attention, DeepSeek's experts: what a token keeps, what is refused, FP8 as published."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import DeepseekV3ForCausalLM, PreTrainedModel

from drive import engine_for, finish, greedy
from headway.compress.rows import check_trainable_attention
from headway.core.errors import UnsupportedModelError, UsageError
from headway.core.plan import BlockCopy
from headway.runtime.attention.cache import LatentKVLayer, copy_blocks
from headway.runtime.checkpoint import checkpoint_formats
from headway.spec import read_model_spec, spec_from_config
from headway.spec.formats import INT8
from parity.quantized_folders import FILE, fp8_tensors
from parity.quantized_models import LARGEST_KL, divergence, executor_of, plain_weights
from parity.steps import step
from parity.tiny import LATENT, edit_config, prompts, save, tiny_model
from published import MODELS

pytestmark = pytest.mark.usefixtures("one_thread")

KEPT = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
BLOCK = (16, 16)
ALL_VISITED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 12}
"""So that a rounded input chooses no other expert."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("deepseekv3"), tmp_path_factory.mktemp("v3"))


def test_a_token_keeps_its_row_and_the_shared_part_of_its_keys(folder: Path):
    """28 numbers a layer, where keys and values of 8 heads would be 8 · (20 + 10)."""
    engine = engine_for(folder, num_blocks=20, block_size=4)
    executor = engine.executor
    (group,) = executor.spec.kv_groups
    assert group.bytes_per_token("float32") == 4 * KEPT * executor.spec.num_layers
    assert executor.target.kv_bytes == 21 * 4 * group.bytes_per_token("float32")
    assert [tuple(part.shape) for part in executor.kv[0].parts] == [(21, 4, 1, KEPT)]
    finish(engine, [greedy(0, prompts([30])[0], 4)])
    assert executor.target.kv_bytes == 21 * 4 * group.bytes_per_token("float32")


def test_published_sizes_are_those_of_the_papers():
    """576 numbers a layer; V2's cache is 4% of what 128 heads of its sizes would keep."""
    config, _, num_bytes = MODELS["DeepSeek-V3"]
    spec = spec_from_config(config, {})
    assert num_bytes == 576 * 61 * 2
    assert round(spec.active_parameters + spec.embedding_parameters, -9) == 38_000_000_000
    gain = 0.1 * torch.tensor(40.0).log().item() + 1
    assert spec.attention_scale == pytest.approx(192**-0.5 * gain**2)
    assert spec.ropes[0].gain == 1.0, "mscale and mscale_all_dim cancel in the angles"
    assert spec.attended_flops == 2 * 128 * (576 + 512)


def test_blocks_of_latent_rows_are_copied_and_wiped_whole():
    k = torch.randn(3, 4, 1, 7)
    layer = LatentKVLayer(k, k[..., :5], 0)
    kept = k[1].clone()
    copy_blocks([layer], [BlockCopy(0, 0, 0, 1, 2)])
    assert torch.equal(layer.v[2], kept[..., :5])
    layer.wipe(torch.tensor([4 * 2 + 1]))
    assert not layer.k[2, 1].any() and not layer.v[2, 1].any()
    assert torch.equal(layer.k[2, 2:], kept[2:])
    found_k, found_v = layer.gather(torch.tensor([[1, 0]]))
    assert torch.equal(found_k, torch.cat([k[1], k[0]])[None])
    assert torch.equal(found_v, found_k[..., :5])


@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 3), (6, 2)], ids=str)
def test_experts_are_chosen_and_weighed_as_transformers_does(
    family: str, groups: tuple[int, int], tmp_path: Path
):
    """Rows alone and together; in V3 the correction chooses and does not weigh."""
    reference = tiny_model(family, n_group=groups[0], topk_group=groups[1])
    executor = engine_for(save(reference, tmp_path)).executor
    for ours, theirs in list(zip(executor.model.layers, reference.model.layers, strict=True))[1:]:
        for num_tokens in (1, 5, 64):
            x_TH = torch.randn(num_tokens, 64)
            with torch.inference_mode():
                assert_close(ours.mlp(x_TH, step()), theirs.mlp(x_TH[None])[0], rtol=0, atol=1e-5)


def as_published(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """FP8 in blocks but for embedding, head, norms and routers, and a layer behind the last.

    The model with those weights.
    """
    save(model, folder)
    state, plain = load_file(folder / FILE), {}
    for name, weight in list(state.items()):
        if weight.dim() == 2 and "embed" not in name and "head" not in name:
            if name.endswith("mlp.gate.weight"):
                continue
            made, plain[name] = fp8_tensors(state.pop(name), BLOCK)
            base = name.removesuffix(".weight")
            state |= {f"{base}.{suffix}": tensor for suffix, tensor in made.items()}
    last = f"model.layers.{model.config.num_hidden_layers}"
    state[f"{last}.eh_proj.weight"] = torch.zeros(64, 128).to(torch.float8_e4m3fn)
    state[f"{last}.eh_proj.weight_scale_inv"] = torch.ones(4, 8)
    state[f"{last}.embed_tokens.weight"] = torch.zeros(211, 64)
    whole = {**load_file(folder / FILE), **plain}
    spelled = folder / "plain"
    save(model, spelled)
    save_file(whole, spelled / FILE)
    save_file(state, folder / FILE)
    edit_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    )
    return DeepseekV3ForCausalLM.from_pretrained(spelled, attn_implementation="eager").eval()


def test_fp8_in_blocks_is_read_and_the_layer_behind_the_last_is_left_out(tmp_path: Path):
    """kv_b_proj is spelled out, for it is multiplied with queries; all else stays in FP8."""
    theirs = as_published(tiny_model("deepseekv3", **ALL_VISITED), tmp_path)
    slow, fast = executor_of(tmp_path, kernels="torch"), executor_of(tmp_path)
    formats = {name: format.kind for name, format in checkpoint_formats(tmp_path, slow.spec)}
    attention = ("q_down", "q_up", "kv_down", "out")
    assert {f"layers.1.attention.{name}" for name in attention} <= formats.keys()
    assert "layers.1.mlp.shared.down" in formats and "layers.1.mlp.gate_up" in formats
    assert set(formats.values()) == {"fp8"}
    assert not any(name.endswith(("kv_up", "router")) for name in formats)
    state = theirs.state_dict()
    found = plain_weights(slow)
    for name in (
        "self_attn.kv_b_proj",
        "self_attn.q_b_proj",
        "self_attn.o_proj",
        "mlp.shared_experts.up_proj",
    ):
        assert_close(found[f"model.layers.1.{name}"], state[f"model.layers.1.{name}.weight"])
    assert divergence(theirs, slow) < LARGEST_KL
    assert divergence(theirs, fast) < LARGEST_KL


def test_int8_at_load_leaves_what_chooses_and_what_is_absorbed(tmp_path: Path):
    reference = tiny_model("deepseekv3", **ALL_VISITED)
    executor = executor_of(save(reference, tmp_path), quantization="int8")
    layer = executor.model.layers[1]
    assert layer.attention.q_up.weight is None, "packed"
    assert layer.attention.kv_up.weight.dtype == torch.float32
    assert executor.settings.quantization.format_of("layers.1.attention.kv_up") != INT8
    assert divergence(reference, executor) < LARGEST_KL


def test_swapped_to_host_memory_and_back(folder: Path):
    """Preempted sequences' rows are copied out and in; the tokens are those of much room."""
    asked = [greedy(i, prompt, 40) for i, prompt in enumerate(prompts([60, 70, 80, 90]))]
    expected = finish(engine_for(folder, block_size=4), asked)
    engine = engine_for(
        folder, num_blocks=60, block_size=4, kv_host_memory=2**22, max_num_batched_tokens=32
    )
    found = finish(engine, asked)
    assert engine.scheduler.num_preemptions > 0
    assert {k: a.token_ids for k, a in found.items()} == {
        k: a.token_ids for k, a in expected.items()
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_backend": "native"}, "latent attention, which it does not read"),
        ({"kv_cache_dtype": "int8"}, "the latent rows of DeepseekV3ForCausalLM are not rounded"),
        ({"kv_cache_dtype": "int4"}, "the latent rows of DeepseekV3ForCausalLM are not rounded"),
    ],
    ids=str,
)
def test_what_does_not_read_latent_rows_is_refused(options: dict, said: str, folder: Path):
    with pytest.raises(UsageError, match=said):
        engine_for(folder, **options)


def test_quantizing_the_family_is_refused(folder: Path):
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        check_trainable_attention(read_model_spec(folder))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func softmax"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method greedy"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group, topk_group must be groups of 256 experts"),
        ("DeepSeek-V3", {"num_experts_per_tok": 129}, "at most 128"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads must be"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method noaux_tc"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("DeepSeek-V2", {"first_k_dense_replace": 61}, "first_k_dense_replace must be"),
        ("DeepSeek-V2", {"kv_lora_rank": 0}, "kv_lora_rank must be"),
    ],
)
def test_other_ways_of_routing_are_refused_by_name(name: str, change: dict, said: str):
    config = json.loads(json.dumps(MODELS[name][0])) | change
    with pytest.raises(Exception, match=said):
        spec_from_config(config, {})
