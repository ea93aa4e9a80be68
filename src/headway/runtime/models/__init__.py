"""Model families: one small file a family, one row an architecture."""

from headway.runtime.models.llama import Llama

MODELS = {
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
}

__all__ = ["MODELS"]
