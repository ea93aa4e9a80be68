"""Tiny random checkpoints, written by transformers, with every number of a family at work.

Norms are not one, biases not zero, soft caps small enough to bend what they cap, multipliers not
one, windows far shorter than the prompts: an engine that forgets one of them gives other logits.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeHybridForCausalLM,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
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
TWO_LAYERS = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
"""Of the tests whose blocks are copied, restored or handed over: heads of 32, room for a talk."""
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": 28,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-3,
}
DELTA_NETS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "initializer_range": 0.12,  # else transformers' own two ways differ by 1e-4
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "mistral": (MistralForCausalLM, {"sliding_window": 17}),
    "mixtral": (
        MixtralForCausalLM,
        {
            "intermediate_size": 48,  # as for gpt-oss
            "num_local_experts": 5,
            "sliding_window": 17,
        },
    ),
    "ministral3": (
        Ministral3ForCausalLM,
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen2moe": (
        Qwen2MoeForCausalLM,
        {
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
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
    "gemma3n": (
        Gemma3nForCausalLM,
        {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 17,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.8, 0.0],
            "final_logit_softcapping": 6.0,
            "vocab_size_per_layer_input": 190,
            "hidden_size_per_layer_input": 12,
            "laurel_rank": 10,
            "altup_num_inputs": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (Phi3ForCausalLM, {}),
    "olmo2": (Olmo2ForCausalLM, {}),
    "olmo3": (
        Olmo3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 80,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
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
    "deepseekv2": (DeepseekV2ForCausalLM, {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseekv3": (DeepseekV3ForCausalLM, {**LATENT, "topk_method": "noaux_tc"}),
    "granitehybrid": (
        GraniteMoeHybridForCausalLM,
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "intermediate_size": 24,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 16,
            "mamba_proj_bias": True,
            "time_step_limit": (0.05, 3.0),
        },
    ),
    "qwen3next": (
        Qwen3NextForCausalLM,
        {
            **DELTA_NETS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "qwen35": (Qwen3_5ForCausalLM, DELTA_NETS),
    "qwen35moe": (
        Qwen3_5MoeForCausalLM,
        {
            **DELTA_NETS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
            **{"conv_bias": True, "block_multiple_of": 20, "block_ffn_dim_multiplier": 1.3},
        },
    ),
    "lfm2moe": (
        Lfm2MoeForCausalLM,
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"num_dense_layers": 1, "routed_scaling_factor": 1.7},
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
}
"""Family → transformers' class, and what its config has beyond `SIZES`."""
TIED = ("Gemma", "SmolLM3", "Lfm2")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


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
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):  # they start as zeros, norms as ones
            parameter.data += 0.2 * torch.randn_like(parameter)
    for buffer in corrections(model):
        buffer += 0.2 * torch.randn_like(buffer)
    return model.to(dtype)


def corrections(model: PreTrainedModel) -> list[torch.Tensor]:
    """What is added to scores where experts are chosen; transformers has them as buffers."""
    named = model.named_buffers()
    return [buffer for name, buffer in named if name.endswith(CORRECTIONS)]


def num_elements(model: PreTrainedModel) -> int:
    """The numbers of a model's checkpoint; a tied head is counted once."""
    return sum(each.numel() for each in (*model.parameters(), *corrections(model)))


def save(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """Write `model` to `folder` as transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    removed = {key for key, value in changes.items() if value is None}
    path.write_text(json.dumps({key: v for key, v in config.items() if key not in removed}))


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
