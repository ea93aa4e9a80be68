"""From a folder's `config.json` to a ModelSpec; what we do not read is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.core.errors import ModelError, UnsupportedModelError
from headway.spec import hybrid
from headway.spec.families import FAMILIES, Family, layer_kinds, window_size
from headway.spec.formats import GGUF
from headway.spec.gguf.config import is_quantized
from headway.spec.gguf.header import is_gguf, read_header
from headway.spec.model import DTYPE_BYTES, LayerSpec, ModelSpec
from headway.spec.model_files import read_document
from headway.spec.parts import RopeSpec
from headway.spec.quantization_config import quantization_config, quantization_method
from headway.spec.rope import FULL, QUERY, WINDOW, longest_context, query_rope, ropes_from_config
from headway.spec.values import (
    flag,
    mapping,
    number,
    positive,
    token_ids,
    wrong,
)

WRAPPERS = {
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Architecture of the whole → `model_type` of its text model → that model's architecture."""
OUTER_KEYS = (
    *("quantization_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings"),
)
"""Keys of the whole that count where its `text_config` does not have them."""
MOST_LAYERS = 4096
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""As configs name them → as we do."""


def read_model_spec(model: Path) -> ModelSpec:
    """The dimensions of a model, out of its config.json (end tokens: generation_config.json).

    Raises ModelError when there is no model, UnsupportedModelError for what we do not read.
    """
    config = read_document(model, "config.json")
    if config is None:
        raise no_model_here(model)
    generation = read_document(model, "generation_config.json") or {}
    if not is_gguf(model):
        config = config | {"quantization_config": quantization_config(model, config)}
        return spec_from_config(config, generation)
    try:
        spec = spec_from_config(config, generation)
    except ModelError as error:
        cause = error.cause.replace("config.json", f"{model.name}, in the words of config.json")
        raise type(error)(cause, "Convert the model again, or give its folder.") from error
    return replace(spec, quantization=GGUF if is_quantized(read_header(model)) else "")


def no_model_here(folder: Path) -> ModelError:
    """The error for a folder without a config.json; it tells a GGUF file from an empty folder."""
    if not folder.exists():
        return ModelError(
            f"There is no folder {folder}.", "Give the path of a Hugging Face model folder."
        )
    inside = sorted(path.name for path in folder.glob("*.gguf"))
    if inside:
        return ModelError(
            f"{folder} holds no config.json, and {len(inside)} GGUF files.",
            f"Name the file: {folder / inside[0]}.",
        )
    return ModelError(
        f"{folder} holds no model: there is no config.json.",
        "Give the folder that holds config.json, tokenizer.json and *.safetensors.",
    )


def spec_from_config(config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    """Turn the two parsed files into a ModelSpec; raises ModelError naming the key at fault."""
    config = text_config(config)
    architecture = refuse_unsupported(config)
    family = FAMILIES[architecture]
    config = family.translate(config)
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    head_dim = positive(config, "head_dim", default=family.head_dim or hidden // heads)
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads.",
            "Check num_attention_heads and num_key_value_heads.",
        )
    latent = family.latent(config)
    if latent is not None:
        head_dim, kv_heads = latent.nope_dim + latent.rope_dim, 1
    ropes = ropes_from_config(
        config, family.theta, family.local_theta, family.rope, family.scaled_windows
    )
    if family.query_scaling:
        ropes[QUERY] = query_rope(config, ropes[FULL], family.rope)
    for rope in ropes.values():
        check_rotation(rope, latent.rope_dim if latent else head_dim)
    attention_bias = flag(config, "attention_bias", default=family.attention_bias)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.qkv_bias_key:
        qkv_bias = flag(config, family.qkv_bias_key, default=qkv_bias)
    experts, sparse = family.experts(
        config, positive(config, "num_hidden_layers", most=MOST_LAYERS)
    )
    max_len = longest_context(config, ropes[FULL])
    scales = {"attention_scale": head_dim**-0.5} | family.scales(config)
    layers = read_layers(config, family, ropes, sparse, max_len)
    return ModelSpec(
        architecture=architecture,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(config, "intermediate_size"),
        max_len=max_len,
        rms_norm_eps=number(config, "rms_norm_eps", default=family.norm_eps),
        layers=layers,
        ropes=tuple(dict.fromkeys(ropes.values())),
        tied=flag(config, "tie_word_embeddings", default=family.tied),
        qkv_bias=qkv_bias,
        o_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=flag(config, "mlp_bias"),
        dtype=checkpoint_dtype(config),
        quantization=quantization_method(mapping(config, "quantization_config")),
        experts=experts,
        latent=latent,
        altup=family.altup(config),
        v_norm=family.v_norm,
        states=family.states(config) if any(layer.state for layer in layers) else None,
        output_gate=family.output_gate,
        activation=read_activation(config, family, architecture),  # type: ignore[arg-type]
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        sink_logits=family.sink_logits,
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=eos_ids(config, generation),
        **scales,
    )


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


def check_rotation(rope: RopeSpec, head_dim: int) -> None:
    """Refuse a head of which no pairs are rotated; the dynamic scaling needs two of them.

    LongRoPE has a number for each pair.
    """
    rotated = int(head_dim * rope.share)
    if rope.kind == "longrope":
        counts = {len(rope.short_factors), len(rope.long_factors)}
        if counts != {rotated // 2}:
            raise wrong("short_factor, long_factor", f"lists of {rotated // 2} numbers", counts)
    if rotated % 2 or rotated < (4 if rope.kind == "dynamic" else 2):
        raise UnsupportedModelError(
            f"{rotated} of {head_dim} dims a head cannot be rotated in pairs.",
            "Check head_dim and partial_rotary_factor.",
        )


def read_layers(
    config: dict[str, Any],
    family: Family,
    ropes: dict[str, RopeSpec],
    sparse: list[bool],
    max_len: int,
) -> tuple[LayerSpec, ...]:
    """Each layer's window, rope and kind of MLP; a window as wide as the context is none."""
    window = window_size(config, family)
    if window >= max_len:
        window = 0
    different = tuple(dict.fromkeys(ropes.values()))
    kinds = layer_kinds(config, family, len(sparse))
    rotates = family.rotates(config, len(sparse))
    layers = tuple(
        LayerSpec(
            window=window if kind == WINDOW else 0,
            rope=different.index(ropes[kind]) if rotate and kind in ropes else None,
            query_rope=different.index(ropes[QUERY]) if QUERY in ropes else None,
            sparse=experts,
            state=kind == hybrid.STATE,
        )
        for kind, rotate, experts in zip(kinds, rotates, sparse, strict=True)
    )
    if all(layer.state for layer in layers):
        raise UnsupportedModelError(
            "No layer attends (layer_types), which is not supported.",
            "Give a model of which some layers attend.",
        )
    return family.layers(config, kinds, layers)


def refuse_unsupported(config: dict[str, Any]) -> str:
    """The architecture's name, or UnsupportedModelError that lists what is supported."""
    supported = ", ".join(FAMILIES)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedModelError(
            "config.json names no architecture (key `architectures`).",
            f"Supported are: {supported}.",
        )
    if names[0] not in FAMILIES and ("text_config" in config or "vision_config" in config):
        raise UnsupportedModelError(
            f"{names[0]} wraps a text model together with others (images, sound), which is not "
            "supported.",
            f"Give a checkpoint of the text model alone. Supported are: {supported}.",
        )
    if names[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"The architecture {names[0]} is not supported.", f"Supported are: {supported}."
        )
    if flag(config, "use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"{names[0]} with use_bidirectional_attention is not a causal model.",
            "Give a model that generates text from left to right.",
        )
    return names[0]


def read_activation(config: dict[str, Any], family: Family, architecture: str) -> str:
    """The MLP's activation, under the family's key or Llama's."""
    default = next(name for name, ours in ACTIVATIONS.items() if ours == family.activations[0])
    given = config.get(family.activation_key) or config.get("hidden_act") or default
    activation = ACTIVATIONS.get(given, "") if isinstance(given, str) else ""
    if activation not in family.activations:
        raise UnsupportedModelError(
            f"The activation {str(given)[:40]} is not supported for {architecture}.",
            f"Supported is: {default}.",
        )
    return activation


def checkpoint_dtype(config: dict[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype`; float32 when the config does not say."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"The checkpoint's type {name} is not supported.",
            f"Supported are: {', '.join(DTYPE_BYTES)}.",
        )
    return name


def eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """End tokens: generation_config.json first, all of them; config.json when it has none."""
    ids = token_ids(generation, "eos_token_id", "generation_config.json")
    return ids or token_ids(config, "eos_token_id")
