"""Tiny random checkpoints, written by transformers, with biases and norms that matter."""

import json
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    """A random model of `family` (llama or qwen2) with some of its config changed."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    torch.manual_seed(1234)
    model = model_class(config_class(**{**SIZES, **changes})).eval()
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


def prompts(lengths: list[int], vocabulary: int = SIZES["vocab_size"]) -> list[list[int]]:
    """Random prompts of these lengths, always the same."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
