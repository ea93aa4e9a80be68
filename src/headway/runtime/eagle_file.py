"""Read and check the header of `eagle.safetensors` in the folder of a model; needs no torch.

Tensors have the names that are published with EAGLE-1 and EAGLE-2 (Li et al. 2024). H is the hidden
size, D the head size of the model; N query heads, G KV heads and I the width of the MLP follow from
the shapes:

    fc.weight                                          (H, 2H)     [embedding, state before]
    layers.0.self_attn.q_proj, k_proj, v_proj          (N·D, H), (G·D, H) twice
    layers.0.self_attn.o_proj                          (H, N·D)
    layers.0.post_attention_layernorm                  (H)
    layers.0.mlp.gate_proj, up_proj, down_proj         (I, H) twice, (H, I)
    fc.bias; biases of q_proj, k_proj and v_proj       optional
    embed_tokens.weight                                (V, H): not read, the model has it
"""

from math import prod
from pathlib import Path

from headway.config.speculation_config import EagleSpec
from headway.core.errors import CheckpointError
from headway.runtime.checkpoint_files import EAGLE_FILE, read_entries, shown
from headway.runtime.medusa_file import FLOATS, Tensors, read_header
from headway.spec import ModelSpec

LAYER = "layers.0."
ATTENTION = LAYER + "self_attn."
EMBEDDING = "embed_tokens.weight"
BIASES = tuple(f"{ATTENTION}{name}_proj.bias" for name in "qkv")
OF_EAGLE_3 = ("d2t", "t2d", "midlayer.")
"""Prefixes of names that only an EAGLE-3 file has."""
TRAIN_AGAIN = "Train it for this model, or leave eagle out of --speculative-method."


def read_eagle_spec(folder: Path, spec: ModelSpec) -> EagleSpec | None:
    """Return the EAGLE layer in `folder`, None where there is none.

    Raises CheckpointError where it does not fit the model of `spec`.
    """
    path = folder / EAGLE_FILE
    if not path.exists():
        return None
    read_entries(path)
    _, tensors = read_header(path)
    refuse_eagle_3(tensors, spec)
    rows = {name: first(tensors, f"{ATTENTION}{name}_proj.weight") for name in "qk"}
    eagle = EagleSpec(
        num_heads=rows["q"] // spec.head_dim,
        num_kv_heads=rows["k"] // spec.head_dim,
        intermediate_size=first(tensors, f"{LAYER}mlp.gate_proj.weight"),
        qkv_bias=any(name in tensors for name in BIASES),
        fc_bias="fc.bias" in tensors,
        num_parameters=sum(prod(shape) for n, (_, shape) in tensors.items() if n != EMBEDDING),
    )
    check_heads(rows, eagle, spec)
    check_tensors(tensors, eagle, spec)
    return eagle


def first(tensors: Tensors, name: str) -> int:
    """Return the number of rows of a matrix. Raises CheckpointError where there are none."""
    _, shape = tensors.get(name, ("", []))
    if not shape or not shape[0]:
        what = "has no rows" if name in tensors else "is missing"
        raise CheckpointError(f"{EAGLE_FILE}: {name} {what}.", "Write all the tensors.")
    return shape[0]


def check_heads(rows: dict[str, int], eagle: EagleSpec, spec: ModelSpec) -> None:
    """Raise CheckpointError unless the rows of queries and keys are heads of the model's size."""
    heads, kv_heads = eagle.num_heads, eagle.num_kv_heads
    if not kv_heads or not heads or heads % kv_heads:
        raise CheckpointError(
            f"{EAGLE_FILE}: q_proj has {rows['q']} rows and k_proj {rows['k']}, which are no heads "
            f"of {spec.head_dim} in groups.",
            TRAIN_AGAIN,
        )


def refuse_eagle_3(tensors: Tensors, spec: ModelSpec) -> None:
    """Raise CheckpointError for a file of EAGLE-3, with the name of a tensor that shows it."""
    named = [name for name in sorted(tensors) if name.startswith(OF_EAGLE_3)]
    _, fused = tensors.get("fc.weight", ("", []))
    if fused == [spec.hidden_size, 3 * spec.hidden_size]:
        named.append("fc.weight of three states")
    if named:
        raise CheckpointError(
            f"{EAGLE_FILE} is of EAGLE-3 ({shown(named[0])}), which reads states of three layers "
            "and drafts from a vocabulary of its own.",
            "Use a file of EAGLE-1 or EAGLE-2, or train one.",
        )


def shapes_of(eagle: EagleSpec, spec: ModelSpec) -> dict[str, list[int]]:
    """Return name → shape of every tensor that is read."""
    hidden, inner = spec.hidden_size, eagle.intermediate_size
    q, kv = eagle.num_heads * spec.head_dim, eagle.num_kv_heads * spec.head_dim
    shapes = {
        "fc.weight": [hidden, 2 * hidden],
        f"{ATTENTION}q_proj.weight": [q, hidden],
        f"{ATTENTION}k_proj.weight": [kv, hidden],
        f"{ATTENTION}v_proj.weight": [kv, hidden],
        f"{ATTENTION}o_proj.weight": [hidden, q],
        f"{LAYER}post_attention_layernorm.weight": [hidden],
        f"{LAYER}mlp.gate_proj.weight": [inner, hidden],
        f"{LAYER}mlp.up_proj.weight": [inner, hidden],
        f"{LAYER}mlp.down_proj.weight": [hidden, inner],
    }
    if eagle.fc_bias:
        shapes["fc.bias"] = [hidden]
    if eagle.qkv_bias:
        shapes |= {name: [rows] for name, rows in zip(BIASES, (q, kv, kv), strict=True)}
    return shapes


def check_tensors(tensors: Tensors, eagle: EagleSpec, spec: ModelSpec) -> None:
    """Raise CheckpointError unless the tensors are those of the layer and fit the model."""
    shapes = shapes_of(eagle, spec)
    known = shapes | {EMBEDDING: [spec.vocab_size, spec.hidden_size]}
    for names, what in (
        (shapes.keys() - tensors.keys(), "is missing"),
        (tensors.keys() - known.keys(), "is left over"),
    ):
        if names:
            raise CheckpointError(
                f"{EAGLE_FILE}: {shown(min(names))} {what}.",
                "It has one layer without a norm before its attention, as EAGLE-1 and EAGLE-2: "
                "write its tensors and no others.",
            )
    for name, (dtype, shape) in tensors.items():
        if shape != known[name]:
            raise CheckpointError(
                f"{EAGLE_FILE}: {name} has shape {shown(shape)}; this model has {known[name]} "
                f"(hidden size {spec.hidden_size}, head size {spec.head_dim}).",
                TRAIN_AGAIN,
            )
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{EAGLE_FILE}: {name} is of type {shown(dtype)}.", f"Use {', '.join(FLOATS)}."
            )
