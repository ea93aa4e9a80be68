"""Where the small model's numbers go in the large shape, decided before anything is written.

    channel   0 … 191   192 … 383   384 … 575   576      577 … 895
    holds     copy 0    copy 1      copy 2      floor    zeros

The stream of 192 channels runs three times side by side in 896. RMSNorm's mean is then 3 · 192 /
896 of what it was, so norm weights must grow by √(9/14), which bf16 has only 8 bits for: each copy
gets a part of the product, and the three parts add up to 24 bits. See docs/widen.md.
"""

import math
from dataclasses import dataclass

from headway.core.errors import ModelError, UnsupportedModelError
from headway.spec import ModelSpec
from widening.shapes import Shape

PARTS = {"bfloat16": (3, 2), "float32": (1,)}
"""How many copies a norm weight is split over, the best first."""
ARCHITECTURE = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """One small model in one large shape.

    `gains` are the factors that a norm's output is wanted with: 1, and √2 for the queries where
    heads of 64 go into heads of 128, because scores are divided by √128 there.
    """

    small: ModelSpec
    large: Shape
    dtype: str
    parts: int
    gains: tuple[float, ...]

    @property
    def num_copies(self) -> int:
        return self.parts * len(self.gains)

    @property
    def share(self) -> float:
        """What is left of the mean square: 3 · 192 / 896 = 0.643."""
        return self.num_copies * self.small.hidden_size / self.large.hidden_size

    @property
    def rms_norm_eps(self) -> float:
        return self.small.rms_norm_eps * self.share

    @property
    def floor(self) -> int:
        """The channel that keeps padding tokens from being chosen."""
        return self.num_copies * self.small.hidden_size

    def copies(self, gain: int | None = None) -> list[slice]:
        """The channels of each copy; of those alone that are normed with `gains[gain]`."""
        which = range(self.num_copies)
        if gain is not None:
            which = range(gain * self.parts, (gain + 1) * self.parts)
        width = self.small.hidden_size
        return [slice(copy * width, (copy + 1) * width) for copy in which]

    @property
    def kv_replicas(self) -> int:
        """Large KV heads that one small one needs: 8 query heads over groups of 3 → 3."""
        return -(-self.small.num_heads // self.small.num_kv_heads // self.large.group)

    def query_heads(self) -> list[int]:
        """The large query head of each small one: 0, 1, 2 of the first group of seven."""
        group = self.small.num_heads // self.small.num_kv_heads
        return [
            (head // group * self.kv_replicas * self.large.group) + head % group
            for head in range(self.small.num_heads)
        ]

    def kv_heads(self) -> dict[int, int]:
        """Large KV head → the small one it repeats; the others are spare."""
        used = self.small.num_kv_heads * self.kv_replicas
        return {head: head // self.kv_replicas for head in range(used)}

    def head_dims(self) -> list[int]:
        """Where each dim of a small head lies in a large one, turned at the same frequency.

        Dims i and i + D/2 turn together, by theta^(-2i/D): in a head twice as large that is every
        second pair. Of 4 in 8: 0, 2, 4, 6.
        """
        stride = self.large.head_dim // self.small.head_dim
        half = range(self.small.head_dim // 2)
        return [first + i * stride for first in (0, self.large.head_dim // 2) for i in half]


def plan_widening(small: ModelSpec, large: Shape, dtype: str = "auto") -> Widening:
    """The best way in; UnsupportedModelError or ModelError names the field that does not fit."""
    refuse_unlike(small)
    if dtype == "auto":
        dtype = "bfloat16" if small.dtype == "bfloat16" else "float32"
    same = small.head_dim == large.head_dim
    gains = (1.0,) if same else (1.0, math.sqrt(large.head_dim / small.head_dim))
    ways = [
        Widening(small=small, large=large, dtype=dtype, parts=parts, gains=gains)
        for parts in PARTS[dtype]
    ]
    fitting = [way for way in ways if way.floor < large.hidden_size]
    refuse_too_large(small, large, ways[-1])
    return fitting[0]


def refuse_unlike(small: ModelSpec) -> None:
    """Only Llama without biases and scalings is widened."""
    wrong = {
        f"architecture {small.architecture}": small.architecture != ARCHITECTURE,
        "attention_bias": small.qkv_bias or small.o_bias,
        "mlp_bias": small.mlp_bias,
        "an lm_head of its own (tie_word_embeddings false)": not small.tied,
        "rope_scaling": any(rope.kind != "default" or rope.share != 1 for rope in small.ropes),
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise UnsupportedModelError(
            f"A model with {found[0]} cannot be widened.",
            f"Give a tied {ARCHITECTURE} without biases and without rope scaling.",
        )


def refuse_too_large(small: ModelSpec, large: Shape, way: Widening) -> None:
    """Name the first size that does not fit, with what there is and what is needed."""
    if large.head_dim % small.head_dim:
        raise ModelError(
            f"head_dim {small.head_dim} does not divide this shape's {large.head_dim}.",
            "The rotary frequencies would differ; choose another shape with --like.",
        )
    hidden, inner = small.hidden_size, small.intermediate_size
    kv_heads = small.num_kv_heads * way.kv_replicas
    rows = [
        ("vocab_size", small.vocab_size, 0, large.vocab_size),
        ("hidden_size", hidden, way.floor + 1, large.hidden_size),
        ("num_hidden_layers", small.num_layers, small.num_layers + 1, large.num_layers),
        ("num_key_value_heads", small.num_kv_heads, kv_heads, large.num_kv_heads),
        ("intermediate_size", inner, max(inner, 2 * hidden + 1), large.intermediate_size),
    ]
    for name, given, needed, there in rows:
        if max(given, needed) > there:
            more = f": {needed} are needed and" if needed > given else ";"
            raise ModelError(
                f"{name} {given} does not fit{more} this shape has {there}.",
                "Choose a larger shape with --like; docs/widen.md says what takes how much room.",
            )
