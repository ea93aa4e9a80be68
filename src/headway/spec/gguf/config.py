"""A GGUF file's metadata in the words of Hugging Face's config.json and generation_config.json.

`spec_from_config` then reads them as it reads a folder's. A key that is neither translated nor
known to change nothing is refused by name: another model would answer in its place.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.errors import CheckpointError, ModelError, UnsupportedModelError
from headway.core.regular_file import open_regular
from headway.spec.gguf.header import Header, shown
from headway.spec.gguf.types import PLAIN

WITHOUT_EFFECT = {
    "vocab_size",  # the embedding's rows say it
    "rope.dimension_sections",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "interleave_moe_layer_step",
}
"""Keys of an architecture that say nothing more, or nothing of these architectures."""
SIGMOID = 2
"""Of `expert_gating_func`."""
YARN_LOG = "rope.scaling.yarn_log_multiplier"
ENDS = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s>
<|eom_id|> <EOT> _<EOT> [EOT] <|end_of_text|> <end_of_utterance> <eos>
<｜end▁of▁sentence｜>""".split()
"""Texts of tokens that end an answer in every model that has them, as llama.cpp takes them."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""general.sampling.… → what generation_config.json calls it."""


class Values:
    """The metadata of one architecture, and which of it was read.

    A key is given without its architecture: `block_count` is `qwen2.block_count` in the file.
    """

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self.architecture = header, architecture
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where there is none."""
        full = f"{self.architecture}.{key}"
        self._read.add(full)
        return self.header.metadata.get(full, default)

    def same(self, key: str, default: Any = None) -> Any:
        """One value for all layers; UnsupportedModelError where layers differ."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refused(key, "that differs between layers")
        return value[0]

    def need(self, key: str) -> Any:
        """The value that all layers share; ModelError where there is none."""
        value = self.same(key)
        if value is None:
            raise ModelError(
                f"{self.header.path.name} lacks {self.architecture}.{key}.",
                "Convert the model again with a current llama.cpp.",
            )
        return value

    def refused(self, key: str, what: str = "") -> UnsupportedModelError:
        """The error for a value that is not honoured."""
        full = f"{self.architecture}.{key}"
        value = shown(self.header.metadata.get(full))
        return UnsupportedModelError(
            f"{self.header.path.name}: {full} = {value}{what and ' ' + what} is not supported.",
            "Give the Hugging Face folder of the same model.",
        )

    def refuse_unread(self) -> None:
        """Raise for a key that nothing has read and that may change what the model computes."""
        begin = f"{self.architecture}."
        for full, value in self.header.metadata.items():
            key = full.removeprefix(begin)
            unread = full.startswith(begin) and full not in self._read and value not in (0, [])
            if unread and key not in WITHOUT_EFFECT:
                raise self.refused(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture of GGUF: Hugging Face's name for it, and where it differs from Llama.

    `variant` is a key that another model of the same architecture has, and the row of that model.

    `permuted`: the rows of queries and keys stand in pairs that rotate together, as the ropes of
    llama.cpp want them (`names.unpermuted`). `shift` is what the file's norms have beyond the
    checkpoint's.
    """

    hf: str
    more: Callable[[Values], dict[str, Any]] = lambda values: {}
    permuted: bool = False
    shift: float = 0.0
    biases: tuple[str, ...] = ()
    hybrid: bool = False
    """Whether layers without KV heads keep states."""
    variant: "tuple[str, Row] | None" = None


def llama(values: Values) -> dict[str, Any]:
    """Llama's optional biases."""
    for key in ("expert_count", "expert_used_count"):
        values.get(key)
    scale = values.get("attention.scale")
    if scale and abs(scale * head_dim(values) ** 0.5 - 1) > 1e-6:
        raise values.refused("attention.scale")
    return {}


def mixtral(values: Values) -> dict[str, Any]:
    """Mixtral: experts as wide as the MLP."""
    return llama(values) | {
        "num_local_experts": values.need("expert_count"),
        "num_experts_per_tok": values.need("expert_used_count"),
        "sliding_window": values.get("attention.sliding_window") or None,
    }


def mistral3(values: Values) -> dict[str, Any]:
    """Ministral 3; Mistral Small has no temperature of queries."""
    scaling = rope_scaling(values)
    beta, all_dims = (values.get("attention.temperature_scale"), values.get(YARN_LOG))
    if all_dims and scaling:
        scaling |= {"mscale": 1.0, "mscale_all_dim": all_dims}
    if beta and not scaling:
        raise values.refused("attention.temperature_scale", "without YaRN")
    if beta:
        scaling["llama_4_scaling_beta"] = beta
    return {"rope_scaling": scaling or {"rope_type": "default"}, "sliding_window": None}


def qwen2_moe(values: Values) -> dict[str, Any]:
    width = values.same("expert_shared_feed_forward_length")
    return qwen3_moe(values) | {
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": width or values.need("feed_forward_length"),
    }


def lfm2(values: Values) -> dict[str, Any]:
    """LFM2: a layer without KV heads is a convolution."""
    heads = values.get("attention.head_count_kv")
    if not isinstance(heads, list):
        heads = [heads] * values.need("block_count")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": values.need("shortconv.l_cache"),
        "norm_eps": values.need("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": "blk.0.shortconv.conv.bias" in values.header.tensors,
    }


def lfm2_moe(values: Values) -> dict[str, Any]:
    """LFM2 with experts, which a sigmoid weighs."""
    if values.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise values.refused("expert_gating_func")
    return lfm2(values) | {
        "num_experts": values.need("expert_count"),
        "num_experts_per_tok": values.need("expert_used_count"),
        "moe_intermediate_size": values.need("expert_feed_forward_length"),
        "num_dense_layers": values.get("leading_dense_block_count", 0),
        "use_expert_bias": any("exp_probs_b" in name for name in values.header.tensors),
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
    }


def qwen3_moe(values: Values) -> dict[str, Any]:
    experts, active = values.need("expert_count"), values.need("expert_used_count")
    return {
        "num_experts": experts,
        "num_experts_per_tok": active,
        "moe_intermediate_size": values.same("expert_feed_forward_length")
        or values.need("feed_forward_length") // active,
        "norm_topk_prob": True,
    }


def gemma2(values: Values) -> dict[str, Any]:
    """Gemma 2; the query's scale is not in the file: 46 layers are the 27B, which has its own."""
    return {
        **gemma(values, layers_of_27b=46, period=2),
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
        "sliding_window": values.get("attention.sliding_window", 4096),
    }


def gemma3(values: Values) -> dict[str, Any]:
    return {
        **gemma(values, layers_of_27b=62, period=6),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "sliding_window": values.get("attention.sliding_window") or None,
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def gemma(values: Values, layers_of_27b: int, period: int) -> dict[str, Any]:
    """What both Gemmas have: the query's scale, and which layers see a window."""
    heads = values.need("attention.head_count")
    is_27b = values.need("block_count") == layers_of_27b
    scalar = values.need("embedding_length") // heads if is_27b else head_dim(values)
    pattern = values.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        return {"query_pre_attn_scalar": scalar, "layer_types": layer_types(pattern)}
    return {"query_pre_attn_scalar": scalar, "sliding_window_pattern": pattern}


def phi3(values: Values) -> dict[str, Any]:
    return {"sliding_window": values.get("attention.sliding_window") or None}


def olmo2(values: Values) -> dict[str, Any]:
    for key in ("attention.sliding_window", "attention.sliding_window_pattern"):
        values.get(key)
    return {}


def olmo3(values: Values) -> dict[str, Any]:
    """OLMo 3: windows in three of four layers."""
    base = values.get("rope.freq_base", 10000.0)
    if values.get("rope.freq_base_swa", base) != base:
        raise values.refused("rope.freq_base_swa", f"beside {base}")
    kinds = values.get("attention.sliding_window_pattern", 4)
    window = {"sliding_window": values.need("attention.sliding_window")}
    if not isinstance(kinds, list):
        return window | {"sliding_window_pattern": kinds}
    return window | {"layer_types": layer_types(kinds)}


def layer_types(windowed: list[Any]) -> list[str]:
    """The kinds of layers, of which some have a window."""
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def granite(values: Values) -> dict[str, Any]:
    if values.get("rope.scaling.finetuned") is False:
        raise values.refused("rope.scaling.finetuned", "(no rope)")
    return {
        "attention_multiplier": values.get("attention.scale") or head_dim(values) ** -0.5,
        "embedding_multiplier": values.get("embedding_scale") or 1.0,
        "residual_multiplier": values.get("residual_scale") or 1.0,
        "logits_scaling": values.get("logit_scale") or 1.0,
    }


QKV = ("attn_q", "attn_k", "attn_v")
ARCHITECTURES = {
    "llama": Row(
        hf="LlamaForCausalLM",
        more=llama,
        permuted=True,
        variant=("expert_count", Row(hf="MixtralForCausalLM", more=mixtral, permuted=True)),
    ),
    "mistral3": Row(hf="Ministral3ForCausalLM", more=mistral3, permuted=True),
    "qwen2": Row(hf="Qwen2ForCausalLM", biases=QKV),
    "qwen2moe": Row(hf="Qwen2MoeForCausalLM", more=qwen2_moe, biases=QKV),
    "qwen3": Row(hf="Qwen3ForCausalLM"),
    "qwen3moe": Row(hf="Qwen3MoeForCausalLM", more=qwen3_moe),
    "gemma2": Row(hf="Gemma2ForCausalLM", more=gemma2, shift=1.0),
    "gemma3": Row(hf="Gemma3ForCausalLM", more=gemma3, shift=1.0),
    "phi3": Row(hf="Phi3ForCausalLM", more=phi3),
    "olmo2": Row(
        hf="Olmo2ForCausalLM",
        more=olmo2,
        variant=("attention.sliding_window", Row(hf="Olmo3ForCausalLM", more=olmo3)),
    ),
    "granite": Row(hf="GraniteForCausalLM", more=granite, permuted=True),
    "smollm3": Row(hf="SmolLM3ForCausalLM", permuted=True),
    "lfm2": Row(hf="Lfm2ForCausalLM", more=lfm2, hybrid=True),
    "lfm2moe": Row(hf="Lfm2MoeForCausalLM", more=lfm2_moe, hybrid=True),
}
"""`general.architecture` → its row."""


def row_of(header: Header) -> Row:
    """The row of a file's architecture; UnsupportedModelError lists what there is."""
    name = header.metadata.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise UnsupportedModelError(
            f"{header.path.name} is of the architecture {shown(name)!r}, which is not read.",
            f"Read from GGUF are: {', '.join(ARCHITECTURES)}.",
        )
    if row.variant is not None and header.metadata.get(f"{name}.{row.variant[0]}"):
        return row.variant[1]
    return row


def config_of(header: Header) -> dict[str, Any]:
    """The file's config.json; the errors of `row_of`, and ModelError that names a key at fault."""
    row = row_of(header)
    values = Values(header, header.metadata["general.architecture"])
    if values.get("attention.causal", True) is False:
        raise values.refused("attention.causal")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{header.path.name} has no token_embd.weight.", "Give a file that holds a whole model."
        )
    config: dict[str, Any] = {
        "architectures": [row.hf],
        "vocab_size": embedding.shape[0],
        "hidden_size": values.need("embedding_length"),
        "num_hidden_layers": values.need("block_count"),
        "num_attention_heads": values.need("attention.head_count"),
        "num_key_value_heads": key_heads(values, row),
        "head_dim": head_dim(values),
        "intermediate_size": values.need("feed_forward_length"),
        "max_position_embeddings": values.need("context_length"),
        "rms_norm_eps": values.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": main_dtype(header),
        **biases(header, row),
        **rope(values, row.permuted),
        **row.more(values),
    }
    values.refuse_unread()
    return config


def key_heads(values: Values, row: Row) -> Any:
    """KV heads of all layers, of a hybrid of all that attend."""
    given = values.get("attention.head_count_kv")
    if row.hybrid and isinstance(given, list):
        counts = set(given) - {0}
        if len(counts) != 1:
            raise values.refused("attention.head_count_kv", "that differs between layers")
        return counts.pop()
    return values.same("attention.head_count_kv") or values.need("attention.head_count")


def head_dim(values: Values) -> int:
    """Dimensions of a head; those of keys and values must agree."""
    hidden, heads = values.need("embedding_length"), values.need("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or not 0 < heads <= hidden:
        raise ModelError(
            f"{values.header.path.name}: {shown(heads)} attention heads in {shown(hidden)} "
            "dimensions cannot be.",
            "Convert the model again.",
        )
    keys = values.same("attention.key_length", hidden // heads)
    if values.same("attention.value_length", keys) != keys:
        raise values.refused("attention.value_length", f"beside keys of {shown(keys)}")
    return keys  # type: ignore[no-any-return]  # `spec_from_config` checks it


def biases(header: Header, row: Row) -> dict[str, bool]:
    """Which projections have biases, by the tensors that are there."""
    given = {
        part: f"blk.0.{part}.bias" in header.tensors
        for part in (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    attention = {given[part] for part in (*QKV, "attn_output")}
    mlp = {given[part] for part in ("ffn_gate", "ffn_up", "ffn_down")}
    if row.biases:  # the family's own: a missing one is told when weights are read
        return {}
    if len(attention) > 1 or len(mlp) > 1:
        parts_with_bias = ", ".join(part for part, there in given.items() if there)
        raise UnsupportedModelError(
            f"{header.path.name} has biases for {parts_with_bias} alone, which is not supported.",
            "Give the Hugging Face folder of the same model.",
        )
    return {"attention_bias": attention.pop(), "mlp_bias": mlp.pop()}


def rope(values: Values, permuted: bool) -> dict[str, Any]:
    """Base, rotated share and scaling of the rope, as config.json spells them."""
    head = head_dim(values)
    rotated = values.get("rope.dimension_count", head)
    if not isinstance(rotated, int) or not 0 < rotated <= head:
        raise values.refused("rope.dimension_count")
    if permuted and rotated != head:
        raise values.refused("rope.dimension_count", f"of {head}, for pairs of rows")
    config: dict[str, Any] = {
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head,
    }
    scaling = rope_factors(values, rotated // 2) or rope_scaling(values)
    return config | ({"rope_scaling": scaling} if scaling else {})


def rope_scaling(values: Values) -> dict[str, Any]:
    """`rope_scaling` from metadata alone; {} without."""
    kind = values.get("rope.scaling.type", "linear")
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
    original = values.get("rope.scaling.original_context_length")
    attention = values.get("rope.scaling.yarn_attn_factor")
    fast, slow = (values.get(f"rope.scaling.yarn_beta_{each}") for each in ("fast", "slow"))
    if values.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise values.refused("rope.scaling.yarn_ext_factor")
    if values.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise values.refused("rope.scaling.attn_factor", "without factors")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise values.refused("rope.scaling.type")
    given = {"attention_factor": attention, "beta_fast": fast, "beta_slow": slow}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or values.need("context_length"),
        **{name: value for name, value in given.items() if value is not None},
    }


def rope_factors(values: Values, count: int) -> dict[str, Any]:
    """`rope_scaling` of a file that holds what each frequency is divided by; {} without.

    Llama 3.1's three bands are written out so, and Phi-3's factors for short and long contexts.
    """
    context = values.need("context_length")
    both = factors(values.header, "rope_freqs.weight", count)
    if both:
        return {
            "rope_type": "longrope",
            "short_factor": both,
            "long_factor": both,
            "original_max_position_embeddings": context,
            "attention_factor": values.get("rope.scaling.attn_factor", 1.0),
        }
    short, long = (
        factors(values.header, f"rope_factors_{each}.weight", count) for each in ("short", "long")
    )
    if not short or not long:
        return {}
    values.get("rope.scaling.type")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": values.need("rope.scaling.original_context_length"),
        "attention_factor": values.get("rope.scaling.attn_factor", 1.0),
    }


def factors(header: Header, name: str, count: int) -> list[float]:
    """The `count` numbers of one small F32 tensor; [] where the file has none of that name."""
    info = header.tensors.get(name)
    if info is None:
        return []
    if info.type.name != "F32" or info.shape != (count,):
        raise CheckpointError(
            f"{header.path.name}: {name} is {info.type.name} {list(info.shape)}; the rope needs "
            f"{count} numbers in F32.",
            "Convert the model again.",
        )
    with open_regular(header.path) as file:
        file.seek(info.begin)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def is_quantized(header: Header) -> bool:
    """Whether any tensor is of another type than F32, F16 or BF16."""
    return any(info.type.name not in PLAIN for info in header.tensors.values())


def main_dtype(header: Header) -> str:
    """The type that most weights of matrices have; bfloat16 where some are quantized."""
    if is_quantized(header):
        return "bfloat16"
    counts: dict[str, int] = {}
    for info in header.tensors.values():
        if len(info.shape) > 1 and info.type.name in PLAIN:
            counts[info.type.name] = counts.get(info.type.name, 0) + info.end - info.begin
    return PLAIN[max(counts, key=lambda name: counts[name])]


def generation_config_of(header: Header) -> dict[str, Any]:
    """The file's generation_config.json: the tokens that end answers, and how to choose tokens."""
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    ends = [metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    given = {i for i in ends if isinstance(i, int) and 0 <= i < max(len(tokens), 1)}
    texts = {end.encode() for end in ENDS}
    by_text = {i for i, token in enumerate(tokens) if token in texts and is_control(metadata, i)}
    first = [ends[0]] if ends[0] in given else []
    config: dict[str, Any] = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*first, *sorted((given | by_text) - set(first))] or None,
    }
    for key, name in SAMPLING.items():
        config[name] = metadata.get(f"general.sampling.{key}")
    return {name: value for name, value in config.items() if value is not None}


CONTROL = 3


def is_control(metadata: dict[str, Any], token_id: int) -> bool:
    """Whether a token is marked as one that is not text."""
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or token_id >= len(types):
        return True
    return bool(types[token_id] == CONTROL)
