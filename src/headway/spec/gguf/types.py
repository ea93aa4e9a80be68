"""The number formats of GGUF: how many numbers a block of each holds, and in how many bytes.

A row of a matrix is a whole number of blocks. Q4_0 has blocks of 32 numbers: a scale in fp16 and
32 levels of 4 bits, 18 bytes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberType:
    """One format: its name, numbers in a block, bytes of a block."""

    name: str
    block: int
    size: int

    def bytes_of(self, count: int) -> int:
        """Bytes of `count` numbers, which fill their blocks: 64 in Q4_0 are 36."""
        return count // self.block * self.size


TYPES = {
    0: NumberType("F32", 1, 4),
    1: NumberType("F16", 1, 2),
    2: NumberType("Q4_0", 32, 18),
    3: NumberType("Q4_1", 32, 20),
    6: NumberType("Q5_0", 32, 22),
    7: NumberType("Q5_1", 32, 24),
    8: NumberType("Q8_0", 32, 34),
    9: NumberType("Q8_1", 32, 36),
    10: NumberType("Q2_K", 256, 84),
    11: NumberType("Q3_K", 256, 110),
    12: NumberType("Q4_K", 256, 144),
    13: NumberType("Q5_K", 256, 176),
    14: NumberType("Q6_K", 256, 210),
    15: NumberType("Q8_K", 256, 292),
    16: NumberType("IQ2_XXS", 256, 66),
    17: NumberType("IQ2_XS", 256, 74),
    18: NumberType("IQ3_XXS", 256, 98),
    19: NumberType("IQ1_S", 256, 50),
    20: NumberType("IQ4_NL", 32, 18),
    21: NumberType("IQ3_S", 256, 110),
    22: NumberType("IQ2_S", 256, 82),
    23: NumberType("IQ4_XS", 256, 136),
    24: NumberType("I8", 1, 1),
    25: NumberType("I16", 1, 2),
    26: NumberType("I32", 1, 4),
    27: NumberType("I64", 1, 8),
    28: NumberType("F64", 1, 8),
    29: NumberType("IQ1_M", 256, 56),
    30: NumberType("BF16", 1, 2),
    34: NumberType("TQ1_0", 256, 54),
    35: NumberType("TQ2_0", 256, 66),
    39: NumberType("MXFP4", 32, 17),
    40: NumberType("NVFP4", 64, 36),
    41: NumberType("Q1_0", 128, 18),
    42: NumberType("Q2_0", 64, 18),
}
"""By the number that stands in a file; numbers that are not here were withdrawn or are newer."""
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Formats that are not quantized, and what torch calls them."""
