"""Linear layers beside what this machine can do: `python benchmarks/kernels.py [--threads 2]`.

Every linear layer of Qwen2.5-0.5B in each format, for 1, 8, 32 and 512 rows (`--rows`), beside
torch's own. A
cell is the time and its share of the ceiling: the weights' bytes over the bandwidth, or the
multiplications over the peak, whichever takes longer; both are measured in the same run. The peak
of int8 is taken as twice that of fp32, int4's as three times: AVX2 needs 4 and 2.3 instructions for
32 products, fp32 4 (and adds on the way), VNNI one. Weights come from memory: copies take turns.
With one thread time is what it has computed, so other work on the machine hardly counts.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headway.core.machine import last_level_cache_bytes, processor_name
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.load import load
from headway.runtime.native.quantized import NativeQuantizedLinear

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
PEAKS = {"int8": 2.0, "int4": 3.0}
"""Multiplications per second, as multiples of those in fp32."""
CASE_S, MOST_RUNS = 0.4, 200
Run = Callable[[Tensor, int], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer in one format: `run(x, turn)`, the type of x, and the bytes it reads."""

    run: Run
    dtype: torch.dtype
    num_bytes: int
    peak: float = 1.0


def turns(num_bytes: int) -> int:
    """Copies of a weight that no cache holds together."""
    return -(-3 * last_level_cache_bytes() // num_bytes)


def plain_case(dtype: torch.dtype, outputs: int, inputs: int) -> Case:
    """torch's own product."""
    weight = torch.randn(outputs, inputs).to(dtype)
    copies = [weight.clone() for _ in range(turns(weight.nbytes))]
    return Case(
        lambda x, turn: functional.linear(x, copies[turn % len(copies)]), dtype, weight.nbytes
    )


def native_case(kernel: Any, dtype: torch.dtype, peak: float, outputs: int, inputs: int) -> Case:
    """A native kernel's product."""
    packed = kernel.prepare(torch.randn(outputs, inputs).to(dtype))
    copies = [
        dataclasses.replace(packed, panels=packed.panels.clone())
        for _ in range(turns(packed.nbytes))
    ]
    return Case(
        lambda x, turn: kernel(x, copies[turn % len(copies)], None), dtype, packed.nbytes, peak
    )


def cases(library: NativeLibrary, group: int) -> dict[str, Callable[[int, int], Case]]:
    """Column → how to make its case for (outputs, inputs)."""
    linear = NativeLinear(library)
    rounded = {"int8": 0, "int4": group}

    def native(kernel: Any, dtype: torch.dtype, peak: float = 1.0) -> Callable[[int, int], Case]:
        return lambda outputs, inputs: native_case(kernel, dtype, peak, outputs, inputs)

    def plain(dtype: torch.dtype) -> Callable[[int, int], Case]:
        return lambda outputs, inputs: plain_case(dtype, outputs, inputs)

    return {
        "f32": native(linear, torch.float32),
        "bf16": native(linear, torch.bfloat16),
        **{
            name: native(NativeQuantizedLinear(library, size), torch.bfloat16, PEAKS[name])
            for name, size in rounded.items()
        },
        "torch f32": plain(torch.float32),
        "torch bf16": plain(torch.bfloat16),
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


def ceilings(library: NativeLibrary, clock: Callable[[], float]) -> tuple[float, float]:
    """(bytes/s, FLOP/s in fp32): the best of torch and of the native kernels."""
    words = torch.ones(64 * 2**20)
    packed = native_case(NativeLinear(library), torch.float32, 1.0, 65_536, 1024)
    x, size = torch.ones(1, 1024), 512
    square = torch.randn(size, size)
    kernel = NativeLinear(library)
    weight = kernel.prepare(square)
    read_s = best_s(lambda _: words.sum(), clock) / words.nbytes
    read_s = min(read_s, best_s(lambda turn: packed.run(x, turn), clock) / packed.num_bytes)
    works = [lambda _: square @ square, lambda _: kernel(square, weight, None)]
    multiply_s = min(best_s(work, clock) for work in works)
    return 1 / read_s, 2 * size**3 / multiply_s


def main() -> None:
    """Measure and print one table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--group", type=int, default=64, help="int4: inputs that share a scale")
    parser.add_argument("--layers", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--formats", nargs="*", help="columns; all by default")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    library, why = load(chosen.threads)
    if library is None:
        raise SystemExit(why)
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    bandwidth, peak = ceilings(library, clock)
    print(f"{processor_name()}, {library.instruction_set}, {chosen.threads} threads: ", end="")
    print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s in fp32; µs, share of the ceiling")
    columns = cases(library, chosen.group)
    columns = {name: columns[name] for name in chosen.formats or columns}
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
                compute_s = 2 * rows * outputs * inputs / (peak * case.peak)
                ceiling_s = max(case.num_bytes / bandwidth, compute_s)
                cells[rows, layer, column] = f"{found_s * 1e6:,.0f} {ceiling_s / found_s:.0%}"
    for rows in chosen.rows:
        print(f"\n| {rows} rows | {' | '.join(columns)} |")
        print(f"| {' | '.join(['---'] * (len(columns) + 1))} |")
        for layer in chosen.layers:
            line = [cells.get((rows, layer, column), "–") for column in columns]
            print(f"| {layer} {SHAPES[layer][0]}·{SHAPES[layer][1]} | {' | '.join(line)} |")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
