"""A transformers model as the GGUF file that llama.cpp's converter makes of it.

Names are those of the `gguf` package's own table; what its converter does to the numbers is done
here as its source says: rows of q and k moved, 1 added to Gemma's norms, experts stacked.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from transformers import PreTrainedModel

import gguf_file

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen2moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2moe": MODEL_ARCH.LFM2MOE,
    "granite": MODEL_ARCH.GRANITE,
    "smollm3": MODEL_ARCH.SMOLLM3,
}
PERMUTED = ("llama", "mixtral", "ministral3", "granite", "smollm3")


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Halves of a head become neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def metadata_of(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of a config.json of transformers 5."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    said = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads(config),
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config["norm_eps"],
        "rope.dimension_count": head,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.sliding_window": config.get("sliding_window") or 0,
        "expert_count": config.get("num_experts", config.get("num_local_experts", 0)),
        "expert_used_count": config.get("num_experts_per_tok", 0),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size", 0),
        "leading_dense_block_count": config.get("num_dense_layers", 0),
        "expert_gating_func": 2 * (family == "lfm2moe"),
        "shortconv.l_cache": config.get("conv_L_cache", 0),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "expert_feed_forward_length": config.get("moe_intermediate_size", 0),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    if rope["rope_type"] == "linear":
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        said |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        said |= {"rope.scaling.original_context_length": original}
        said |= {"rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim")}
    if "sliding_attention" in ropes:
        said["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if family == "olmo3":
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        said["attention.sliding_window_pattern"] = windowed
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]]
    named = {f"{name}.{key}": value for key, value in said.items() if value}
    return {"general.architecture": name, **named}


def key_heads(config: dict[str, Any]) -> int | list[int]:
    """KV heads, by layer where some layers are convolutions."""
    count = config["num_key_value_heads"]
    if "conv_L_cache" not in config:
        return count
    return [0 if kind == "conv" else count for kind in config["layer_types"]]


def tensors_of(family: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor by its name in the file, in fp32."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = name.split(".")[-2]
        if family in PERMUTED and part in heads:
            weight = permute(weight, heads[part])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        for each, tensor in unstacked(name, weight):
            stacks.setdefault(each, []).append(tensor.float())
    for name, weights in stacks.items():
        base, _, suffix = name.rpartition(".")
        target = names.get_name(base)
        assert target is not None, name
        found[f"{target}.{suffix}"] = weights[0] if len(weights) == 1 else torch.stack(weights)
    return found


def unstacked(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers 5 keeps gate and up of all experts in one tensor; the converter parts them.

    A convolution loses the dimension of its one input; a bias of experts gets its suffix.
    """
    if name.endswith(".conv.conv.weight"):
        return [(name, weight.squeeze(1))]
    if name.endswith(".expert_bias"):
        return [(name + ".bias", weight)]
    base = name.removesuffix(".gate_up_proj")
    if base == name or not base.endswith("experts"):
        return [(name + ".weight" if name.endswith("experts.down_proj") else name, weight)]
    gate, up = weight.chunk(2, dim=1)
    return [(f"{base}.gate_proj.weight", gate), (f"{base}.up_proj.weight", up)]


def kind_for(name: str, weight: torch.Tensor, kind: str) -> str:
    """`kind` for matrices whose rows fill its blocks; routers and vectors stay in F32."""
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    quantized = (
        weight.dim() > 1
        and weight.shape[-1] % block == 0
        and "gate_inp" not in name
        and "shortconv.conv" not in name
    )
    return kind if quantized else "F32"


def write(
    path: Path,
    family: str,
    model: PreTrainedModel,
    kinds: dict[str, str] | str = "F32",
    splits: int = 1,
    **more: Any,
) -> Path:
    """The file, or the first of `splits`, its matrices in a format by the name's ending, or all in
    one; `more` metadata."""
    tensors: gguf_file.Tensors = {}
    for name, weight in tensors_of(family, model).items():
        given = kinds if isinstance(kinds, str) else "F32"
        if not isinstance(kinds, str):
            given = next((kind for end, kind in kinds.items() if end in name), "F32")
        kind = kind_for(name, weight, given)
        data = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
        tensors[name] = (kind, tuple(weight.shape), np.ascontiguousarray(data).tobytes())
    config = json.loads(model.config.to_json_string(use_diff=False))
    metadata = {**metadata_of(family, config), **more}
    if splits > 1:
        return gguf_file.write_split(path, metadata, tensors, splits)[0]
    return gguf_file.write(path, metadata, tensors)
