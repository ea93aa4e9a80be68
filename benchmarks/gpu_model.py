"""Whole models on a GPU: stages of `gpu_bringup.py`. Steps of each format with the share of what
memory and products reach, a server under load, the dearest kernels, and two peers over the same
shape: transformers' continuous batching, and a loop of plain torch in one CUDA graph, as gpt-fast
decodes, which is the limit of torch for one request.

Weights are made up. Without a GPU a tiny shape is run, so that the logic is tested.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "src" / "headway" / "embedded" / "headway-tiny"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    | {"tie_word_embeddings": True},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
Rows = list[dict[str, Any]]
PROMPT = 512
EAGER = {"graphs": False, "overlap": 0}
LADDER: list[tuple[str, dict[str, Any]]] = [
    ("none", EAGER),
    ("none", {"overlap": 0}),
    ("none", {}),
    ("none", {"kernels": "cublas"}),
    ("fp8", {}),
    ("int8", {}),
    ("int4", {}),
]
"""Formats and options of the runs of a model: what graphs, overlap and fewer bytes bring each, and
what one algorithm for every number of rows costs."""


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


@contextmanager
def shape_folder(name: str) -> Iterator[Path]:
    """A folder with the config of a shape, whose weights are made up, and a small tokenizer."""
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "eos_token_id": 1}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "config.json").write_text(json.dumps(config | SHAPES[name]), encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, folder / file)
        yield folder


def ceilings_here() -> tuple[float, float]:
    """(bytes a second of a copy, bf16 operations a second of a product) of this device."""
    import torch

    device = "cuda" if has_gpu() else "cpu"
    source = torch.ones(2**28 if has_gpu() else 2**20, dtype=torch.uint8, device=device)
    copied = 2 * len(source) / seconds_of(partial(torch.empty_like(source).copy_, source))
    n = 8192 if has_gpu() else 256
    x = torch.ones(n, n, dtype=torch.bfloat16, device=device)
    return copied, 2 * n**3 / seconds_of(lambda: x @ x)


def model(quick: bool) -> Rows:
    """Steps of made-up weights: decode by batch with what it reads, prefill, start."""
    from headway import LLM

    most = ceilings_here()
    large = ["llama-3.1-8b"] if quick else ["qwen2.5-0.5b", "llama-3.1-8b"]
    rows: Rows = []
    for name in large if has_gpu() else ["tiny"]:
        ladder = LADDER if name == "llama-3.1-8b" else LADDER[:3:2]
        for formats, how in ladder if has_gpu() else LADDER[2:3]:
            label = ", ".join([name, formats, *(f"{key} {value}" for key, value in how.items())])
            with shape_folder(name) as folder:
                options = {"load_format": "dummy", "skip_tokenizer_init": True}
                options |= {"prefix_cache": False, **(how if has_gpu() else {})}
                began_s = time.perf_counter()
                llm = LLM(str(folder), quantization=formats, max_model_len=2048, **options)
                start_s = time.perf_counter() - began_s
                rows.append({"what": f"{label}: start", "value": start_s, "unit": "s"})
                for batch in (1, 8, 32, 128) if has_gpu() else (1, 2):
                    rows += step_rows(llm, label, batch, name, formats, most)
                del llm
    return rows


def weights_of(name: str) -> tuple[float, float]:
    """(weights of the layers, of the head) of a shape."""
    shape = SHAPES[name]
    hidden, inner, heads = (
        shape[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv = 2 * hidden * shape["num_key_value_heads"] / heads
    layers = shape["num_hidden_layers"] * hidden * (2 * hidden + kv + 3 * inner)
    return layers, shape["vocab_size"] * hidden


def weight_bytes(name: str, formats: str) -> float:
    """What a step reads of the weights: int4 in groups of 64 takes 0.53 bytes, its head 1, as in
    int8; FP8 leaves the head in 16 bits."""
    layers, head = weights_of(name)
    bytes_of = {"none": (2, 2), "fp8": (1, 2), "int8": (1, 1), "int4": (0.53, 1)}[formats]
    return bytes_of[0] * layers + bytes_of[1] * head


def kv_bytes(name: str) -> float:
    """Of a token, in 16 bits."""
    shape = SHAPES[name]
    size = shape["hidden_size"] / shape["num_attention_heads"]
    return 4 * float(shape["num_hidden_layers"] * shape["num_key_value_heads"] * size)


def step_rows(
    llm: Any, label: str, batch: int, name: str, formats: str, most: tuple[float, float]
) -> Rows:
    """Decode and prefill of so many prompts of 512, from runs of 1 token and of more; MBU and MFU
    are shares of the copy and of the product that were measured just before."""
    from headway import SamplingParams

    took, counts = [], (1, 1, 65 if has_gpu() else 17)
    for turn, count in enumerate(counts):  # the first warms up
        first = 7 + 150 * turn
        prompts = [{"prompt_token_ids": [first + i % 150] * PROMPT} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began_s = time.perf_counter()
        llm.generate(prompts, params)
        took.append(time.perf_counter() - began_s)
    step_s = (took[2] - took[1]) / (counts[2] - counts[1])
    read = weight_bytes(name, formats) + batch * (PROMPT + counts[2] / 2) * kv_bytes(name)
    operations = 2 * weights_of(name)[0] * PROMPT * batch
    what = f"{label}, batch {batch}"
    return [
        {"what": f"{what}: decode", "value": batch / step_s, "unit": "tok/s"},
        {"what": f"{what}: weights and KV read", "value": read / step_s / 1e9, "unit": "GB/s"},
        {"what": f"{what}: MBU of a copy", "value": read / step_s / most[0]},
        {"what": f"{what}: prompts of 512", "value": PROMPT * batch / took[1], "unit": "tok/s"},
        {"what": f"{what}: MFU of a product", "value": operations / took[1] / most[1]},
    ]


def served(quick: bool) -> Rows:
    """A server of the 8B shape at rates that double until fewer than 90% are in their objectives;
    of the tiny shape, once, without a GPU."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import serving

    rows: Rows = []
    name, rates = ("llama-3.1-8b", (4, 8, 16, 32, 64)) if has_gpu() else ("tiny", (4,))
    best = 0.0
    with shape_folder(name) as folder, serving(folder, "--load-format=dummy") as (url, _):
        for rate in rates:
            found = at_rate(url, rate)
            share, goodput = found["attainment"], found["goodput_per_s"]
            rows.append({"what": f"{rate}/s: within TTFT 0.5 s and TPOT 50 ms", "value": share})
            rows.append({"what": f"{rate}/s: goodput", "value": goodput, "unit": "requests/s"})
            best = max(best, goodput if share >= 0.9 else 0.0)
            if share < 0.9:
                break
    return [*rows, {"what": "goodput at 90%, at least", "value": best, "unit": "requests/s"}]


def at_rate(url: str, rate: int) -> dict[str, float]:
    """What `headway bench` measures of ten seconds at this rate."""
    lengths = ["--input-len", "512" if has_gpu() else "32", "--output-len", "64"]
    count = ["--rate", str(rate), "--num-requests", str(10 * rate if has_gpu() else 8)]
    asked = ["--endpoint", "completions", "--slo", "ttft=500ms,tpot=50ms"]
    command = [sys.executable, "-m", "headway.cli.main", "bench", url]
    with tempfile.TemporaryDirectory() as given:
        told = Path(given) / "bench.json"
        ran = subprocess.run(
            [*command, *lengths, *count, *asked, "--json", str(told)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if ran.returncode:
            said = ran.stderr.strip()[-1000:]
            raise RuntimeError(f"headway bench: status {ran.returncode}: {said}")
        rates: dict[str, float] = json.loads(told.read_text(encoding="utf-8"))["rates"]
        return rates


def sanitized() -> Rows:
    """NVIDIA's compute-sanitizer over the smallest products, where it is installed."""
    program = shutil.which("compute-sanitizer")
    if program is None or not has_gpu():
        why = "no GPU: nothing to look at" if program else "not installed"
        return [{"what": "compute-sanitizer", "value": why}]
    names = "test_a_row_of_an_int4_product and 17"
    asked = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", names, "tests/gpu"]
    ran = subprocess.run(
        [program, "--tool", "memcheck", *asked], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line for line in ran.stdout.splitlines() if "ERROR SUMMARY" in line]
    said = lines[-1].strip("= ") if lines else f"status {ran.returncode}"
    return [{"what": "compute-sanitizer, a product of 17 rows", "value": said}]


def profile(quick: bool) -> Rows:
    """What ten decode steps spend their time in, by kernel."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    from headway import LLM, SamplingParams

    with shape_folder("llama-3.1-8b" if has_gpu() else "tiny") as folder:
        llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024)
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5] * 8}], params)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if has_gpu() else [])
        with recorded(activities=activities) as found:
            llm.generate([{"prompt_token_ids": [5] * 8}], params)
            if has_gpu():
                torch.cuda.synchronize()
    key = "self_device_time_total" if has_gpu() else "self_cpu_time_total"
    averages = sorted(found.key_averages(), key=lambda one: -getattr(one, key))[:10]
    rows: Rows = [
        {"what": one.key[:60], "value": getattr(one, key), "unit": "us"} for one in averages
    ]
    return rows + sanitized()


# ── peers over the same shape ───────────────────────────────────────────────────────────────


def peers(quick: bool) -> Rows:
    """A loop of plain torch in one graph for one request, and transformers for many."""
    from importlib.util import find_spec

    name = "llama-3.1-8b" if has_gpu() else "tiny"
    copied, _ = ceilings_here()
    step_s = torch_loop(name)
    read = weight_bytes(name, "none") + PROMPT * kv_bytes(name)
    rows: Rows = [
        {"what": "torch in one graph, batch 1: decode", "value": 1 / step_s, "unit": "tok/s"},
        {"what": "torch in one graph, batch 1: MBU of a copy", "value": read / step_s / copied},
    ]
    if find_spec("transformers") is None:
        return [*rows, {"what": "transformers", "value": "not installed"}]
    for batch in (32, 128) if has_gpu() else (2,):
        what = f"transformers' continuous batching, batch {batch}: tokens of answers"
        rows.append({"what": what, "value": by_transformers(name, batch), "unit": "tok/s"})
    return rows


def torch_loop(name: str) -> float:
    """Seconds of a decode step of one request over 512 tokens of a static cache."""
    import torch
    from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

    shape, device = SHAPES[name], "cuda" if has_gpu() else "cpu"
    hidden, inner, n, g = (
        shape[key]
        for key in (
            *("hidden_size", "intermediate_size"),
            *("num_attention_heads", "num_key_value_heads"),
        )
    )
    size, vocabulary, depth = hidden // n, shape["vocab_size"], shape["num_hidden_layers"]

    def drawn(*dims: int) -> Any:
        return torch.randn(*dims, device=device, dtype=torch.bfloat16) / 64

    table, head, one = drawn(vocabulary, hidden), drawn(vocabulary, hidden), drawn(hidden)
    shapes = ((n + 2 * g) * size, hidden), (hidden, n * size), (2 * inner, hidden), (hidden, inner)
    layers = [
        (*(drawn(*dims) for dims in shapes), drawn(2, 1, g, PROMPT, size)) for _ in range(depth)
    ]
    token = torch.zeros(1, dtype=torch.int64, device=device)
    at = torch.full((1,), PROMPT - 1, dtype=torch.int64, device=device)
    cos, sin = drawn(size // 2), drawn(size // 2)

    def rotated(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def step() -> None:
        x = embedding(token, table)
        for qkv, out, up, down, cache in layers:
            parts = linear(rms_norm(x, (hidden,), one), qkv).view(1, -1, 1, size)
            q, k, v = parts.split([n, g, g], 1)
            cache[0].index_copy_(2, at, rotated(k))
            cache[1].index_copy_(2, at, v)
            seen = scaled_dot_product_attention(rotated(q), cache[0], cache[1], enable_gqa=True)
            x = x + linear(seen.reshape(1, -1), out)
            gate, more = linear(rms_norm(x, (hidden,), one), up).chunk(2, -1)
            x = x + linear(silu(gate) * more, down)
        token.copy_(linear(rms_norm(x, (hidden,), one), head).argmax(-1))

    with torch.inference_mode():
        if not has_gpu():
            return seconds_of(step, 5)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return seconds_of(graph.replay, 50)


def by_transformers(name: str, batch: int) -> float:
    """Tokens of answers a second of prompts of 512 and answers of 64, all asked for at once."""
    import torch
    from transformers import (
        ContinuousBatchingConfig,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    room: dict[str, Any] = {}
    if not has_gpu():
        room = {"num_blocks": 16, "max_batch_tokens": 128}
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=8192, attn_implementation="sdpa")
    with torch.device("cuda" if has_gpu() else "cpu"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        peer = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(before)
    count = 64 if has_gpu() else 4
    asked = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    how = {"generation_config": asked, "warmup": has_gpu()}
    how["continuous_batching_config"] = ContinuousBatchingConfig(**room)
    prompts = [[7 + i] * (PROMPT if has_gpu() else 32) for i in range(batch)]
    began_s = time.perf_counter()
    told = peer.generate_batch(prompts, **how)
    took_s = time.perf_counter() - began_s
    return sum(len(one.generated_tokens) for one in told.values()) / took_s
