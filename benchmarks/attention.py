"""MHA, GQA, MQA and a window as numbers of one attention layer: `python benchmarks/attention.py`.

One shape (16 query heads of 64, fp32), of which only `num_key_value_heads` and `sliding_window`
change. A decode step attends over contexts of 512, 2k and 8k tokens at batch 1 and 8, in blocks in
random places. So many layers take turns that no cache holds them, as in a model. Beside each time
stands the ceiling: the bytes of K and V that must be read over the bandwidth measured here. Time is
what one thread has computed, so other work on the machine hardly counts.
"""

import argparse
import math
import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from common import heading
from headway.config.memory_plan import gib
from headway.config.options import EngineOptions
from headway.config.resolve import resolve
from headway.core.machine import probe_machine
from headway.runtime.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionRule,
    KVLayer,
    choose_attention,
)
from headway.runtime.attention.int4 import allocate_int4, memory_of
from headway.runtime.batch import Batch
from headway.runtime.kernels import choose_kernels
from headway.runtime.layers import Attention, Build
from headway.runtime.native.available import best_instruction_set
from headway.spec import KVGroupSpec, ModelSpec, spec_from_config
from headway.spec.kv_format import APART, ROUNDED, kv_format

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
WINDOW: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
VARIANTS: dict[str, dict[str, Any]] = {
    "MHA, 16 KV heads": {"num_key_value_heads": 16},
    "GQA, 4 KV heads": {"num_key_value_heads": 4},
    "MQA, 1 KV head": {"num_key_value_heads": 1},
    "MHA, window 1024": {"num_key_value_heads": 16, **WINDOW},
    "GQA 4, window 1024": {"num_key_value_heads": 4, **WINDOW},
}
CONTEXTS, BATCHES = (512, 2048, 8192), (1, 8)
BLOCK_SIZE = 16
BEYOND_CACHES_BYTES = 192 * 2**20
STEP_LAYERS = 4
"""Layers of one step: what a step prepares once is shared by so many."""


class Bench:
    """One variant: its layer, and KV memory for one context and batch."""

    def __init__(self, config: dict[str, Any], backend: str) -> None:
        self.spec: ModelSpec = spec_from_config({**SHAPE, **config}, {})
        options = EngineOptions(device="cpu", threads=1, attention_backend=backend)
        machine = probe_machine(None, best_instruction_set())
        settings, _ = resolve(options, machine, self.spec)
        kernels = choose_kernels(settings, machine)
        self.attention, _ = choose_attention(settings, kernels.library)
        build = Build(
            spec=self.spec,
            kernels=kernels,
            attention=self.attention,
            dtype=torch.float32,
            device="cpu",
        )
        self.layer = Attention(build, 0)

    def bytes_read(self, context: int, batch: int) -> int:
        """K and V that a step must read in one layer."""
        (group,) = self.spec.kv_groups
        return batch * group.seen(context) * group.bytes_per_token("float32")

    def step_s(self, context: int, batch: int, repeats: int) -> float:
        """Median seconds of one layer's attention in a decode step."""
        layers = self._memory(context, batch)
        times = []
        for repeat in range(repeats + 1):
            step = self._step(context, batch)
            q, k, v = self._rows(batch)
            chosen = [layers[(repeat * STEP_LAYERS + i) % len(layers)] for i in range(STEP_LAYERS)]
            started = time.process_time()
            for memory in chosen:
                self.layer.backend.attend(q, k, v, memory, step, self.layer.rule)
            times.append((time.process_time() - started) / STEP_LAYERS)
        return statistics.median(times[1:])

    def _memory(self, context: int, batch: int) -> list[KVLayer]:
        """Layers whose K and V together are beyond every cache, filled."""
        count = math.ceil(BEYOND_CACHES_BYTES / self.bytes_read(context, batch))
        blocks = 1 + batch * context // BLOCK_SIZE
        shape = (blocks, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        return [
            filled(self.attention, shape, torch.float32) for _ in range(max(count, STEP_LAYERS))
        ]

    def _rows(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads
        q, k, v = (torch.randn(batch, count, self.spec.head_dim) for count in heads)
        return q, k, v

    def _step(self, context: int, batch: int) -> Batch:
        """One new token for each of `batch` sequences of `context` tokens."""
        return step_of(batch, 1, context)


def step_of(batch: int, length: int, context: int, size: int = BLOCK_SIZE) -> Batch:
    """`length` new tokens for each of `batch` sequences of `context`, in scattered blocks."""
    per_sequence = context // size
    generator = torch.Generator().manual_seed(0)
    tables = 1 + torch.randperm(batch * per_sequence, generator=generator)
    tables = tables.view(batch, per_sequence)
    at = torch.arange(context - length, context)
    slots = (tables[:, at // size] * size + at % size).flatten()
    return Batch(
        token_ids_T=slots,
        positions_T=slots,
        slots_GT=[slots],
        block_tables_GSB=[tables],
        query_lens=[length] * batch,
        context_lens=[context] * batch,
        num_decodes=batch if length == 1 else 0,
        sampled_rows=[],
        sampled_sequences=[],
    )


def filled(
    backend: AttentionBackend, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> KVLayer:
    """A layer's memory with a number everywhere, so that every page is there."""
    layer = backend.kv_layer.zeros(shape, 0, dtype, "cpu")
    for part in layer.parts:
        part.fill_(1)
    return layer


def int4_memory(
    backend: AttentionBackend, step: Batch, shape: tuple[int, int, int, int], kind: str
) -> list[KVLayer]:
    """Four layers of `shape`, int4 or partly, filled; `step` is told of its open blocks."""
    blocks, size, kv_heads, head_dim = shape
    tables, at = step.block_tables_GSB[0], step.context_lens[0]
    news = torch.arange(at - step.query_lens[0], at)
    open_tables, first = torch.zeros_like(tables), int(news[0]) // size
    count = open_tables[:, first:].numel()
    open_tables[:, first:] = 1 + torch.arange(count).view(len(tables), -1)
    step.block_tables_GSB.append(open_tables)
    step.slots_GT.append((open_tables[:, news // size] * size + news % size).flatten())
    group = KVGroupSpec(layers=(0, 1, 2, 3), num_kv_heads=kv_heads, head_dim=head_dim)
    places = (blocks, 1 + count), kv_format(kind), torch.bfloat16, backend.kv_layer
    layers = allocate_int4((group,), *places)
    for part in (part for one in memory_of(layers) for part in one.parts):
        part.fill_(1)
    return layers


def print_qwen(backend: AttentionBackend, repeats: int) -> None:
    """Qwen2.5-0.5B's attention in bf16: N = 14, G = 2, D = 64; best of many, one thread.

    The ceiling is what is read over the bandwidth. Both steps fill a block of each sequence, which
    int4 KV rounds.
    """
    heads, kv_heads, head_dim = 14, 2, 64
    rule, bandwidth = AttentionRule(scale=head_dim**-0.5), bandwidth_bytes_per_s()
    titles = ["bf16, N 14, G 2, D 64", "KV", "ms", "ceiling", "GB/s of KV", "GFLOP/s"]
    print(f"\n{heading(titles)}")
    steps = {"decode, 8 × 4096": (8, 1, 4096), "prefill 1024": (1, 1024, 1024)}
    for name, (batch, length, context) in steps.items():
        for kind in ("bfloat16", *ROUNDED, *APART) if backend.name == "native" else ("bfloat16",):
            size = kv_format(kind).block_size or BLOCK_SIZE
            shape = (1 + batch * context // size, size, kv_heads, head_dim)
            step = step_of(batch, length, context, size)
            if kv_format(kind).block_size:
                layers = int4_memory(backend, step, shape, kind)
            else:
                layers = [filled(backend, shape, getattr(torch, kind)) for _ in range(4)]
            q, k, v = (
                torch.randn(batch * length, n, head_dim).bfloat16()
                for n in (heads, kv_heads, kv_heads)
            )
            times = []
            for repeat in range(repeats + 1):
                started = time.process_time()
                backend.attend(q, k, v, layers[repeat % 4], step, rule)
                times.append(time.process_time() - started)
            best = min(times[1:])
            num_bytes = sum(part.nbytes for one in memory_of(layers[:1]) for part in one.parts)
            pairs = batch * sum(range(context - length + 1, context + 1))
            rate = 4 * head_dim * heads * pairs / best / 1e9
            ceiling, gb_s = num_bytes / bandwidth * 1e3, num_bytes / best / 1e9
            cells = f"{best * 1e3:.2f} | {ceiling:.2f} | {gb_s:.1f} | {rate:.0f}"
            print(f"| {name} | {kind} | {cells} |")


def bandwidth_bytes_per_s() -> float:
    """Best of five reads of 512 MB."""
    x = torch.ones(128 * 2**20)
    best = 0.0
    for _ in range(5):
        started = time.process_time()
        x.sum()
        best = max(best, x.nbytes / (time.process_time() - started))
    return best


def measure(
    benches: dict[str, Bench], batch: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Variant → [(seconds, seconds at the ceiling) by context]."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in benches}
    for context in CONTEXTS:
        bandwidth = bandwidth_bytes_per_s()
        for name, bench in benches.items():
            seconds = bench.step_s(context, batch, repeats)
            found[name].append((seconds, bench.bytes_read(context, batch) / bandwidth))
    return found


def main() -> None:
    """Print KV bytes by variant, then one table for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native", choices=["native", *sorted(BACKENDS)])
    parser.add_argument("--only-qwen", action="store_true", help="one shape, decode and prefill")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the engine does
    torch.set_num_threads(1)
    with torch.inference_mode():
        benches = {name: Bench(config, chosen.backend) for name, config in VARIANTS.items()}
        print(f"One thread, {bandwidth_bytes_per_s() / 1e9:.1f} GB/s\n")
        print_qwen(next(iter(benches.values())).attention, chosen.repeats)
        if chosen.only_qwen:
            return
        print_bytes(benches)
        for batch in BATCHES:
            print_times(batch, measure(benches, batch, chosen.repeats))


def print_bytes(benches: dict[str, Bench]) -> None:
    titles = [f"read at {context}" for context in CONTEXTS]
    print(heading(["KV bytes of one layer", "a token", *titles]))
    for name, bench in benches.items():
        read = " | ".join(gib(bench.bytes_read(context, 1)) for context in CONTEXTS)
        print(f"| {name} | {gib(bench.spec.kv_bytes_per_token('float32'))} | {read} |")


def print_times(batch: int, found: dict[str, list[tuple[float, float]]]) -> None:
    titles = [title for at in CONTEXTS for title in (f"{at}: ms", "ceiling", "share")]
    print(f"\n{heading([f'batch {batch}', *titles, f'× MHA at {CONTEXTS[-1]}'])}")
    slowest = next(iter(found.values()))[-1][0]
    for name, times in found.items():
        cells = " | ".join(
            f"{spent * 1e3:.2f} | {limit * 1e3:.2f} | {limit / spent:.0%}" for spent, limit in times
        )
        print(f"| {name} | {cells} | {slowest / times[-1][0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
