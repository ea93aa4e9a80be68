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
    served     headway bench          profile    the ten dearest kernels of a decode step
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
    "profile": 50,
}
QUICK = ("versions", "ceilings", "tests", "same_bits", "model", "tiny")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    | {"tie_word_embeddings": True},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
Rows = list[dict[str, Any]]


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def seconds_of(call: Callable[[], Any], times: int = 20) -> float:
    """Median seconds of a call, by events on a GPU; 3 calls before are not counted."""
    import torch

    on_gpu = has_gpu()
    found = []
    for turn in range(times + 3):
        if on_gpu:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            call()
            ended.record()
            ended.synchronize()
            took_s = begun.elapsed_time(ended) / 1000
        else:
            began_s = time.perf_counter()
            call()
            took_s = time.perf_counter() - began_s
        if turn >= 3:
            found.append(took_s)
    return sorted(found)[len(found) // 2]


# ── stages ──────────────────────────────────────────────────────────────────────────────────


def versions(quick: bool) -> Rows:
    """Versions, the device, whether our own kernels run."""
    import importlib.util
    import platform

    import torch

    from headway.runtime.cuda.available import own_kernels

    rows = [{"what": "python", "value": platform.python_version()}]
    rows.append({"what": "torch", "value": torch.__version__})
    if importlib.util.find_spec("triton") is not None:
        import triton

        rows.append({"what": "triton", "value": triton.__version__})
    rows.append({"what": "own kernels", "value": own_kernels()[1]})
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
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "tests/parity"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines() or ["nothing was said"]
    failed = [line for line in lines if line.startswith("FAILED")]
    return [{"what": "pytest -m gpu", "value": lines[-1]}, *({"what": f} for f in failed)]


def kernels(quick: bool) -> Rows:
    """Attention and 4-bit products of ours beside torch's, by rows and context."""
    import torch

    if not has_gpu():
        return [{"what": "kernels", "value": "no GPU: nothing to time"}]
    from headway.runtime.cuda.triton.linear_int4 import linear_int4, pack
    from headway.runtime.cuda.triton.paged_attention import paged_attention
    from headway.runtime.rounding import round_weight

    rows: Rows = []
    for num_rows in (1, 8, 32, 128):
        for context in (512, 4096) if num_rows > 8 else (512, 4096, 32768):
            q, k, v, starts, lens, table = attention_inputs(num_rows, context)
            inputs = (q, k, v, None, starts, lens, table, 1, context)
            took_s = seconds_of(partial(paged_attention, *inputs, scale=0.1))
            moved = 2 * num_rows * context * 8 * 128 * 2
            rows.append(
                {"what": f"attention, {num_rows} rows, context {context}"}
                | {"value": moved / took_s / 1e9, "unit": "GB/s of KV"}
            )
    weight = torch.randn(14336, 4096, device="cuda")
    packed, plain = pack(round_weight(weight, 64)), weight.bfloat16()
    for tokens in (1, 16, 64, 512, 4096):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        ours = seconds_of(partial(linear_int4, x, packed, None))
        cublas = seconds_of(partial(torch.matmul, x, plain.T))
        rows.append({"what": f"int4 beside bf16, {tokens} rows", "value": cublas / ours})
    return rows


def same_bits(quick: bool) -> Rows:
    """Each linear format and both attentions: whether a row's bits depend on how many stand beside
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


def write_shape(name: str, folder: Path) -> Path:
    """A folder with the config of a shape, whose weights are made up."""
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    (folder / "config.json").write_text(json.dumps(config | SHAPES[name]), encoding="utf-8")
    return folder


EAGER = {"graphs": False, "overlap": 0}
LADDER: list[tuple[str, dict[str, Any]]] = [
    ("none", EAGER),
    ("none", {"overlap": 0}),
    ("int4", {}),
    ("none", {}),
]
"""Formats and options of the runs of a model: what graphs and overlap bring each."""


def model(quick: bool) -> Rows:
    """Steps of made-up weights: decode by batch with the weights' bytes a second, and prefill."""
    from headway import LLM

    large = ["llama-3.1-8b"] if quick else ["qwen2.5-0.5b", "llama-3.1-8b"]
    rows: Rows = []
    for name in large if has_gpu() else ["tiny"]:
        for formats, how in LADDER if has_gpu() else LADDER[-1:]:
            label = ", ".join([name, formats, *(f"{key} {value}" for key, value in how.items())])
            with tempfile.TemporaryDirectory() as folder:
                write_shape(name, Path(folder))
                options = {"load_format": "dummy", "skip_tokenizer_init": True}
                options |= {"prefix_cache": False, **(how if has_gpu() else {})}
                began_s = time.perf_counter()
                llm = LLM(folder, quantization=formats, max_model_len=2048, **options)
                start_s = time.perf_counter() - began_s
                rows.append({"what": f"{label}: start", "value": start_s, "unit": "s"})
                for batch in (1, 8, 32, 128) if has_gpu() else (1, 2):
                    rows += step_rows(llm, label, batch, weight_bytes(name, formats))
                del llm
    return rows


def weight_bytes(name: str, formats: str) -> float:
    """What a step reads of the weights; int4 in groups of 64 takes 0.53 bytes, its head 1."""
    shape = SHAPES[name]
    hidden, inner, heads = (
        shape[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv = 2 * hidden * shape["num_key_value_heads"] / heads
    layers = shape["num_hidden_layers"] * hidden * (2 * hidden + kv + 3 * inner)
    head = shape["vocab_size"] * hidden
    return 2 * (layers + head) if formats == "none" else 0.53 * layers + head


def step_rows(llm: Any, label: str, batch: int, read: float) -> Rows:
    """Decode and prefill of so many prompts of 512, from runs of 1 token and of more."""
    from headway import SamplingParams

    took, counts = [], (1, 1, 65 if has_gpu() else 17)
    for turn, count in enumerate(counts):  # the first warms up
        first = 7 + 150 * turn
        prompts = [{"prompt_token_ids": [first + i % 150] * 512} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began_s = time.perf_counter()
        llm.generate(prompts, params)
        took.append(time.perf_counter() - began_s)
    step_s = (took[2] - took[1]) / (counts[2] - counts[1])
    what = f"{label}, batch {batch}"
    return [
        {"what": f"{what}: decode", "value": batch / step_s, "unit": "tok/s"},
        {"what": f"{what}: weights read", "value": read / step_s / 1e9, "unit": "GB/s"},
        {"what": f"{what}: prompts of 512", "value": 512 * batch / took[1], "unit": "tok/s"},
    ]


def tiny(quick: bool) -> Rows:
    """The embedded model in each format: what it answers."""
    from headway import LLM, SamplingParams
    from headway.core.embedded import model_folder

    rows = []
    for formats in ("none", "int8", "int4"):
        llm = LLM(model_folder(None), quantization=formats)
        asked = [[{"role": "user", "content": "What is 2 + 3?"}]]
        (answer,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=16))
        rows.append({"what": f"2 + 3, {formats}", "value": answer.outputs[0].text})
        del llm
    return rows


def served(quick: bool) -> Rows:
    """A server of the 8B shape under `headway bench`; of the embedded model without a GPU."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import serving

    with serving("") as (url, _), tempfile.TemporaryDirectory() as out:
        report = Path(out) / "report.json"
        command = [sys.executable, "-m", "headway.cli.main", "bench", url, "--num-requests", "20"]
        ran = subprocess.run(
            [*command, "--json", str(report)], capture_output=True, text=True, cwd=ROOT
        )
    if ran.returncode:
        raise RuntimeError(f"headway bench: status {ran.returncode}: {ran.stderr.strip()[-1000:]}")
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    return [{"what": "headway bench", "value": f"status {ran.returncode}"}] + [
        {"what": line.strip()} for line in lines[-20:]
    ]


def profile(quick: bool) -> Rows:
    """What ten decode steps spend their time in, by kernel."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    from headway import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_shape("llama-3.1-8b" if has_gpu() else "tiny", Path(folder))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024)
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5] * 8}], params)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if has_gpu() else [])
        with recorded(activities=activities) as found:
            llm.generate([{"prompt_token_ids": [5] * 8}], params)
            if has_gpu():
                torch.cuda.synchronize()
    key = "self_device_time_total" if has_gpu() else "self_cpu_time_total"
    averages = sorted(found.key_averages(), key=lambda one: -getattr(one, key))[:10]
    return [{"what": one.key[:60], "value": getattr(one, key), "unit": "us"} for one in averages]


STAGES: dict[str, Callable[[bool], Rows]] = {
    stage.__name__: stage
    for stage in (versions, ceilings, tests, kernels, same_bits, model, tiny, served, profile)
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
    names = [name for name in given.stages.split(",") if name] or (QUICK if given.quick else STAGES)
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
