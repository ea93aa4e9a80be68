"""Whether a row has the same bits alone and in any batch, and what it costs: a stage of
`gpu_bringup.py`, or alone: `python benchmarks/same_bits.py`.

Each linear format is compared over 22 numbers of rows from 2 to 256, each attention over decodes
of many lengths beside a long one. A price is the time over that of cuBLAS in 16 bits, which may
choose its algorithm by the number of rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headway.runtime.cuda.same_bits import (
    COUNTS,
    differing,
    differing_attention,
    format_differences,
)
from headway.runtime.kernels import reference
from headway.runtime.kernels.fp8_cuda import Fp8Linear
from headway.runtime.kernels.int4_cuda import Int4Linear
from headway.runtime.kernels.triton_linear import TritonLinear, WideningLinear
from headway.runtime.rounding import round_weight_fp8
from headway.spec.formats import Format

Rows = list[dict[str, Any]]


def rows_of(on_gpu: bool, seconds_of: Callable[..., float]) -> Rows:
    """Of each format and attention what the probe says, and the time beside cuBLAS's in 16 bits.

    On a CPU torch's formats in small sizes, so that the logic is tested.
    """
    device = "cuda" if on_gpu else "cpu"
    outputs, inputs = (14336, 4096) if on_gpu else (64, 128)
    counts = COUNTS if on_gpu else COUNTS[:8]
    draw = torch.Generator(device).manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=draw, device=device).bfloat16()
    x = torch.randn(4096 if on_gpu else 16, inputs, generator=draw, device=device).bfloat16()
    rows: Rows = []
    for name, product in products(weight, on_gpu).items():
        rows.append(
            {
                "what": f"{name}: bits",
                "value": format_differences(differing(product, x, counts), counts),
            }
        )
        for tokens in (1, 8, 64, 256, 4096) if on_gpu else (1, 16):
            took_s = seconds_of(partial(product, x[:tokens]), 10)
            fastest_s = seconds_of(partial(torch.matmul, x[:tokens], weight.T), 10)
            what = f"{name}: {tokens} rows, time over cuBLAS in 16 bits"
            rows.append({"what": what, "value": took_s / fastest_s})
    for name in ("triton", "varlen") if on_gpu else ("of torch, row by row",):
        attend = attention(name) if on_gpu else one_by_one
        rows.append(bits_of_attention(name, attend, device, counts))
    return rows


def bits_of_attention(
    name: str, attend: Callable[..., Any], device: str, counts: tuple[int, ...] = COUNTS
) -> dict[str, Any]:
    """What the probe says of it; of a library that does not run here, what it says."""
    try:
        found = differing_attention(attend, device, torch.bfloat16, (32, 8, 128), counts)
        said = format_differences(found, counts)
    except RuntimeError as error:
        said = f"does not run here: {' '.join(str(error).split())[:120]}"
    return {"what": f"attention {name}: bits", "value": said}


def products(weight: Any, on_gpu: bool) -> dict[str, Callable[[Any], Any]]:
    """Name → x · weightᵀ in each format that there is here; "dequantized" is what a switch to
    cuBLAS at many rows would take."""

    found: dict[str, Callable[[Any], Any]] = {
        "16 bits, cuBLAS": lambda x: reference.linear(x, weight, None)
    }
    kernels: dict[str, Callable[[], Any]] = {
        "fp8, scaled": lambda: Fp8Linear(Format("fp8"), torch.bfloat16),
    }
    if on_gpu:
        levels = round_weight_fp8(weight).levels_OH
        found["fp8 dequantized, cuBLAS"] = lambda x: x @ levels.to(x.dtype).T
        kernels |= {
            "16 bits, ours": TritonLinear,
            "int4": lambda: Int4Linear(Format("int4", 64), torch.bfloat16),
            "fp8": lambda: WideningLinear(Format("fp8"), torch.bfloat16),
        }
    for name, make in kernels.items():
        kernel = make()
        found[name] = partial(multiplied, kernel, kernel.prepare(weight))
    return found


def multiplied(kernel: Any, prepared: Any, x: Any) -> Any:
    """x times a prepared weight."""
    return kernel(x, prepared, None)


def attention(name: str) -> Callable[..., Any]:
    """A backend of a GPU, called with (q, k, v, starts, contexts, table, longest, longest)."""
    from headway.runtime.attention import BACKENDS
    from headway.runtime.cuda.triton.paged_attention import paged_attention

    def ours(q: Any, k: Any, v: Any, *how: Any) -> Any:
        return paged_attention(q, k, v, None, *how, scale=q.shape[-1] ** -0.5)

    backend: Any = BACKENDS[name]()
    return ours if name == "triton" else backend.attend_paged


def one_by_one(
    q: Any, k: Any, v: Any, starts: Any, lens: Any, table: Any, longest: int, context: int
) -> Any:
    """Decodes in plain torch, one after the other."""
    found = []
    for row, length in enumerate(lens.tolist()):
        keys, values = (x[table[row].long()].flatten(0, 1)[:length].float() for x in (k, v))
        queries = q[row].float().unflatten(0, (k.shape[2], -1))
        weights = torch.einsum("gnd,tgd->gnt", queries, keys).softmax(-1)
        found.append(torch.einsum("gnt,tgd->gnd", weights, values).flatten(0, 1).to(q.dtype))
    return torch.stack(found)


if __name__ == "__main__":
    from gpu_model import has_gpu, seconds_of

    for row in rows_of(has_gpu(), seconds_of):
        print(f"{row['what']}: {row['value']}")
    if not has_gpu():
        print("No GPU: torch sees no CUDA device. Nothing above is a figure of one.")
