"""The text model of a checkpoint that has parts for images and sound beside it."""

from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.values import mapping, wrong

WRAPPERS = {
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}
"""Architecture of the whole → `model_type` of its text model → that model's architecture."""
OUTER_KEYS = (
    *("quantization_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings"),
)
"""Keys of the whole that count where its `text_config` does not have them."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model that the named architecture wraps; others as they are."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    kinds = WRAPPERS.get(name) if isinstance(name, str) else None
    if kinds is None or "text_config" not in config:
        return config
    inner = mapping(config, "text_config")
    kind = inner.get("model_type") or next(iter(kinds))
    if not isinstance(kind, str):
        raise wrong("model_type", "a text", kind)
    if kind not in kinds:
        raise UnsupportedModelError(
            f"A {name} with a text model of the type {kind[:40]} is not supported.",
            f"Supported are: {', '.join(kinds)}.",
        )
    outer = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
    return outer | inner | {"architectures": [kinds[kind]]}
