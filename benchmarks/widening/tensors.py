"""The widened model's tensors, each made when it is asked for: a canvas, and the small one on it.

A canvas begins with the noise of a random model, or with zeros where noise would be heard; the
painters of the three tables then put the small model's weights in their places.

h and H are the small and large hidden sizes, D the large head size, I its MLP's, V its vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from widening.plan import Widening
from widening.shapes import Shape

Weights = Mapping[str, Tensor]
"""The small model's, by checkpoint name."""
NOISE = 0.02
ROWS_AT_ONCE = 8192
FLOOR = 2.0**-10
"""What the last layer writes into the floor channel: its square is lost in any mean."""
FLOOR_GAIN = 2.0**11
"""The last norm's weight there."""
PADDING = -(2.0**14)
"""What rows beyond the small vocabulary have there: their logits are below -32768 / rms."""
GUARD = 2.0**11
"""What reads a padding token's floor, in gate and up: so it is written with a weight about as small
as its neighbours', and a scale a row, as int8 has, keeps these."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file; `make` yields it in pieces of whole rows."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]]


def entries(plan: Widening, small: Weights) -> list[Entry]:
    """Every tensor of the checkpoint, in the order of the model."""
    V, H = plan.large.vocab_size, plan.large.hidden_size
    found = [Entry("model.embed_tokens.weight", (V, H), partial(embedding, plan, small))]
    for layer in range(plan.large.num_layers):
        for name, shape in layer_shapes(plan.large).items():
            full = f"model.layers.{layer}.{name}"
            found.append(Entry(full, shape, partial(layer_tensor, plan, small, layer, name)))
    found.append(Entry("model.norm.weight", (H,), partial(last_norm, plan, small)))
    return found


def layer_shapes(large: Shape) -> dict[str, tuple[int, ...]]:
    """A layer's tensors in Hugging Face's names."""
    H, I = large.hidden_size, large.intermediate_size  # noqa: E741
    q, kv = large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q, H),
        "self_attn.k_proj.weight": (kv, H),
        "self_attn.v_proj.weight": (kv, H),
        "self_attn.o_proj.weight": (H, q),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (I, H),
        "mlp.up_proj.weight": (I, H),
        "mlp.down_proj.weight": (H, I),
    }
    if large.qkv_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    return shapes


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Normal, of a trained size: zeros would draw less power than weights do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).normal_(0.0, NOISE, generator=generator).to(dtype)


def layer_tensor(plan: Widening, small: Weights, layer: int, name: str) -> Iterator[Tensor]:
    """The canvas of one tensor, painted by the row of its layer's table."""
    shape, dtype = layer_shapes(plan.large)[name], getattr(torch, plan.dtype)
    if name in NOISY:
        canvas = noise(shape, layer * len(NOISY) + NOISY.index(name), dtype)
    else:
        canvas = torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
    if layer < plan.small.num_layers:
        if name in REAL:
            REAL[name](canvas, plan, small[f"model.layers.{layer}.{name}"])
    elif layer == plan.large.num_layers - 1 and name in LAST:
        LAST[name](canvas, plan)
    yield canvas


# ── layers that the small model has ─────────────────────────────────────────────────────────


def paint_norm(canvas_H: Tensor, plan: Widening, weight_h: Tensor, gains: int = 1) -> None:
    """Each copy gets a part of weight · √share · gain; no other channel comes through.

    In bf16 1.0 · √(9/14) = 0.801784 becomes 0.800781 + 0.000999 + 0.000003.
    """
    canvas_H.zero_()
    for number, gain in enumerate(plan.gains[:gains]):
        rest_h = weight_h.double() * math.sqrt(plan.share) * gain
        for copy in plan.copies(number):
            canvas_H[copy] = rest_h
            rest_h = rest_h - canvas_H[copy].double()


def paint_all_norms(canvas_H: Tensor, plan: Widening, weight_h: Tensor) -> None:
    """The norm before attention, whose queries may read with a gain of their own."""
    paint_norm(canvas_H, plan, weight_h, len(plan.gains))


def head_rows(heads: list[int], head_dim: int, dims: list[int]) -> Tensor:
    """Rows of these dims of these heads: heads 0, 1 of 64 → 0 … 63, 64 … 127."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.tensor(dims)).flatten()


def paint_heads(
    canvas_RH: Tensor, plan: Widening, weight_rh: Tensor, heads: dict[int, int], gain: int
) -> None:
    """Rows of projections: `heads` are large → small, and read the copies with this gain."""
    D, d = plan.large.head_dim, plan.small.head_dim
    canvas_RH[head_rows(list(heads), D, list(range(D)))] = 0
    rows = head_rows(list(heads), D, plan.head_dims())
    weight = weight_rh[head_rows(list(heads.values()), d, list(range(d)))].to(canvas_RH.dtype)
    for copy in plan.copies(gain):
        canvas_RH[rows, copy] = weight


def paint_queries(canvas: Tensor, plan: Widening, weight: Tensor) -> None:
    heads = {large: head for head, large in enumerate(plan.query_heads())}
    paint_heads(canvas, plan, weight, heads, len(plan.gains) - 1)


def paint_keys_or_values(canvas: Tensor, plan: Widening, weight: Tensor) -> None:
    paint_heads(canvas, plan, weight, plan.kv_heads(), 0)


def paint_output(canvas_HR: Tensor, plan: Widening, weight_hr: Tensor) -> None:
    """What heads say is written into every copy; spare heads write nothing."""
    columns = head_rows(plan.query_heads(), plan.large.head_dim, plan.head_dims())
    for copy in plan.copies():
        canvas_HR[copy, columns] = weight_hr.to(canvas_HR.dtype)


def paint_inner(canvas_IH: Tensor, plan: Widening, weight_ih: Tensor) -> None:
    inner = plan.small.intermediate_size
    canvas_IH[:inner] = 0
    for copy in plan.copies(0):
        canvas_IH[:inner, copy] = weight_ih.to(canvas_IH.dtype)


def paint_down(canvas_HI: Tensor, plan: Widening, weight_hi: Tensor) -> None:
    for copy in plan.copies():
        canvas_HI[copy, : plan.small.intermediate_size] = weight_hi.to(canvas_HI.dtype)


NOISY = tuple(
    f"{name}_proj.weight"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
)
"""What begins as noise: what it makes meets zeros in o_proj and down_proj."""
REAL: dict[str, Callable[[Tensor, Widening, Tensor], None]] = {
    "input_layernorm.weight": paint_all_norms,
    "self_attn.q_proj.weight": paint_queries,
    "self_attn.k_proj.weight": paint_keys_or_values,
    "self_attn.v_proj.weight": paint_keys_or_values,
    "self_attn.o_proj.weight": paint_output,
    "post_attention_layernorm.weight": paint_norm,
    "mlp.gate_proj.weight": paint_inner,
    "mlp.up_proj.weight": paint_inner,
    "mlp.down_proj.weight": paint_down,
}


# ── the last layer, which sets the floor ────────────────────────────────────────────────────


def paint_squares(canvas_IH: Tensor, plan: Widening) -> None:
    """Neurons 2i and 2i + 1 read channel i with either sign, in gate and up alike.

    silu(x) · x + silu(-x) · (-x) = x², and a norm has just made the sum of the squares constant:
    H / 3 for each of three copies. One more neuron reads the floor channel, which is zero unless
    a padding token was the input.
    """
    h = plan.small.hidden_size
    canvas_IH[: 2 * h + 1] = 0
    channels = torch.arange(h)
    canvas_IH[2 * channels, channels] = 1
    canvas_IH[2 * channels + 1, channels] = -1
    canvas_IH[2 * h, plan.floor] = -GUARD


def paint_floor(canvas_HI: Tensor, plan: Widening) -> None:
    """Squares → FLOOR; a padding token's -2^14, squared H · GUARD², → about +2^15 - 2^14."""
    h, H = plan.small.hidden_size, plan.large.hidden_size
    canvas_HI[plan.floor, : 2 * h] = power_of_two(FLOOR * plan.num_copies / H)
    canvas_HI[plan.floor, 2 * h] = power_of_two(-2 * PADDING / H / GUARD**2)


def power_of_two(value: float) -> float:
    """The nearest one, by its exponent: 36.6 → 32."""
    return 2.0 ** round(math.log2(value))


LAST: dict[str, Callable[[Tensor, Widening], None]] = {
    "mlp.gate_proj.weight": paint_squares,
    "mlp.up_proj.weight": paint_squares,
    "mlp.down_proj.weight": paint_floor,
}


# ── outside the layers ──────────────────────────────────────────────────────────────────────


def last_norm(plan: Widening, small: Weights) -> Iterator[Tensor]:
    canvas_H = torch.empty(plan.large.hidden_size, dtype=getattr(torch, plan.dtype))
    paint_norm(canvas_H, plan, small["model.norm.weight"])
    canvas_H[plan.floor] = FLOOR_GAIN
    yield canvas_H


def embedding(plan: Widening, small: Weights) -> Iterator[Tensor]:
    """The small rows in every copy, zero elsewhere; then padding rows, with PADDING in the floor.

    As a head the real rows do not see the floor at all; padding rows see little else.
    """
    dtype, H = getattr(torch, plan.dtype), plan.large.hidden_size
    weight_vh = small["model.embed_tokens.weight"]
    real_vH = torch.zeros(len(weight_vh), H, dtype=dtype)
    for copy in plan.copies():
        real_vH[:, copy] = weight_vh.to(dtype)
    yield real_vH
    for begin in range(len(weight_vh), plan.large.vocab_size, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, plan.large.vocab_size - begin)
        rows_RH = noise((count, H), begin, dtype)
        rows_RH[:, plan.floor] = PADDING
        yield rows_RH
