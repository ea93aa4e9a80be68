"""Models of the literature as configs: their sizes are all that the arithmetic asks for."""

from typing import Any

from headway.spec import ModelSpec, spec_from_config


def llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """A Llama config; as many KV heads as heads unless `more` says fewer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_2_7B = llama(4096, 11008, 32, 32)
LLAMA_2_13B = llama(5120, 13824, 40, 40)
LLAMA_3_8B = llama(4096, 14336, 32, 32, num_key_value_heads=8, vocab_size=128256)
HALF_B = llama(
    896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
)
"""Qwen2.5-0.5B's sizes."""
PALM_MULTI_HEAD = llama(18432, 73728, 118, 48, head_dim=128, vocab_size=256000)
"""PaLM 540B with 48 heads of 128 that each keep keys and values: Pope et al. compare with it."""
SMALL = llama(768, 2048, 12, 12, num_key_value_heads=4, vocab_size=32000)
"""About 130 million parameters: more than caches hold, and seconds to load with random weights."""


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """The dimensions of a config."""
    return spec_from_config(config, {})


def windowed(config: dict[str, Any], window: int) -> ModelSpec:
    """The same with every layer seeing so many tokens: Mistral's config has the field."""
    named = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return spec_of({**config, **named})
