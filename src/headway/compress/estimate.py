"""Estimate of a quantization before it begins: size of the folder, time, memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.compress.recipe import Recipe
from headway.compress.rows import TOKENS_AT_ONCE, RowModel
from headway.spec import DTYPE_BYTES
from headway.spec.formats import PLAIN, Format

BASE_BYTES = 400 * 2**20
"""Memory of the interpreter with torch."""
PROBE_SIZE, PROBE_S = 768, 0.3
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of the folder's weights, seconds of work, bytes of peak memory."""

    file_bytes: int
    seconds: float
    memory_bytes: int
    bits: float
    """Bits of a rounded weight of the layers, with scales."""


def matrix_bytes(format: Format, outputs: int, inputs: int, dtype: str) -> int:
    """Return the bytes of a matrix in a file: 896 × 896 in int4 by 64 takes 426,496."""
    if format == PLAIN:
        return outputs * inputs * DTYPE_BYTES[dtype]
    groups = inputs // format.group if format.group else 1
    return outputs * (inputs * (4 if format.kind == "int4" else 8) // 8 + groups * SCALE_BYTES)


def file_bytes(model: RowModel, formats: Mapping[str, Format]) -> tuple[int, float]:
    """Return (bytes of all tensors, bits of a rounded weight of the layers)."""
    dtype, total, bits, count = model.spec.dtype, 0, 0.0, 0
    for name in model.tensors:
        shape = model.tensors.shape(name)
        module = name.removesuffix(".weight")
        format = formats.get(module, PLAIN) if name.endswith(".weight") else PLAIN
        size = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
        if format != PLAIN:
            size = matrix_bytes(format, shape[0], shape[1], dtype)
        if ".layers." in name and module in formats and "router" not in module:
            bits, count = bits + 8 * size, count + torch.Size(shape).numel()
        total += size
    head = formats.get("lm_head", PLAIN)
    if "lm_head.weight" not in model.tensors and head != PLAIN:
        total += matrix_bytes(head, model.spec.vocab_size, model.spec.hidden_size, dtype)
    return total, bits / count if count else 0.0


def estimate(
    model: RowModel, recipe: Recipe, formats: Mapping[str, Format], rows: int, length: int
) -> Estimate:
    """Estimate from the FLOPs of each part, at the measured rate of a product."""
    spec, tokens = model.spec, rows * length
    flops = float(spec.flops(tokens, length // 2, 0))
    widest, layer_weights = 0, 0
    for name in model.tensors:
        shape = model.tensors.shape(name)
        if len(shape) != 2 or ".layers." not in name:
            continue
        outputs, inputs = shape
        layer_weights += outputs * inputs
        widest = max(widest, inputs)
        if recipe.method == "gptq":
            flops += 2.0 * outputs * inputs**2 * len(recipe.formats)
    moments = [spec.hidden_size, spec.hidden_size, spec.q_size, spec.intermediate_size]
    flops += spec.num_layers * sum(1.4 * tokens * size**2 + 4 * size**3 for size in moments)
    held_bytes = 2 * tokens * spec.hidden_size * 4 + 3 * layer_weights // spec.num_layers * 4
    transient_bytes = TOKENS_AT_ONCE * 4 * (3 * spec.intermediate_size + 4 * spec.hidden_size)
    size, bits = file_bytes(model, formats)
    return Estimate(
        file_bytes=size,
        seconds=flops / product_rate(),
        memory_bytes=BASE_BYTES + held_bytes + max(transient_bytes, 6 * widest**2 * 4),
        bits=bits,
    )


def product_rate() -> float:
    """Return FLOP/s of an fp32 product, the best of several runs."""
    a = torch.ones(PROBE_SIZE, PROBE_SIZE)
    best, end = float("inf"), time.perf_counter() + PROBE_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return float(2 * PROBE_SIZE**3 / best)


def use_threads(count: int) -> None:
    """Torch's own threads, of this process."""
    torch.set_num_threads(count)
