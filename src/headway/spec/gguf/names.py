"""Which tensor of a GGUF file is which weight of the Hugging Face folder it was made from.

One tensor may be several weights: the experts of a layer lie in one, and newer converters fuse q, k
and v. And rows may stand in another order: llama.cpp turns neighbouring numbers of a head, Hugging
Face those half a head apart, so for some architectures converters move the rows of q and k:

    a head of 6 in the folder   0 1 2 3 4 5      pairs (0, 3) (1, 4) (2, 5)
    in the file                 0 3 1 4 2 5      pairs of neighbours
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headway.core.errors import CheckpointError
from headway.spec.gguf.config import row_of
from headway.spec.gguf.header import Header, TensorInfo, shown

LAYER = "model.layers.{i}."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."
COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": LAYER + "input_layernorm",
    "blk.{i}.attn_q": ATTENTION + "q_proj",
    "blk.{i}.attn_k": ATTENTION + "k_proj",
    "blk.{i}.attn_v": ATTENTION + "v_proj",
    "blk.{i}.attn_output": ATTENTION + "o_proj",
    "blk.{i}.attn_q_norm": ATTENTION + "q_norm",
    "blk.{i}.attn_k_norm": ATTENTION + "k_norm",
    "blk.{i}.ffn_norm": LAYER + "post_attention_layernorm",
    "blk.{i}.ffn_gate": MLP + "gate_proj",
    "blk.{i}.ffn_up": MLP + "up_proj",
    "blk.{i}.ffn_down": MLP + "down_proj",
    "blk.{i}.ffn_gate_inp": MLP + "gate",
    "blk.{i}.ffn_gate_exps": MLP + "experts.{e}.gate_proj",
    "blk.{i}.ffn_up_exps": MLP + "experts.{e}.up_proj",
    "blk.{i}.ffn_down_exps": MLP + "experts.{e}.down_proj",
}
NORMS_AROUND = {
    "blk.{i}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{i}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
GEMMA = {**NORMS_AROUND, "blk.{i}.ffn_norm": LAYER + "pre_feedforward_layernorm"}
SPARSE, FORWARD = LAYER + "block_sparse_moe.", LAYER + "feed_forward."
SHARED_EXPERT = {
    "blk.{i}.ffn_gate_inp_shexp": MLP + "shared_expert_gate",
    "blk.{i}.ffn_gate_shexp": MLP + "shared_expert.gate_proj",
    "blk.{i}.ffn_up_shexp": MLP + "shared_expert.up_proj",
    "blk.{i}.ffn_down_shexp": MLP + "shared_expert.down_proj",
}


def numbered(prefix: str) -> dict[str, str]:
    """Experts with matrices w1, w2 and w3, and their router."""
    return {
        "blk.{i}.ffn_gate_inp": prefix + "gate",
        "blk.{i}.ffn_gate_exps": prefix + "experts.{e}.w1",
        "blk.{i}.ffn_up_exps": prefix + "experts.{e}.w3",
        "blk.{i}.ffn_down_exps": prefix + "experts.{e}.w2",
    }


LFM2 = {
    **numbered(FORWARD),
    "token_embd_norm": "model.embedding_norm",
    "blk.{i}.attn_norm": LAYER + "operator_norm",
    "blk.{i}.ffn_norm": LAYER + "ffn_norm",
    "blk.{i}.attn_q_norm": ATTENTION + "q_layernorm",
    "blk.{i}.attn_k_norm": ATTENTION + "k_layernorm",
    "blk.{i}.attn_output": ATTENTION + "out_proj",
    "blk.{i}.shortconv.in_proj": LAYER + "conv.in_proj",
    "blk.{i}.shortconv.conv": LAYER + "conv.conv",
    "blk.{i}.shortconv.out_proj": LAYER + "conv.out_proj",
    "blk.{i}.ffn_gate": FORWARD + "w1",
    "blk.{i}.ffn_up": FORWARD + "w3",
    "blk.{i}.ffn_down": FORWARD + "w2",
    "blk.{i}.exp_probs_b": FORWARD + "expert_bias",
}
OTHERWISE = {
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Olmo2ForCausalLM": NORMS_AROUND,
    "Olmo3ForCausalLM": NORMS_AROUND,
    "MixtralForCausalLM": numbered(SPARSE),
    "Qwen2MoeForCausalLM": SHARED_EXPERT,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "Phi3ForCausalLM": {
        "blk.{i}.attn_qkv": ATTENTION + "qkv_proj",
        "blk.{i}.ffn_up": MLP + "gate_up_proj",
    },
}
"""Architecture of Hugging Face → what its files name otherwise than `COMMON`, or beside it."""
FUSED = {
    "blk.{i}.attn_qkv": tuple(ATTENTION + f"{part}_proj" for part in "qkv"),
    "blk.{i}.ffn_gate_up_exps": tuple(
        MLP + f"experts.{{e}}.{part}_proj" for part in ("gate", "up")
    ),
}
"""Tensors that newer converters make of several; Phi-3's qkv is one in its folder too."""
ROPE = re.compile(r"rope_(freqs|factors_(short|long))\.weight")
"""Read with the metadata."""
BLOCK = re.compile(r"^blk\.(0|[1-9]\d{0,4})\.")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Weights whose rows may have been moved, by head → the key of config.json that counts those."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: its name in the folder, the tensor that it lies in, its first row and its rows.

    A vector has rows of one number. `heads` above 0: the rows of so many heads are to be moved
    back. `shift` is to be taken from its numbers.
    """

    name: str
    tensor: str
    info: TensorInfo
    first: int
    rows: int
    heads: int = 0
    shift: float = 0.0

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.info.shape[-1] if len(self.info.shape) > 1 else 1


def weights_of(header: Header, config: dict[str, Any]) -> list[Weight]:
    """Every weight of a file whose config.json is `config`, in the order of its tensors.

    A tensor that no table names keeps its own name, so that whoever looks for weights finds it left
    over. Raises CheckpointError where a tensor cannot be cut into its weights.
    """
    row = row_of(header)
    names = COMMON | OTHERWISE.get(row.hf, {})
    weights = []
    for tensor, info in header.tensors.items():
        if ROPE.fullmatch(tensor):
            continue
        for weight in cut(tensor, info, names, config):
            part = weight.name.split(".")[-2] if "." in weight.name else ""
            heads = config[HEADS[part]] if row.permuted and part in HEADS else 0
            if heads and weight.rows % (2 * heads):
                raise unfit(tensor, info, f"{heads} heads")
            shift = row.shift if weight.name.endswith("norm.weight") else 0.0
            weights.append(replace(weight, heads=heads, shift=shift))
    return weights


def cut(
    tensor: str, info: TensorInfo, names: dict[str, str], config: dict[str, Any]
) -> Iterator[Weight]:
    """The weights that lie in one tensor, by expert and by part."""
    base, dot, suffix = tensor.rpartition(".")
    suffix = "weight" if base.endswith("exp_probs_b") else suffix
    block = BLOCK.match(tensor)
    pattern = BLOCK.sub("blk.{i}.", base) if block else base
    parts = (names[pattern],) if pattern in names else FUSED.get(pattern, ())
    total = math.prod(info.shape[:-1]) if len(info.shape) > 1 else info.shape[0]
    if not parts:
        yield Weight(tensor, tensor, info, 0, total)
        return
    experts = info.shape[0] if len(info.shape) == 3 else 1
    sizes = sizes_of(len(parts), total // experts, config)
    if sum(sizes) != total // experts:
        raise unfit(tensor, info, f"parts of {' + '.join(map(str, sizes))} rows")
    first = 0
    for expert in range(experts):
        for part, rows in zip(parts, sizes, strict=True):
            name = part.format(i=block[1] if block else 0, e=expert)
            yield Weight(name + dot + suffix, tensor, info, first, rows)
            first += rows


def sizes_of(count: int, rows: int, config: dict[str, Any]) -> list[int]:
    """Rows of each of `count` parts."""
    if count == 3:
        heads = (config["num_attention_heads"], *2 * (config["num_key_value_heads"],))
        return [each * config["head_dim"] for each in heads]
    return [rows // count] * count


def unfit(tensor: str, info: TensorInfo, what: str) -> CheckpointError:
    """The error for a tensor whose shape is not what the metadata says."""
    return CheckpointError(
        f"{shown(tensor)} has the shape {list(info.shape)}, which does not divide into {what}.",
        "Convert the model again: its metadata and its tensors do not fit.",
    )


def order_of_rows(rows: int, heads: int) -> list[int]:
    """Where in the file each row of the folder lies: those of a head of 6 at 0 2 4 1 3 5."""
    size = rows // heads
    return [
        head * size + 2 * pair + half
        for head in range(heads)
        for half in range(2)
        for pair in range(size // 2)
    ]
