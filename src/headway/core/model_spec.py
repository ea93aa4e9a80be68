"""A model's dimensions, read from its Hugging Face `config.json`, and what follows from them.

Given the parsed config it answers, without torch and without the weights: how many parameters
and bytes, how many FLOPs a token costs, which KV groups there are and how many bytes a token
takes in each. Unknown architectures and variants are refused by name, never guessed.

Worked example, Llama-3.1-8B: 8,030,261,248 parameters; 2 · 32 layers · 8 heads · 128 dims · 2
bytes = 131,072 KV bytes a token.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.core.errors import ModelError, UnsupportedModelError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNREAD_QUANTIZATION = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gguf": "GGUF",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row a supported architecture: where it differs from Llama."""

    qkv_bias: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base `theta` and, for kind llama3, its frequency scaling (Llama 3.1).

    `linear` divides positions by `factor`.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that share one block table. `window` counts tokens and is 0 for kind `full`."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    kind: Literal["full", "window", "shared"] = "full"
    window: int = 0

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """2 (K and V) · layers · kv_heads · head_dim · bytes."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions of a decoder-only transformer; lengths in tokens, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int
    rms_norm_eps: float
    rope: RopeSpec
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding, vocab · hidden."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer: four projections, three of the MLP, biases, two norms."""
        hidden, q, kv = self.hidden_size, self.q_size, self.kv_size
        attention = hidden * (q + 2 * kv) + q * hidden
        biases = (q + 2 * kv) * self.qkv_bias + hidden * self.o_bias
        mlp = 3 * hidden * self.intermediate_size
        mlp_biases = (2 * self.intermediate_size + hidden) * self.mlp_bias
        return attention + biases + mlp + mlp_biases + 2 * hidden

    @property
    def num_parameters(self) -> int:
        """All elements; a tied head is counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the weights in `dtype` (the checkpoint's own when None)."""
        return self.num_parameters * DTYPE_BYTES[dtype or self.dtype]

    def step_weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes a decode step reads: all but the embedding table, whose rows are looked up."""
        read = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        return read * DTYPE_BYTES[dtype or self.dtype]

    def flops(self, num_tokens: int, context: int = 0, num_sampled: int | None = None) -> int:
        """FLOPs to advance `num_tokens` tokens that each see `context` tokens on average.

        2 a weight and token; the head only for `num_sampled` rows (all when None); attention
        costs 4 · context · heads · head_dim a token and layer. The lookup costs nothing.
        """
        sampled = num_tokens if num_sampled is None else num_sampled
        linear = 2 * num_tokens * self.num_layers * (self.layer_parameters - 2 * self.hidden_size)
        head = 2 * sampled * self.embedding_parameters
        return linear + head + 4 * num_tokens * context * self.q_size * self.num_layers

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The KV groups; a model of full attention has one."""
        layers = tuple(range(self.num_layers))
        return (KVGroupSpec(layers=layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim),)

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """KV bytes one token takes over all groups."""
        size = DTYPE_BYTES[dtype or self.dtype]
        return sum(group.bytes_per_token(size) for group in self.kv_groups)


def read_model_spec(folder: Path) -> ModelSpec:
    """Read `folder/config.json` (and end tokens from `generation_config.json`).

    Raises ModelError when the folder holds no model, UnsupportedModelError for what we do not read.
    """
    config = read_json(folder / "config.json", missing=no_model_here(folder))
    generation = folder / "generation_config.json"
    extra = read_json(generation) if generation.exists() else {}
    return spec_from_config(config, extra)


def no_model_here(folder: Path) -> ModelError:
    """The error for a folder without a config.json; it tells a GGUF file from an empty folder."""
    if not folder.exists():
        return ModelError(
            f"There is no folder {folder}.", "Give the path of a Hugging Face model folder."
        )
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return UnsupportedModelError(
            f"{folder} holds a GGUF file, which is not read yet.",
            "Give the Hugging Face folder (config.json and *.safetensors) of the same model.",
        )
    return ModelError(
        f"{folder} holds no model: there is no config.json.",
        "Give the folder that holds config.json, tokenizer.json and *.safetensors.",
    )


def read_json(path: Path, missing: ModelError | None = None) -> dict[str, Any]:
    """Parse a JSON object from `path`; raises ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing or ModelError(f"{path} is missing.", "Copy the whole folder.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not valid JSON ({str(error)[:200]}).",
            "Copy the file again from its source.",
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Check the file.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "Copy the file again.")
    return value


def spec_from_config(config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    """Turn the two parsed files into a ModelSpec; raises ModelError naming the key at fault."""
    architecture = refuse_unsupported(config)
    family = FAMILIES[architecture]
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    head_dim = positive(config, "head_dim", default=hidden // heads)
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads.",
            "Check num_attention_heads and num_key_value_heads.",
        )
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=positive(config, "intermediate_size"),
        max_len=positive(config, "max_position_embeddings", default=2048),
        rms_norm_eps=decimal(config, "rms_norm_eps", default=1e-6),
        rope=rope_from_config(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=checkpoint_dtype(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_ids(config, generation),
    )


def refuse_unsupported(config: dict[str, Any]) -> str:
    """The architecture's name, or UnsupportedModelError that lists what is supported."""
    supported = ", ".join(FAMILIES)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedModelError(
            "config.json names no architecture (key `architectures`).",
            f"Supported are: {supported}.",
        )
    if names[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"The architecture {names[0]} is not supported.", f"Supported are: {supported}."
        )
    quantization = config.get("quantization_config")
    if quantization:
        told = quantization if isinstance(quantization, dict) else {}
        method = str(told.get("quant_method", "an unknown method")).lower()
        raise UnsupportedModelError(
            f"The checkpoint is quantized with {UNREAD_QUANTIZATION.get(method, method)}, "
            "which is not read yet.",
            "Give the unquantized folder (bf16, fp16 or fp32) of the same model.",
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"The activation {config['hidden_act']} is not supported for {names[0]}.",
            "Supported is: silu.",
        )
    refuse_window(config, names[0])
    return names[0]


def refuse_window(config: dict[str, Any], architecture: str) -> None:
    """Sliding windows are refused: full attention would give other tokens without a word."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"Sliding-window attention is not supported for {architecture} yet.",
            "Set use_sliding_window to false in config.json if full attention is what you want.",
        )


def positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer under `key`, or ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ModelError(
            f"config.json: {key} must be a positive integer, not {value!r}.",
            "Copy config.json again from the model's source.",
        )
    return value


def decimal(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """The finite number under `key`, or ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(
            f"config.json: {key} must be a number, not {value!r}.",
            "Copy config.json again from the model's source.",
        )
    return float(value)


def rope_from_config(config: dict[str, Any]) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(
            f"config.json: rope_scaling must be an object, not {scaling!r}.",
            "Copy config.json again from the model's source.",
        )
    theta = decimal(scaling, "rope_theta", default=decimal(config, "rope_theta", default=10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=decimal(scaling, "factor"))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=decimal(scaling, "factor"),
            low_freq_factor=decimal(scaling, "low_freq_factor"),
            high_freq_factor=decimal(scaling, "high_freq_factor"),
            original_max_len=positive(scaling, "original_max_position_embeddings"),
        )
    raise UnsupportedModelError(
        f"The rope scaling {kind} is not supported.", "Supported are: default, linear, llama3."
    )


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
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            if any(type(token_id) is not int for token_id in ids):
                raise ModelError(
                    f"eos_token_id must be a token id or a list of them, not {value!r}.",
                    "Check config.json and generation_config.json.",
                )
            return ids
    return ()
