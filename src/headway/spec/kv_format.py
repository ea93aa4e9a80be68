"""In which formats the KV cache holds keys and values: rows, and all byte arithmetic of them.

A format is two `KVNumbers`, K's and V's. Worked example, a head of 64 numbers, int8: 64 bytes and
a scale of 4 for K, as much for V, so 136 bytes a token.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

Axis = Literal["none", "token", "channel"]


@dataclass(frozen=True, slots=True)
class KVNumbers:
    """How the keys or the values of one head are held.

    `axis` says whose numbers share a scale: nobody's, a token's, or a channel's over a block of
    tokens. `group` of them share it; 0: all numbers of the token's head. A scale, with its offset
    where there is one, takes `scale_bytes`.
    """

    name: str
    bits: int
    axis: Axis = "none"
    group: int = 0
    scale_bytes: int = 0

    def bytes_per_token(self, head_dim: int) -> Fraction:
        """Bytes that one token of one head takes: 64 of bfloat16 take 128, of int8 68."""
        levels = Fraction(head_dim * self.bits, 8)
        if self.axis == "none":
            return levels
        if self.axis == "channel":
            return levels + Fraction(head_dim * self.scale_bytes, self.group)
        return levels + self.scale_bytes * (ceil(head_dim / self.group) if self.group else 1)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A row: how K and V are held, which may differ."""

    k: KVNumbers
    v: KVNumbers

    def __str__(self) -> str:
        """As it is told: "int8", or "int8/int4" where they differ."""
        return self.k.name if self.k.name == self.v.name else f"{self.k.name}/{self.v.name}"

    @property
    def block_size(self) -> int:
        """Tokens of a block, where the format decides it: those of a channel's scale; else 0.

        Then a block is rounded when it is full, and the open one is kept as computed. Numbers of 4
        bits are, whoever shares their scale: several tokens lie in a byte.
        """
        return BLOCK if 4 in (self.k.bits, self.v.bits) else 0

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes of K and V of one token in one head, rounded up: 136 for a head of 64 in int8."""
        return ceil(self.k.bytes_per_token(head_dim) + self.v.bytes_per_token(head_dim))


BLOCK = 64
"""Tokens that a channel's scale is of."""
LEAST_OPEN = 2
"""Blocks not rounded yet that one sequence needs to go on; a chunk is cut to the free ones."""
CHANNELS = 32
"""Channels that a token's scale is of, in 4 bits; a rounded head is whole groups of them."""
NUMBERS = {
    "float32": KVNumbers("float32", 32),
    "float16": KVNumbers("float16", 16),
    "bfloat16": KVNumbers("bfloat16", 16),
    "int8": KVNumbers("int8", 8, "token", scale_bytes=4),
    "int4-channel": KVNumbers("int4", 4, "channel", BLOCK, scale_bytes=4),
    "int4-token": KVNumbers("int4", 4, "token", CHANNELS, scale_bytes=4),
}
ROUNDED = ("int8", "int4")
"""What `--kv-cache-dtype` names besides the model's own type."""
APART = ("int8/int4", "int4/int8")
"""What else it names: the keys', then the values'."""


def kv_format(name: str) -> KVFormat:
    """The row of a resolved name: "bfloat16", "int8", "int4", "int8/int4"."""
    k, _, v = name.partition("/")
    keys, values = (f"{each}-{axis}" for each, axis in ((k, "channel"), (v or k, "token")))
    return KVFormat(NUMBERS.get(keys) or NUMBERS[k], NUMBERS.get(values) or NUMBERS[v or k])
