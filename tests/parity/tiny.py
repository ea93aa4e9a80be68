"""Tiny random checkpoints, written by transformers, with every number of a family at work.

Norms are not one, biases not zero, soft caps small enough to bend what they cap, multipliers not
one, windows far shorter than the prompts: an engine that forgets one of them gives other logits.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 320,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "mistral": (MistralForCausalLM, {"sliding_window": 17}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 24}),
    "qwen3moe": (
        Qwen3MoeForCausalLM,
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 17,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 7,
            "head_dim": 24,
            "sliding_window": 17,
            "query_pre_attn_scalar": 10,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (Phi3ForCausalLM, {}),
    "olmo2": (Olmo2ForCausalLM, {}),
    "granite": (
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
        },
    ),
    "gptoss": (
        GptOssForCausalLM,
        {
            "num_hidden_layers": 3,
            "intermediate_size": 48,  # transformers multiplies rows of whole 16 bytes
            "head_dim": 16,
            "sliding_window": 17,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 80,
                "truncate": False,
            },
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
}
"""Family → transformers' class, and what its config has beyond `SIZES`."""
TIED = ("Gemma", "SmolLM3")


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A random model of `family` with some of its config changed.

    It attends by transformers' eager code, the only one that knows soft caps.
    """
    model_class, its_own = FAMILIES[family]
    config = model_class.config_class(
        **{**SIZES, **its_own, **changes}, attn_implementation="eager"
    )
    torch.manual_seed(1234)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases start as zeros and norms as ones
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype)


def save(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """Write `model` to `folder` as transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


def spell_as_transformers_4(folder: Path) -> None:
    """Rewrite config.json with the old keys, without those that version 4 left out.

    `rope_parameters` becomes `rope_theta` and `rope_scaling`, Gemma 3's second one
    `rope_local_base_freq` and its `layer_types` a period; `dtype` was `torch_dtype`; families that
    tie by default did not say so.
    """
    config = json.loads((folder / "config.json").read_text())
    ropes = config.get("rope_parameters") or {}
    local = ropes.get("sliding_attention", {})
    scaling = dict(ropes.get("full_attention", ropes))
    old = {
        "rope_parameters": None,
        "rope_theta": scaling.pop("rope_theta", None),
        "rope_local_base_freq": local.get("rope_theta"),
        "partial_rotary_factor": scaling.pop("partial_rotary_factor", None),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "layer_types": None,
        "torch_dtype": config["dtype"],
        "dtype": None,
    }
    if scaling.get("rope_type") in ("linear", "dynamic"):
        scaling["type"] = scaling.pop("rope_type")
    if config["tie_word_embeddings"] and config["architectures"][0].startswith(TIED):
        old["tie_word_embeddings"] = None
    edit_config(folder, **old)


def prompts(lengths: list[int], vocabulary: int = SIZES["vocab_size"]) -> list[list[int]]:
    """Random prompts of these lengths, always the same."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
