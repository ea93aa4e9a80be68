"""The layer that drafts for the small model, in a layer of the large shape, so that it costs one.

It lives in the first copy of the stream: fc reads all copies of the state, which add up to the
small one's after the last norm (docs/widen.md), and one copy of the embedding, which each holds
whole; its own states lie in the first copy alone, as the output matrix reads all.

    fc        token  W 0 0 0    state  W' W' W' 0     bias of the floor: padding rows are not chosen
    norm      √(192/896) · w    its mean is over 896 channels, of which 192 are in use

Norm weights are rounded to bf16 once more, so guesses are nearly the small one's and not quite.
"""

import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.runtime.checkpoint_files import EAGLE_FILE
from headway.runtime.eagle_file import ATTENTION, LAYER, read_eagle_spec
from widening.plan import Widening
from widening.tensors import head_rows, layer_shapes

FLOOR = 2.0**-4
"""Of its states; times what padding rows have there, -2^14, their logits are -1,024. Its square is
lost in the mean."""
NORM = f"{LAYER}post_attention_layernorm.weight"


def widen_eagle(folder: Path, plan: Widening, out: Path) -> None:
    """Write the layer that lies in `folder` for the widened model.

    It is left out where its layer is not of the small model's own sizes. Raises CheckpointError for
    a file that is wrong.
    """
    small = plan.small
    eagle = read_eagle_spec(folder, small)
    if eagle is None or eagle.qkv_bias:
        return
    sizes = eagle.num_heads, eagle.num_kv_heads, eagle.intermediate_size
    if sizes == (small.num_heads, small.num_kv_heads, small.intermediate_size):
        with safe_open(folder / EAGLE_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        save_file(widened(tensors, plan), out / EAGLE_FILE, metadata=metadata)


def widened(tensors: dict[str, Tensor], plan: Widening) -> dict[str, Tensor]:
    """All tensors in the large sizes."""
    width, size, first = plan.large.hidden_size, plan.small.hidden_size, plan.copies(0)[0]
    found = {"fc.weight": wide_fc(tensors["fc.weight"], plan), "fc.bias": torch.zeros(width)}
    if "fc.bias" in tensors:
        found["fc.bias"][first] = tensors["fc.bias"].float()
    found["fc.bias"][plan.floor] = FLOOR
    shapes = layer_shapes(plan.large)
    inside, outside = places(plan)
    for name in inside | outside:
        found[name] = torch.zeros(shapes[name.removeprefix(LAYER)], dtype=tensors[name].dtype)
        rows = inside.get(name, torch.arange(size))
        columns = outside.get(name, torch.arange(size))
        found[name][rows[:, None], columns] = spread(tensors[name], name, plan)
    found[NORM] = torch.zeros(width, dtype=tensors[NORM].dtype)
    found[NORM][first] = tensors[NORM] * math.sqrt(size / width)
    return found


def wide_fc(weight_HE: Tensor, plan: Widening) -> Tensor:
    """fc in the large sizes: the token's columns once, the state's in every copy."""
    width, copies = plan.large.hidden_size, plan.copies(0)
    token_HH, state_HH = weight_HE.chunk(2, -1)
    wide = torch.zeros(width, 2 * width, dtype=weight_HE.dtype)
    wide[copies[0], copies[0]] = token_HH
    for copy in copies:
        wide[copies[0], slice(width + copy.start, width + copy.stop)] = state_HH
    return wide


def places(plan: Widening) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Where the small rows go in matrices that read the stream, columns in those that write it."""
    size, dims = plan.large.head_dim, plan.head_dims()
    inner = torch.arange(plan.small.intermediate_size)
    queries = head_rows(plan.query_heads(), size, dims)
    keys = head_rows(list(plan.kv_heads()), size, dims)
    values = head_rows(list(plan.kv_heads()), size, dims)
    read = {
        f"{ATTENTION}q_proj.weight": queries,
        f"{ATTENTION}k_proj.weight": keys,
        f"{ATTENTION}v_proj.weight": values,
        f"{LAYER}mlp.gate_proj.weight": inner,
        f"{LAYER}mlp.up_proj.weight": inner,
    }
    written = {f"{ATTENTION}o_proj.weight": queries, f"{LAYER}mlp.down_proj.weight": inner}
    return read, written


def spread(tensor: Tensor, name: str, plan: Widening) -> Tensor:
    """The small matrix as often as its heads are repeated, queries with their gain."""
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        rows = list(plan.kv_heads().values())
        small = plan.small.head_dim
        return tensor[head_rows(rows, small, list(range(small)))]
    if name.endswith("q_proj.weight"):
        return tensor * plan.gains[-1]
    return tensor
