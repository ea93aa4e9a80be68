"""Scales of GGUF's K formats: bytes times a number in fp16 for 256 inputs."""

import pytest
import torch

from headway.runtime.quantized import gguf_blocks
from headway.runtime.quantized.matrix import common_format
from headway.runtime.rounding import RoundedWeight, SuperBlocks
from headway.spec.formats import Format
from headway.spec.gguf.types import TYPES

BY_NAME = {each.name: each for each in TYPES.values()}
K_FORMATS = ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]


def some_blocks(name: str, rows: int, blocks: int) -> torch.Tensor:
    """Bytes of a matrix with any scales: a NaN of fp16 only where a byte of 7F is drawn."""
    draw = torch.Generator().manual_seed(0)
    shape = (rows, blocks * BY_NAME[name].size)
    return torch.randint(0, 0x7C, shape, generator=draw, dtype=torch.uint8)


def test_scales_and_offsets_are_products_rounded_once():
    codes = torch.tensor([[[63, 1]], [[2, 0]]], dtype=torch.int8)
    factors = torch.tensor([[[0.5]], [[0.25]]], dtype=torch.float16)
    scales, offsets = SuperBlocks(codes, factors).scales_and_offsets("int4", 32)
    assert scales.tolist() == [[31.5, 0.5]]
    assert offsets is not None and offsets.tolist() == [[8 * 31.5 - 0.5, 4.0]]
    scales, offsets = SuperBlocks(codes[:1], factors[:1]).scales_and_offsets("int8", 16)
    assert scales.tolist() == [[31.5, 0.5]] and offsets is None


@pytest.mark.parametrize("name", K_FORMATS)
def test_rows_read_in_pieces_are_those_read_at_once(monkeypatch, name):
    raw, type = some_blocks(name, 7, 3), BY_NAME[name]
    whole = gguf_blocks.unpack(raw, type)
    monkeypatch.setattr(gguf_blocks, "NUMBERS_PER_PASS", 2 * 3 * type.block)
    pieces = gguf_blocks.unpack(raw, type)
    assert whole.format == pieces.format == gguf_blocks.PACKINGS[name].format
    assert torch.equal(whole.plain(), pieces.plain())
    some = whole.rows(slice(2, 5))
    assert some.supers is not None and whole.supers is not None
    assert torch.equal(some.supers.codes_KOG, whole.supers.codes_KOG[:, 2:5])
    assert torch.equal(some.plain(), whole.plain()[2:5])


def test_parts_without_super_blocks_make_a_matrix_without():
    """q in Q4_K beside k in Q4_1: scales and offsets in fp32 for both."""
    q = gguf_blocks.unpack(some_blocks("Q4_K", 4, 1), BY_NAME["Q4_K"])
    k = gguf_blocks.unpack(some_blocks("Q4_1", 2, 8), BY_NAME["Q4_1"])
    format = common_format([q.format, k.format])
    assert format == Format("int4", 32, fp32_scales=True, offsets="any")
    joined = RoundedWeight.joined([q, k])
    assert joined.supers is None and joined.fits(format)
    assert torch.equal(joined.plain(), torch.cat([q.plain(), k.plain()]))
    assert common_format([q.format, q.format]) == q.format
