"""Each kernel compiles for the GPUs we name without one being here, and keeps to registers.

`triton.compile` gives PTX and machine code of a target; Triton's own cuobjdump tells what it takes.
"""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway.runtime.cuda.triton.draw import draw_kernel
from headway.runtime.cuda.triton.fused import add_norm_kernel, rope_write_kernel
from headway.runtime.cuda.triton.layers import gated_kernel, rms_norm_kernel, rope_kernel
from headway.runtime.cuda.triton.linear import linear_kernel, warps_of
from headway.runtime.cuda.triton.linear_int4 import linear_kernel as int4_kernel
from headway.runtime.cuda.triton.paged_attention import (
    CHUNK_WARPS,
    LATENT_HEADS,
    LATENT_KEYS,
    LATENT_WARPS,
    attend_kernel,
    merge_kernel,
)

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a program may have at most, by compute capability."""
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction of a tile of 64 rows or more; smaller ones are mma.sync on all."""
POINTERS = {
    **dict.fromkeys("out x q k v weight gate_up bias".split(), "*bf16"),
    **dict.fromkeys("sink_logits".split(), "*bf16"),
    **dict.fromkeys("part_out part_max part_sum cos sin offsets k_scale v_scale".split(), "*fp32"),
    **dict.fromkeys("starts contexts table tiles".split(), "*i32"),
    **dict.fromkeys("total more k_memory v_memory".split(), "*bf16"),
    **dict.fromkeys("logits temperatures log_min_p top_p".split(), "*fp32"),
    **dict.fromkeys("chosen slots top_k".split(), "*i64"),
    **{"u": "*fp64", "greedy": "*i1"},
    "packed": "*u8",
    "scales": "*fp16",
}
FLOATS = {"eps", "scale", "softcap"}
ALIGNED = {"H", "x_stride"}
"""Sizes that are multiples of 16 in models, as Triton sees for itself at a call."""
COMMON: dict[str, Any] = {"TYPE": tl.bfloat16}
DECODE = {
    **{"N": 32, "G": 8, "D": 128, "BLOCK_D": 128, "PAGE": 16, "BLOCK_Q": 1, "BLOCK_M": 16},
    **{"E": 0, "BLOCK_E": 16, "HEADS": 4},
    **{"BLOCK_N": 64, "SPLIT_KEYS": 512, "APART": True, "SOFTCAP": False, "WINDOW": False},
    **{"SINKS": False, "SINK_LOGITS": False, "INT8": False, "DOT": tl.bfloat16},
}
LATENT = {
    **{**DECODE, "N": 128, "G": 1, "D": 512, "BLOCK_D": 512, "E": 64, "BLOCK_E": 64},
    **{"HEADS": LATENT_HEADS, "BLOCK_M": LATENT_HEADS, "BLOCK_N": LATENT_KEYS},
}
CHUNK = {**DECODE, "BLOCK_Q": 16, "BLOCK_M": 64, "APART": False}
INT4 = {
    **{"GROUP": 64, "BLOCK_T": 64, "BLOCK_O": 64, "OFFSETS": False, "BIAS": True},
    **{"EXPERTS": False, "DOT": tl.bfloat16},
}
LINEAR = {
    **{"KIND": "plain", "STEP": 64, "STEPS_A_GROUP": 0, "EVEN": True, "BLOCK_T": 64},
    **{"BLOCK_O": 128, "TOGETHER": 8, "BIAS": True, "EXPERTS": False, "DOT": tl.bfloat16},
}
FP8 = {**LINEAR, "KIND": "fp8", "scales": "*fp32", "weight": "*u8"}
BY_BLOCK = {**FP8, "STEPS_A_GROUP": 2, "BLOCK_O": 64}
INT8 = {**LINEAR, "KIND": "int8", "scales": "*fp32", "weight": "*i8"}
FP16 = {**dict.fromkeys(("out", "x", "weight", "bias"), "*fp16"), "TYPE": tl.float16}
FP32 = {**dict.fromkeys(("out", "x", "weight", "bias"), "*fp32"), "TYPE": tl.float32}
HEAD = {"out": "*fp32", "TYPE": tl.float32}
"""Logits are fp32; products are taken in the model's type."""
KERNELS: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "decode": (attend_kernel, DECODE, 2, 16),
    "decode, cap, window, int8": (
        attend_kernel,
        {**DECODE, "SOFTCAP": True, "WINDOW": True, "SINKS": True, "INT8": True, "D": 96},
        2,
        16,
    ),
    "chunk": (attend_kernel, CHUNK, 2, 64),
    "chunk of heads of 256": (
        attend_kernel,
        {**CHUNK, "D": 256, "BLOCK_D": 256, "BLOCK_N": 32},
        2,
        64,
    ),
    "latent, decode": (attend_kernel, LATENT, 2, 16),
    "latent, chunk": (attend_kernel, {**LATENT, "APART": False}, 2, 16),
    "merge": (merge_kernel, {"N": 32, "D": 128, "BLOCK_D": 128, "SINK_LOGITS": True}, 2, 0),
    "norm": (rms_norm_kernel, {"OFFSET": 0.0, "H": 4096, "BLOCK": 4096}, 2, 0),
    "gate": (gated_kernel, {"GELU": True, "BLOCK": 1024}, 2, 0),
    "rope": (rope_kernel, {"N": 32, "D": 128, "HALF": 64, "BLOCK_N": 32, "BLOCK_D": 128}, 2, 0),
    "sum and norm": (add_norm_kernel, {"OFFSET": 0.0, "H": 4096, "BLOCK": 4096}, 2, 0),
    "rope and write": (
        rope_write_kernel,
        {
            **{"N": 32, "G": 8, "D": 128, "HALF": 64},
            **{"BLOCK_N": 32, "BLOCK_G": 8, "BLOCK_D": 128},
        },
        2,
        0,
    ),
    "draw": (draw_kernel, {"BLOCK": 2048}, 2, 0),
    "int4": (int4_kernel, INT4, 3, 64),
    "int4, experts": (int4_kernel, {**INT4, "EXPERTS": True}, 3, 64),
    "16 bits": (linear_kernel, LINEAR, 3, 64),
    "16 bits, few outputs": (linear_kernel, {**LINEAR, "BLOCK_O": 32, "EVEN": False}, 3, 64),
    "16 bits, experts": (linear_kernel, {**LINEAR, "BLOCK_O": 32, "EXPERTS": True}, 3, 64),
    "fp32": (linear_kernel, {**LINEAR, **FP32, "BLOCK_O": 32, "DOT": tl.float32}, 3, 0),
    "head": (linear_kernel, {**LINEAR, **HEAD}, 3, 64),
    "head, int4": (int4_kernel, {**INT4, **HEAD}, 3, 64),
    "head, fp8": (linear_kernel, {**FP8, **HEAD}, 3, 64),
    "fp8": (linear_kernel, FP8, 3, 64),
    "fp8 beside fp16": (linear_kernel, {**FP16, **FP8, "DOT": tl.float16}, 3, 64),
    "fp8 by 128": (linear_kernel, BY_BLOCK, 3, 64),
    "fp8 by 128, wide": (linear_kernel, {**BY_BLOCK, "BLOCK_O": 128}, 3, 64),
    "fp8 by 128, experts": (linear_kernel, {**BY_BLOCK, "EXPERTS": True}, 3, 64),
    "int8 by 32, experts": (
        linear_kernel,
        {**INT8, "STEP": 32, "STEPS_A_GROUP": 1, "BLOCK_O": 32, "EXPERTS": True},
        3,
        64,
    ),
}
"""Kernel, constants and types of pointers that differ, stages, rows of its products."""


def compiled(name: str, capability: int) -> Any:
    """The kernel for one GPU; its pointers are aligned, as torch's are."""
    kernel, constants, stages, _ = KERNELS[name]
    own = {key: value for key, value in constants.items() if str(value).startswith("*")}
    constants = {**COMMON, **constants}
    constants = {key: value for key, value in constants.items() if key not in own}
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in POINTERS:
            int8 = constants.get("INT8") and argument in ("k", "v")
            signature[argument] = "*i8" if int8 else own.get(argument, POINTERS[argument])
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
            if argument in ALIGNED:
                attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {key: value for key, value in constants.items() if key in signature}
    source = ASTSource(kernel, signature, constants, attributes)
    warps = CHUNK_WARPS if name.startswith(("chunk", "draw")) else 4
    warps = LATENT_WARPS if name.startswith("latent") else warps
    warps = warps_of(constants["BLOCK_O"]) if kernel is linear_kernel else warps
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def usage(binary: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack and shared memory, as the machine code says."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
    )
    return {key: int(count) for key, count in re.findall(r"(REG|STACK|SHARED):(\d+)", told.stdout)}


def check(name: str, capability: int, folder: Path) -> None:
    made, rows = compiled(name, capability), KERNELS[name][3]
    taken = usage(made.asm["cubin"], folder)
    assert taken["STACK"] == 0, f"spills: {taken}"
    assert taken["REG"] <= 255 and made.metadata.shared <= SHARED_BYTES[capability], taken
    if rows:
        wanted = PRODUCTS[capability] if rows >= 64 else "mma.sync"
        assert wanted in made.asm["ptx"], f"no {wanted}"


@pytest.mark.parametrize("name", ["norm", "decode"])
def test_kernels_compile_for_hopper(name: str, tmp_path: Path):
    check(name, 90, tmp_path)


@pytest.mark.hardening
@pytest.mark.parametrize("capability", PRODUCTS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_every_gpu(name: str, capability: int, tmp_path: Path):
    check(name, capability, tmp_path)
