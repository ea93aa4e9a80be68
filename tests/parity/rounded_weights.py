"""Any rounded matrix of a format."""

import torch

from headway.runtime.rounding import SUPER_BLOCK, RoundedWeight, SuperBlocks
from headway.spec.formats import Format


def some_weight(format: Format, outputs: int, inputs: int, seed: int = 0) -> RoundedWeight:
    """Any numbers that the format holds."""
    draw = torch.Generator().manual_seed(seed)
    least, most = (-8, 8) if format.kind == "int4" else (-128, 128)
    levels = torch.randint(least, most, (outputs, inputs), generator=draw, dtype=torch.int8)
    groups = -(-inputs // format.group) if format.group else 1
    scales = torch.randn(outputs, groups, generator=draw) / inputs**0.5
    if format.group and not format.fp32_scales:
        scales = scales.half().float()
    offsets = None
    if format.offsets == "zeros":
        offsets = scales * torch.randint(-7, 9, scales.shape, generator=draw)
    elif format.offsets == "any":
        offsets = torch.randn(outputs, groups, generator=draw) / inputs**0.5
    if format.super_block:
        kinds = 1 if format.offsets == "none" else 2
        supers = SuperBlocks(
            torch.randint(-64, 64, (kinds, outputs, groups), generator=draw, dtype=torch.int8),
            torch.randn(kinds, outputs, -(-inputs // SUPER_BLOCK), generator=draw).half() / 64,
        )
        scales, offsets = supers.scales_and_offsets(format.kind, format.group)
        return RoundedWeight(levels, scales, format.group, offsets, kind=format.kind, supers=supers)
    order = torch.randperm(inputs, generator=draw) if format.permuted else None
    return RoundedWeight(levels, scales, format.group, offsets, order, format.kind)
