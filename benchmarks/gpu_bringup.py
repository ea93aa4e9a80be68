"""The first ten minutes on a GPU: `python benchmarks/gpu_bringup.py --out OUT [--quick]`.

Every stage is a process of its own with a limit: what crashes or hangs there is noted, and the next
one goes on. OUT/report.json and OUT/report.md have everything; a table is printed last. It wants no
network: torch and Triton are the machine's own (2.11 with 3.6 will do), other packages come from
`--wheels FOLDER`. Kernels are compiled into OUT/triton, which may be carried along. Without a GPU
it says so, and runs the same stages on the CPU with small shapes, so that its logic is tested.

    versions   what is there          ceilings   copy, products, launches
    tests      pytest -m gpu          kernels    ours beside torch's, by size
    same_bits  a row alone and among others, and what one algorithm for all costs
    model      decode, prefill        tiny       golden tokens in each format
    served     headway bench          peers      torch in one graph, transformers
    profile    the ten dearest kernels of a decode step
    flashinfer the extra, where it is installed and `--stages` names it
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_model import Rows, has_gpu, model, peers, profile, seconds_of, served

ROOT = Path(__file__).resolve().parents[1]
LIMITS_S = {
    "versions": 30,
    "ceilings": 30,
    "tests": 90,
    "kernels": 60,
    "same_bits": 60,
    "model": 100,
    "tiny": 50,
    "served": 80,
    "peers": 50,
    "profile": 50,
    "flashinfer": 900,
}
BY_NAME = ("flashinfer",)
"""Stages that run where `--stages` names them."""
QUICK = ("versions", "ceilings", "tests", "same_bits", "model", "tiny")
# ── stages ──────────────────────────────────────────────────────────────────────────────────


def versions(quick: bool) -> Rows:
    """Versions, the device, whether our own kernels run."""
    import importlib.util
    import platform

    import torch

    from headway.runtime.cuda.available import check_own_kernels

    rows = [{"what": "python", "value": platform.python_version()}]
    rows.append({"what": "torch", "value": torch.__version__})
    if importlib.util.find_spec("triton") is not None:
        import triton

        rows.append({"what": "triton", "value": triton.__version__})
    rows.append({"what": "own kernels", "value": check_own_kernels()[1]})
    if has_gpu():
        free, total = torch.cuda.mem_get_info()
        rows.append({"what": "device", "value": torch.cuda.get_device_name()})
        rows.append({"what": "free GiB of", "value": f"{free / 2**30:.1f} {total / 2**30:.1f}"})
    return rows


def ceilings(quick: bool) -> Rows:
    """What memory, products and launches reach, in torch alone."""
    import torch

    device = "cuda" if has_gpu() else "cpu"
    size = 2**28 if has_gpu() else 2**20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took_s = seconds_of(lambda: target.copy_(source))
    rows = [{"what": "copy", "value": 2 * size / took_s / 1e9, "unit": "GB/s"}]
    n = 8192 if has_gpu() else 256
    x = torch.ones(n, n, dtype=torch.bfloat16, device=device)
    took_s = seconds_of(lambda: x @ x)
    rows.append({"what": "bf16 product", "value": 2 * n**3 / took_s / 1e12, "unit": "TFLOP/s"})
    y = torch.ones(n, n, dtype=torch.int8, device=device)
    took_s = seconds_of(lambda: torch._int_mm(y, y.T), 5)
    rows.append({"what": "int8 product", "value": 2 * n**3 / took_s / 1e12, "unit": "TOP/s"})
    one = torch.ones(1, device=device)
    took_s = seconds_of(lambda: [one.add_(1) for _ in range(100)], 5) / 100
    rows.append({"what": "launch", "value": took_s * 1e6, "unit": "us"})
    if has_gpu():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                one.add_(1)
        rows.append({"what": "graph node", "value": seconds_of(graph.replay) * 1e4, "unit": "us"})
    return rows


def tests(quick: bool) -> Rows:
    """`pytest -m gpu`: kernels against the reference, the engine's tokens, transfers."""
    return gpu_tests("not flashinfer")


def gpu_tests(names: str) -> Rows:
    """What pytest says last, and what failed, of the tests of a GPU with such names."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not hardening", "-k", names]
    ran = subprocess.run(
        [*command, "tests/gpu", "tests/parity"], cwd=ROOT, capture_output=True, text=True
    )
    lines = ran.stdout.strip().splitlines() or ["nothing was said"]
    failed = [line for line in lines if line.startswith("FAILED")]
    return [{"what": "pytest -m gpu", "value": lines[-1]}, *({"what": f} for f in failed)]


def kernels(quick: bool) -> Rows:
    """Our attention beside torch's, and 4-bit products beside cuBLAS's, by rows and context."""
    import torch

    if not has_gpu():
        return [{"what": "kernels", "value": "no GPU: nothing to time"}]
    from headway.runtime.cuda.triton.linear_int4 import linear_int4, pack
    from headway.runtime.rounding import round_weight

    rows = attention_rates(("triton", "varlen"))
    weight = torch.randn(14336, 4096, device="cuda")
    packed, plain = pack(round_weight(weight, 64)), weight.bfloat16()
    for tokens in (1, 16, 64, 512, 4096):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        ours = seconds_of(partial(linear_int4, x, packed, None))
        cublas = seconds_of(partial(torch.matmul, x, plain.T))
        rows.append({"what": f"int4 beside bf16, {tokens} rows", "value": cublas / ours})
    return rows


def flashinfer(quick: bool) -> Rows:
    """The extra's attention: its tests, its bits, its rates beside ours; it compiles for minutes
    before, so it runs where it is asked for by name."""
    from importlib.util import find_spec

    if find_spec("flashinfer") is None:
        return [{"what": "flashinfer", "value": "not installed: pip install headway[flashinfer]"}]
    if not has_gpu():
        return [{"what": "flashinfer", "value": "no GPU: nothing to run"}]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from same_bits import attention, bits_of_attention

    rows = gpu_tests("flashinfer")
    rows.append(bits_of_attention("flashinfer", attention("flashinfer"), "cuda"))
    return rows + attention_rates(("triton", "flashinfer"))


def attention_rates(names: tuple[str, ...]) -> Rows:
    """Decodes by rows and context: bytes of KV a second by each backend."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from same_bits import attention

    rows: Rows = []
    calls = {name: attention(name) for name in names}
    for num_rows in (1, 8, 32, 128):
        for context in (512, 4096) if num_rows > 8 else (512, 4096, 32768):
            inputs = (*attention_inputs(num_rows, context), 1, context)
            moved = 2 * num_rows * context * 8 * 128 * 2
            for name, attend in calls.items():
                what = f"attention {name}, {num_rows} rows, context {context}"
                rows.append({"what": what} | rate_of(partial(attend, *inputs), moved))
    return rows


def rate_of(call: Callable[[], Any], moved: float) -> dict[str, Any]:
    """Bytes of KV a second; of a library that does not run here, what it says."""
    try:
        return {"value": moved / seconds_of(call) / 1e9, "unit": "GB/s of KV"}
    except RuntimeError as error:
        return {"value": f"does not run here: {' '.join(str(error).split())[:120]}"}


def same_bits(quick: bool) -> Rows:
    """Each linear format and attention: whether a row's bits depend on how many stand beside
    it, and how long one algorithm takes beside the fastest there is."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from same_bits import rows_of

    return rows_of(has_gpu(), seconds_of)


def attention_inputs(num_rows: int, context: int) -> tuple[Any, ...]:
    """Decodes of 32 query and 8 KV heads of 128 over pages of 16, in random order."""
    import torch

    pages = num_rows * context // 16
    k, v = torch.randn(2, pages + 1, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_rows, 32, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(num_rows + 1, device="cuda", dtype=torch.int32)
    lens = torch.full((num_rows,), context, device="cuda", dtype=torch.int32)
    table = (torch.randperm(pages, device="cuda").int() + 1).view(num_rows, -1)
    return q, k, v, starts, lens, table


def tiny(quick: bool) -> Rows:
    """The embedded model in each format: what it answers."""
    from headway import LLM, SamplingParams
    from headway.spec.embedded import model_folder

    rows = []
    for formats in ("none", "int8", "int4"):
        llm = LLM(model_folder(None), quantization=formats)
        asked = [[{"role": "user", "content": "What is 2 + 3?"}]]
        (answer,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=16))
        rows.append({"what": f"2 + 3, {formats}", "value": answer.outputs[0].text})
        del llm
    return rows


STAGES: dict[str, Callable[[bool], Rows]] = {
    stage.__name__: stage
    for stage in (
        *(versions, ceilings, tests, kernels, same_bits, model, tiny, served, peers, profile),
        flashinfer,
    )
}


# ── the run ─────────────────────────────────────────────────────────────────────────────────


def run_stage(name: str, out: Path, quick: bool) -> dict[str, Any]:
    """The stage in a process of its own: its rows, or why there are none."""
    began_s = time.monotonic()
    source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": source, "TRITON_CACHE_DIR": str(out / "triton")}
    command = [sys.executable, __file__, "--out", str(out), "--child", name]
    found: dict[str, Any] = {"stage": name, "limit_s": LIMITS_S[name], "rows": [], "failure": ""}
    try:
        ran = subprocess.run(
            command + ["--quick"] * quick,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMITS_S[name],
        )
        if ran.returncode:
            found["failure"] = f"status {ran.returncode}: {ran.stderr.strip()[-2000:]}"
        else:
            found["rows"] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    except subprocess.TimeoutExpired:
        found["failure"] = f"took more than {LIMITS_S[name]} s"
    found["took_s"] = round(time.monotonic() - began_s, 1)
    return found


def as_markdown(report: list[dict[str, Any]], on_gpu: bool) -> str:
    """The report as text: a table of stages, and one of each stage's rows."""
    head = (
        "" if on_gpu else "No GPU here: these are a CPU's figures, of the script's logic alone.\n\n"
    )
    lines = ["# GPU bring-up\n", head + "| stage | s | |", "| --- | --- | --- |"]
    for one in report:
        said = one["failure"].splitlines()[-1][:120] if one["failure"] else "ok"
        lines.append(f"| {one['stage']} | {one['took_s']} | {said} |")
    for one in report:
        lines += [f"\n## {one['stage']}\n", "| what | value | unit |", "| --- | --- | --- |"]
        for row in one["rows"]:
            value = row.get("value", "")
            shown = f"{value:,.3g}" if isinstance(value, float) else str(value)
            lines.append(f"| {row['what']} | {shown} | {row.get('unit', '')} |")
    return "\n".join(lines) + "\n"


def install(wheels: Path) -> None:
    """What the engine needs, from a folder and no network."""
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, *files], check=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the stages, write the reports, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--quick", action="store_true", help="half the stages, in five minutes")
    parser.add_argument("--stages", default="", help=f"some of {', '.join(STAGES)}")
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.child:
        rows = STAGES[given.child](given.quick)
        (given.out / f"{given.child}.json").write_text(json.dumps(rows), encoding="utf-8")
        return
    whole = QUICK if given.quick else [name for name in STAGES if name not in BY_NAME]
    names = [name for name in given.stages.split(",") if name] or whole
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        parser.error(f"--stages: {unknown[0]} is none of {', '.join(STAGES)}")
    if given.wheels is not None:
        install(given.wheels)
    report = []
    for name in names:
        print(f"{name} …", flush=True)
        report.append(run_stage(name, given.out, given.quick))
        text = json.dumps({"has_gpu": has_gpu(), "stages": report}, indent=1)
        (given.out / "report.json").write_text(text, encoding="utf-8")
        (given.out / "report.md").write_text(as_markdown(report, has_gpu()), encoding="utf-8")
    print((given.out / "report.md").read_text(encoding="utf-8"))
    if not has_gpu():
        print("No GPU: torch sees no CUDA device. Nothing above is a figure of one.")


if __name__ == "__main__":
    main()
