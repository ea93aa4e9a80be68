"""In which formats a linear layer can hold its weights."""

from dataclasses import dataclass
from typing import Literal

FORMATS = ("none", "int8", "int4", "fp8")
"""What `--quantization` rounds plain weights to; fp8 on a GPU alone."""
METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4")
"""How a folder may be quantized already; `--quantization` may say it, and then it must be so."""
GGUF = "gguf"
"""The method of a GGUF file, which no folder has."""
MARLIN = {"gptq_marlin": "gptq", "awq_marlin": "awq"}
"""vLLM's names of kernels that people give as a method → the method."""
FP8 = ("exact", "int8", "scaled")
"""What `--fp8` makes of a checkpoint's matrices in FP8."""
GROUPS = (32, 64, 128)
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Layers that hold several matrices of a checkpoint, one below the other."""

Kind = Literal["none", "int8", "int4", "fp8"]
Offsets = Literal["none", "zeros", "any"]


@dataclass(frozen=True, slots=True)
class Format:
    """How one linear layer holds its weights, and the inputs that share a scale.

    weight = level · scale + offset, where there are offsets. `group` 0: all inputs of an output
    share a scale, which is fp32 then. Scales of groups are fp16, or with `fp32_scales` fp32.
    `offsets` are "none", "zeros", which are a scale times a whole number of -8 … 8 and take a byte,
    or "any" in fp32. With `permuted` the levels stand in another order of the inputs. In GGUF's K
    formats a scale is a byte times a number in fp16 for `super_block` inputs, and so is the minimum
    that an offset is made of (`rounding.SuperBlocks`). fp8 has numbers of type e4m3 for levels, and
    fp32 scales. With `rotated` weights and inputs are multiplied with a Hadamard matrix before they
    are rounded (`rounding.rotate`). A checkpoint may hold any but that; of our own making are int8
    with group 0, rotated on a CPU, int4 by one of GROUPS, and on a GPU fp8 with group 0.
    """

    kind: Kind = "none"
    group: int = 0
    fp32_scales: bool = False
    offsets: Offsets = "none"
    permuted: bool = False
    super_block: int = 0
    rotated: bool = False

    def __str__(self) -> str:
        words = [f"{self.kind} in groups of {self.group}" if self.group else str(self.kind)]
        words += ["fp32 scales"] if self.fp32_scales else []
        words += [f"{self.offsets} offsets"] if self.offsets == "any" else []
        words += ["zeros"] if self.offsets == "zeros" else []
        words += ["permuted"] if self.permuted else []
        words += ["rotated"] if self.rotated else []
        words += [f"super-blocks of {self.super_block}"] if self.super_block else []
        return ", ".join(words)

    @property
    def ours(self) -> bool:
        """Whether plain weights can be rounded to it at load."""
        if self.group in GROUPS:
            return self == Format("int4", self.group)
        return self in (INT8, ROTATED_INT8)

    @property
    def block(self) -> int:
        """Inputs of a row that share a scale where activations are rounded to int8.

        An outlier costs its block's neighbours their last bits, so blocks are short; a rotation
        spreads it over 64 inputs, and then 512 can share a scale (docs/kernels.md).
        """
        if self.rotated:
            return 512
        return 32 if 0 < self.group <= 32 else 64

    @property
    def unit(self) -> int:
        """Inputs whose products are added up as integers: those that share both scales."""
        return min(self.group or self.block, self.block)

    @property
    def at_load(self) -> "Format":
        """What plain weights beside a checkpoint's of this format are rounded to."""
        if self.ours or self.kind in ("none", "fp8"):
            return self if self.ours else PLAIN
        if self.kind == "int8":
            return INT8
        return Format("int4", self.group if self.group in GROUPS else 64)

    def num_bytes(self, outputs: int, inputs: int, packed: bool = True) -> int:
        """Bytes of one matrix: 896 · 896 take 806,400 in int8, 426,496 in int4 by 64.

        Torch's own kernels keep levels as bytes and all else in fp32: not packed.
        """
        assert self.kind != "none", "its bytes are those of the model's type"
        groups = -(-inputs // self.group) if self.group else 1
        order = 4 * inputs if self.permuted else 0
        if not packed or not self.group or self.kind == "fp8":
            offset = 0 if self.offsets == "none" else 4
            return outputs * (inputs + groups * (4 + offset)) + order
        levels = self.group // 2 if self.kind == "int4" else self.group
        if self.super_block:
            numbers = 1 if self.offsets == "none" else 2
            supers = -(-inputs // self.super_block)
            return outputs * numbers * (groups + 2 * supers) + outputs * groups * levels + order
        scale = 4 if self.fp32_scales else 2
        offset = {"none": 0, "zeros": 1, "any": 4}[self.offsets]
        return outputs * groups * (levels + scale + offset) + order


PLAIN, INT8 = Format(), Format("int8")
ROTATED_INT8 = Format("int8", rotated=True)
