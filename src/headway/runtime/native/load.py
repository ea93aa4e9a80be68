"""Load the native kernels, after each operation was checked once on small inputs.

An instruction set that computes wrongly on this CPU is skipped, and the next one or torch takes its
place. A missing or unusable module is a reason that `describe()` reports, never an error.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.attention.cache import KVLayer
from headway.runtime.attention.int4 import allocate_int4
from headway.runtime.attention.native import NativeAttention, NativeKVLayer
from headway.runtime.attention.protocol import AttentionRule
from headway.runtime.attention.reference import ReferenceAttention, causal_attention
from headway.runtime.batch import Batch
from headway.runtime.native.available import best_instruction_set
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.layers import NativeLayers, layers_are_right
from headway.runtime.native.library import TYPES, NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.lower import lower
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.native.sampling import sampling_is_right
from headway.runtime.rounding import (
    SUPER_BLOCK,
    RoundedWeight,
    SuperBlocks,
    dequantized_rows,
    round_weight,
)
from headway.spec import KVGroupSpec
from headway.spec.formats import GROUPS, INT8, ROTATED_INT8, Format
from headway.spec.kv_format import APART, kv_format

CHECKED = (
    Format("int4", 32, offsets="zeros"),
    Format("int4", 128, fp32_scales=True, offsets="any"),
    Format("int8", 16, permuted=True),
    Format("int8", 32, fp32_scales=True, offsets="any"),
    Format("int4", 32, fp32_scales=True, offsets="any", super_block=SUPER_BLOCK),
    Format("int8", 16, fp32_scales=True, super_block=SUPER_BLOCK),
)
"""Formats of checkpoints: each way to store levels, scales and offsets."""


def load(threads: int, instruction_set: str | None = None) -> tuple[NativeLibrary | None, str]:
    """Return (the library or None, the reason)."""
    best, why = best_instruction_set()
    if not best:
        return None, why
    from headway.runtime.native import _native

    names = _native.instruction_sets()
    for name in [instruction_set] if instruction_set else names:
        if name not in names:
            return None, f"this CPU does not run {name}"
        try:
            calls = _native.Kernels(name, threads)
            library = NativeLibrary(calls, name, calls.lanes())
            if is_right(library):
                return library, f"compiled for {name}"
        except (AttributeError, TypeError) as error:
            return None, f"the native kernels are of another version ({error}): install again"
    return None, "the native kernels gave a wrong result here"


def is_right(library: NativeLibrary) -> bool:
    """Return whether the results of all operations are those of torch."""
    gemms = (linear_is_right, quantized_is_right, fp8_is_right)
    attention = (attention_is_right, rounded_kv_is_right)
    rest = (programs_are_right, layers_are_right, sampling_is_right)
    return all(check(library) for check in (*gemms, *attention, *rest))


def linear_is_right(library: NativeLibrary) -> bool:
    """Return whether a small GEMM has the result of torch."""
    draw = torch.Generator().manual_seed(0)
    kernel = NativeLinear(library)
    for dtype in TYPES:
        x, weight = (torch.randn(size, 33, generator=draw).to(dtype) for size in (7, 45))
        actual = kernel(x, kernel.prepare(weight), None).float()
        if not torch.allclose(actual, x.float() @ weight.float().T, rtol=2e-2, atol=2e-1):
            return False
    return True


def quantized_is_right(library: NativeLibrary) -> bool:
    """Return whether GEMMs on rounded weights of every layout have the result of torch.

    17 rows are enough to be multiplied in tiles, where the instruction set has tiles.
    """
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 5 * 128, generator=draw) for size in (17, 45))
    ours = INT8, ROTATED_INT8, *(Format("int4", group) for group in GROUPS)
    for format in (*ours, *CHECKED):
        rounded = in_format(format, round_weight(weight, format.group, format.rotated), draw)
        kernel = NativeQuantizedLinear(library, format)
        ordered = x if rounded.order_H is None else x[:, rounded.order_H]
        levels = dequantized_rows(ordered, format)
        expected = levels @ replace(rounded, order_H=None).plain().T
        for rows in (1, 17):
            actual = kernel(x[:rows], kernel.pack(rounded), None)
            if not torch.allclose(actual, expected[:rows], rtol=1e-4, atol=1e-3):
                return False
    return True


def in_format(format: Format, weight: RoundedWeight, draw: torch.Generator) -> RoundedWeight:
    """Return the weight with offsets, an order and scales of the format."""
    if format.ours:
        return weight
    order = torch.randperm(weight.levels_OH.shape[1], generator=draw) if format.permuted else None
    offsets = None if format.offsets == "none" else 3 * weight.scales_OG
    weight = replace(weight, offsets_OG=offsets, order_H=order, kind=format.kind)
    return with_super_blocks(weight, draw) if format.super_block else weight


def with_super_blocks(weight: RoundedWeight, draw: torch.Generator) -> RoundedWeight:
    """Return the weight with random scales of super-blocks, and minima where it has offsets."""
    parts, (outputs, groups) = 1 if weight.offsets_OG is None else 2, weight.scales_OG.shape
    each = SUPER_BLOCK // weight.group
    supers = SuperBlocks(
        torch.randint(64, (parts, outputs, groups), generator=draw, dtype=torch.int8),
        torch.rand(parts, outputs, -(-groups // each), generator=draw).half() / 64,
    )
    scales, offsets = supers.scales_and_offsets(weight.kind, weight.group)
    return replace(weight, scales_OG=scales, offsets_OG=offsets, supers=supers)


def fp8_is_right(library: NativeLibrary) -> bool:
    """Return whether every number of type e4m3 is multiplied exactly, by few and many rows."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.arange(254, dtype=torch.uint8) % 127 + torch.arange(254).gt(126) * 128
    levels = codes.to(torch.uint8).repeat(45, 1).view(torch.float8_e4m3fn)
    for group in (0, 128):
        scales = torch.rand(45, 2 if group else 1, generator=draw) + 0.5
        weight = RoundedWeight(levels, scales, group)
        kernel = NativeFp8Linear(library, weight.format)
        x = torch.randn(17, 254, generator=draw).bfloat16().float()
        expected = x.double() @ weight.plain().double().T
        for rows in (1, 17):
            actual = kernel(x[:rows], kernel.pack(weight), None)
            if not torch.allclose(actual.double(), expected[:rows], rtol=1e-4, atol=1e-2):
                return False
    return True


def programs_are_right(library: NativeLibrary) -> bool:
    """Return whether a program has the results of its operations called one by one."""
    layers, linear = NativeLayers(library), NativeLinear(library)
    draw, nothing = torch.Generator().manual_seed(0), torch.zeros(0, dtype=torch.int64)
    for dtype in TYPES:
        table, weight = (torch.randn(n, 33, generator=draw).to(dtype) for n in (7, 33))
        packed = linear.prepare(weight)

        def forward(token_ids_T: Tensor, table: Tensor = table, packed: Any = packed) -> Tensor:
            x_TH = functional.embedding(token_ids_T, table)
            return x_TH + linear(layers.rms_norm(x_TH, table[0], 1e-6), packed, None)

        program, _ = lower(forward, library, dtype)
        batch = Batch(
            token_ids_T=torch.tensor([6, 0, 3]),
            positions_T=nothing,
            slots_GT=[nothing],
            block_tables_GSB=[nothing[None]],
            query_lens=[3],
            context_lens=[3],
            num_decodes=0,
            sampled_rows=[],
            sampled_sequences=[],
        )
        if program is None or not torch.equal(program(batch), forward(batch.token_ids_T)):
            return False
    return True


def attention_is_right(library: NativeLibrary) -> bool:
    """Return whether causal attention is right in each type of KV: 41 tokens, 6 heads on 2."""
    draw, rule = torch.Generator().manual_seed(0), AttentionRule(scale=0.3, softcap=5.0)
    slots, blocks = torch.arange(16, 57), torch.arange(1, 4)
    for dtype, kv_dtype in [*zip(TYPES, TYPES, strict=True), (torch.bfloat16, torch.int8)]:
        q, k, v = (torch.randn(41, heads, 20, generator=draw).to(dtype) for heads in (6, 2, 2))
        layer = NativeKVLayer.zeros((4, 16, 2, 20), 0, kv_dtype, "cpu")
        batch = Batch(
            token_ids_T=slots,
            positions_T=slots - 16,
            slots_GT=[slots],
            block_tables_GSB=[blocks[None]],
            query_lens=[41],
            context_lens=[41],
            num_decodes=0,
            sampled_rows=[],
            sampled_sequences=[],
        )
        actual = NativeAttention(library).attend(q, k, v, layer, batch, rule).float()
        expected = causal_attention(q.float(), k.float(), v.float(), rule)
        if not torch.allclose(actual, expected, rtol=5e-2, atol=5e-2):
            return False
    return True


def rounded_kv_is_right(library: NativeLibrary) -> bool:
    """Return whether attention over int4 KV, and mixed int4 and int8, is that of the reference.

    Of 150 tokens 128 are rounded.
    """
    draw, rule = torch.Generator().manual_seed(0), AttentionRule(scale=0.3)
    slots, blocks = torch.arange(64, 214), torch.arange(1, 4)
    group = KVGroupSpec(layers=(0,), num_kv_heads=2, head_dim=32)
    rows = [*((dtype, "int4") for dtype in TYPES), *((torch.bfloat16, name) for name in APART)]
    for dtype, name in rows:
        q, k, v = (torch.randn(150, heads, 32, generator=draw).to(dtype) for heads in (6, 2, 2))
        batch = Batch(
            token_ids_T=slots,
            positions_T=slots - 64,
            slots_GT=[slots] * 2,
            block_tables_GSB=[blocks[None]] * 2,
            query_lens=[150],
            context_lens=[150],
            num_decodes=0,
            sampled_rows=[],
            sampled_sequences=[],
        )
        kinds: tuple[type[KVLayer], ...] = NativeKVLayer, KVLayer
        layers = [
            allocate_int4((group,), (4, 4), kv_format(name), dtype, kind)[0] for kind in kinds
        ]
        actual = NativeAttention(library).attend(q, k, v, layers[0], batch, rule).float()
        expected = ReferenceAttention().attend(q, k, v, layers[1], batch, rule).float()
        if not torch.allclose(actual, expected, rtol=5e-2, atol=5e-2):
            return False
        if not all(map(rounded_alike, *(layer.parts for layer in layers))):
            return False
    return True


def rounded_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether levels or scales are equal; int8 levels may differ by one."""
    if one.dtype == torch.int8:
        return bool((one.int() - other).abs().max() <= 1)
    return torch.equal(one, other)
