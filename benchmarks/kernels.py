"""Linear layers beside what this machine can do: `python benchmarks/kernels.py [--threads 2]`.

Every linear layer of Qwen2.5-0.5B in each format, for 1, 8, 32 and 512 rows (`--rows`), beside
torch's own. A
cell is the time and its share of the ceiling: the weights' bytes over the bandwidth, or the
multiplications over the peak, whichever takes longer; both are measured in the same run. The peak
of a format is the best that its own kernel or torch reached on a GEMM that the caches hold.
`--formats` also knows those of others' checkpoints: "int4 fp32", "int4 zeros", "Q4_K", "Q5_K",
"Q6_K", "Q8_0", "int8 by 64" (inputs as W8A8 folders have them), "FP8", "FP8 blocks". Weights come
from memory: copies take turns. With one thread time is what it has computed, so other work on the
machine hardly counts. `--set` takes another instruction set than the best.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common import heading, line
from headway.core.machine import last_level_cache_bytes, processor_name
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.load import load, with_super_blocks
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.quantized import gguf_blocks
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import INT8, ROTATED_INT8, Format

SHAPES = {
    "qkv": (1152, 896),
    "out": (896, 896),
    "gate_up": (9728, 896),
    "down": (896, 4864),
    "head": (151_936, 896),
}
"""Layer → (outputs, inputs)."""
ROWS = (1, 8, 32, 512)
HEAD_ROWS = 64
PEAK_SHAPE = (1536, 896)
PEAK_ROWS = 480
"""Outputs, inputs and rows that the second cache holds."""
CASE_S, MOST_RUNS = 0.4, 200
Run = Callable[[Tensor, int], object]
Peaks = dict[str, float]
"""FLOP/s by column."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer in one format: `run(x, turn)`, the type of x, and the bytes it reads."""

    run: Run
    dtype: torch.dtype
    num_bytes: int


def turns(num_bytes: int) -> int:
    """Copies of a weight that no cache holds together."""
    return -(-3 * last_level_cache_bytes() // num_bytes)


def plain_case(dtype: torch.dtype, outputs: int, inputs: int) -> Case:
    """torch's own GEMM."""
    weight = torch.randn(outputs, inputs).to(dtype)
    copies = [weight.clone() for _ in range(turns(weight.nbytes))]
    return Case(
        lambda x, turn: functional.linear(x, copies[turn % len(copies)]), dtype, weight.nbytes
    )


def native_case(kernel: Any, dtype: torch.dtype, outputs: int, inputs: int) -> Case:
    """A native kernel's GEMM."""
    packed = kernel.prepare(torch.randn(outputs, inputs).to(dtype))
    copies = [
        dataclasses.replace(packed, panels=packed.panels.clone())
        for _ in range(turns(packed.nbytes))
    ]
    return Case(lambda x, turn: kernel(x, copies[turn % len(copies)], None), dtype, packed.nbytes)


def of_others(group: int) -> dict[str, Format]:
    """Column → a format that a checkpoint may hold; int4 by `group`, the GGUF ones as they are."""
    return {
        "int4 fp32": Format("int4", group, fp32_scales=True),
        "int4 zeros": Format("int4", group, offsets="zeros"),
        **{name: gguf_blocks.PACKINGS[name].format for name in ("Q4_K", "Q5_K", "Q6_K")},
        "Q8_0": Format("int8", 32),
        "int8 by 64": INT8,
        "FP8": Format("fp8"),
        "FP8 blocks": Format("fp8", 128),
    }


def rounded_case(library: NativeLibrary, format: Format, outputs: int, inputs: int) -> Case:
    """A native kernel's GEMM on numbers that only a checkpoint has: any do."""
    least, most = (-8, 8) if format.kind == "int4" else (-127, 128)
    levels = torch.randint(least, most, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs, -(-inputs // (format.group or inputs))).half().float()
    offsets = None if format.offsets == "none" else 3 * scales
    kernel: Any
    if format.kind == "fp8":
        levels, kernel = levels.to(torch.float8_e4m3fn), NativeFp8Linear(library, format)
    else:
        kernel = NativeQuantizedLinear(library, format)
    weight = RoundedWeight(levels, scales, format.group, offsets, kind=format.kind)
    if format.super_block:
        weight = with_super_blocks(weight, torch.Generator())
    packed = kernel.pack(weight)
    copies = [
        dataclasses.replace(packed, panels=packed.panels.clone())
        for _ in range(turns(packed.nbytes))
    ]
    return Case(
        lambda x, turn: kernel(x, copies[turn % len(copies)], None), torch.bfloat16, packed.nbytes
    )


def cases(library: NativeLibrary, group: int) -> dict[str, Callable[[int, int], Case]]:
    """Column → how to make its case for (outputs, inputs)."""
    linear = NativeLinear(library)
    rounded = {"int8": ROTATED_INT8, "int4": Format("int4", group)}

    def native(kernel: Any, dtype: torch.dtype) -> Callable[[int, int], Case]:
        return lambda outputs, inputs: native_case(kernel, dtype, outputs, inputs)

    def plain(dtype: torch.dtype) -> Callable[[int, int], Case]:
        return lambda outputs, inputs: plain_case(dtype, outputs, inputs)

    return {
        "f32": native(linear, torch.float32),
        "bf16": native(linear, torch.bfloat16),
        **{
            name: native(NativeQuantizedLinear(library, format), torch.bfloat16)
            for name, format in rounded.items()
        },
        "torch f32": plain(torch.float32),
        "torch bf16": plain(torch.bfloat16),
        **{
            name: partial(rounded_case, library, format)
            for name, format in of_others(group).items()
        },
    }


def best_s(run: Callable[[int], object], clock: Callable[[], float]) -> float:
    """The quickest of the runs that fit into the time."""
    best, ends_s = float("inf"), time.perf_counter() + CASE_S
    for turn in range(MOST_RUNS):
        before_s = clock()
        run(turn)
        best = min(best, clock() - before_s)
        if turn > 1 and time.perf_counter() > ends_s:
            break
    return best


def bandwidth(library: NativeLibrary, clock: Callable[[], float]) -> float:
    """Bytes/s: the best of torch and of the native kernels."""
    words = torch.ones(64 * 2**20)
    packed = native_case(NativeLinear(library), torch.float32, 65_536, 1024)
    x = torch.ones(1, 1024)
    read_s = best_s(lambda _: words.sum(), clock) / words.nbytes
    read_s = min(read_s, best_s(lambda turn: packed.run(x, turn), clock) / packed.num_bytes)
    return 1 / read_s


def peaks(columns: dict[str, Callable[[int, int], Case]], clock: Callable[[], float]) -> Peaks:
    """FLOP/s of each column; torch's and our own in one type share the better."""
    found: Peaks = {}
    for name, make in columns.items():
        case = make(*PEAK_SHAPE)
        x = torch.randn(PEAK_ROWS, PEAK_SHAPE[1]).to(case.dtype)
        spent_s = best_s(lambda _, x=x, case=case: case.run(x, 0), clock)
        kind = name.removeprefix("torch ")
        rate = 2 * PEAK_ROWS * PEAK_SHAPE[0] * PEAK_SHAPE[1] / spent_s
        found[kind] = max(found.get(kind, 0), rate)
    return {name: found[name.removeprefix("torch ")] for name in columns}


def main() -> None:
    """Measure and print one table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--group", type=int, default=64, help="int4: inputs that share a scale")
    parser.add_argument("--layers", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--set", help="avx2, say; the best by default")
    parser.add_argument("--formats", nargs="*", help="columns; by default our own formats")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    library, why = load(chosen.threads, chosen.set)
    if library is None:
        raise SystemExit(why)
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    columns = cases(library, chosen.group)
    default = [name for name in columns if name not in of_others(chosen.group)]
    columns = {name: columns[name] for name in chosen.formats or default}
    read, peak_of = bandwidth(library, clock), peaks(columns, clock)
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in peak_of.items())
    print(f"{processor_name()}, {library.instruction_set}, {chosen.threads} threads: ", end="")
    print(f"{read / 1e9:.1f} GB/s; GFLOP/s: {rates}; µs, share of the ceiling")
    cells: dict[tuple[int, str, str], str] = {}
    for layer in chosen.layers:
        outputs, inputs = SHAPES[layer]
        for column, make in columns.items():
            case = make(outputs, inputs)
            for rows in chosen.rows:
                if layer == "head" and rows > HEAD_ROWS:
                    continue
                x = torch.randn(rows, inputs).to(case.dtype)
                found_s = best_s(lambda turn, x=x, case=case: case.run(x, turn), clock)
                compute_s = 2 * rows * outputs * inputs / peak_of[column]
                ceiling_s = max(case.num_bytes / read, compute_s)
                cells[rows, layer, column] = f"{found_s * 1e6:,.0f} {ceiling_s / found_s:.0%}"
    for rows in chosen.rows:
        print(f"\n{heading([f'{rows} rows', *columns])}")
        for layer in chosen.layers:
            found = [cells.get((rows, layer, column), "–") for column in columns]
            print(line([f"{layer} {SHAPES[layer][0]}·{SHAPES[layer][1]}", *found]))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
