"""What a sparse MLP saves in decode and costs in prefill: `python benchmarks/moe.py`.

Three models of one shape with random weights: 8 experts of which a token visits 2; the same with
all 8 visited; and a dense one whose MLP has the size of the two. Steps of the three take turns;
times are medians of CPU seconds, of one thread unless told otherwise, which other work on the
machine hardly disturbs (`--clock wall --threads 2` for a quiet one). Tokens are random, so the
sequences of a batch choose their experts independently: a step of B tokens hits about
8 · (1 - 0.75^B) of 8.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headway.assemble import make_executor, plan_settings
from headway.config.options import EngineOptions
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan, run
from headway.core.request import SamplingParams

EXPERTS, ACTIVE, INNER = 8, 2, 1408
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": ACTIVE * INNER,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SPARSE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "2 of 8 experts": SPARSE,
    "8 of 8 experts": {**SPARSE, "num_experts_per_tok": EXPERTS},
    "dense, the size of 2": {"architectures": ["Qwen3ForCausalLM"]},
}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
BATCHES, PROMPT = (1, 2, 4, 8), 512


class Bench:
    """One model, driven by plans: no engine, so a step is the forward and the sampling alone."""

    def __init__(
        self, folder: Path, config: dict[str, Any], dtype: str, threads: int, clock: str
    ) -> None:
        self.now_s = CLOCKS[clock]
        (folder / "config.json").write_text(json.dumps({**SHAPE, "torch_dtype": dtype, **config}))
        options = EngineOptions(device="cpu", load_format="dummy", threads=threads)
        self.spec, settings, _, machine = plan_settings(folder, options)
        self.executor: Any = make_executor(folder, options, self.spec, settings, machine, None)
        self.block_size = settings.cache.block_size
        self.random = random.Random(1)
        self.step = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(SHAPE["vocab_size"]) for _ in range(count)]

    def blocks(self, sequence: int, length: int) -> list[list[int]]:
        """Blocks for a whole sequence, those of others never among them."""
        most = 2 * PROMPT // self.block_size
        first = 1 + sequence * most
        return [list(range(first, first + -(-length // self.block_size)))]

    def run(self, new: list[NewSequence], advanced: list[ScheduledSequence]) -> tuple[float, int]:
        """(seconds of the step, experts it read)."""
        self.step += 1
        started = self.now_s()
        result = run(self.executor, StepPlan(self.step, new, advanced, []))
        return self.now_s() - started, result.experts_read

    def finish(self, count: int) -> None:
        self.step += 1
        self.executor.state.apply(StepPlan(self.step, [], [], list(range(count))))

    def prefill(self, count: int, length: int, most: int) -> float:
        """Seconds to compute `count` prompts of `length` tokens in one step; room for `most`."""
        prompts = [self.tokens(length) for _ in range(count)]
        new = [NewSequence(i, 0, p, length, SamplingParams(), 0) for i, p in enumerate(prompts)]
        advanced = [
            ScheduledSequence(i, 0, p, self.blocks(i, most), True) for i, p in enumerate(prompts)
        ]
        return self.run(new, advanced)[0]

    def decode(self, count: int, position: int) -> tuple[float, int]:
        """One step of `count` sequences at `position`, a random token each."""
        rows = [ScheduledSequence(i, position, self.tokens(1), [[]], True) for i in range(count)]
        return self.run([], rows)

    @torch.inference_mode()
    def mlp_s(self, num_tokens: int) -> float:
        """Seconds of the first layer's MLP alone."""
        from headway.runtime.layers import Step

        mlp = self.executor.model.layers[0].mlp
        x_TH = torch.randn(num_tokens, SHAPE["hidden_size"], dtype=self.executor.kv[0].k.dtype)
        step = (Step(batch=None, kv=[], angles=[]),) if self.spec.experts else ()  # type: ignore[arg-type]
        started = self.now_s()
        mlp(x_TH, *step)
        return self.now_s() - started


def decode_table(benches: dict[str, Bench], steps: int) -> None:
    """Bytes read and milliseconds of a decode step, by batch."""
    print("\n| batch | model | experts read a layer | MiB of weights read | ms a step |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for batch in BATCHES:
        for bench in benches.values():
            bench.prefill(batch, 16, 16 + steps)
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in benches}
        for at in range(steps):
            for name, bench in benches.items():
                found[name].append(bench.decode(batch, 16 + at))
        for name, bench in benches.items():
            bench.finish(batch)
            spec = bench.spec
            read = statistics.mean(experts for _, experts in found[name])
            weights = spec.step_weight_bytes(experts_read=round(read)) / 2**20
            milliseconds = statistics.median(seconds for seconds, _ in found[name]) * 1e3
            layer = f"{read / spec.num_sparse:.2f}" if spec.num_sparse else "–"
            print(f"| {batch} | {name} | {layer} | {weights:.0f} | {milliseconds:.2f} |")


def prefill_table(benches: dict[str, Bench], repeats: int) -> None:
    """A prompt of 512 tokens: the whole step, and one MLP alone."""
    whole: dict[str, list[float]] = {name: [] for name in benches}
    mlp: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(repeats):
        for name, bench in benches.items():
            whole[name].append(bench.prefill(1, PROMPT, PROMPT))
            bench.finish(1)
        for name, bench in benches.items():
            mlp[name].append(bench.mlp_s(PROMPT))
    *_, dense = benches
    print(f"\n| {PROMPT} tokens | MLP, ms | of dense | whole step, ms | of dense |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in benches:
        cells = []
        for times in (mlp, whole):
            ours = statistics.median(times[name])
            cells.append(f"{ours * 1e3:.1f} | {ours / statistics.median(times[dense]):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benches = {
            name: Bench(Path(folder), config, chosen.dtype, chosen.threads, chosen.clock)
            for name, config in MODELS.items()
        }
    print(f"{chosen.dtype}, {chosen.threads} threads")
    prefill_table(benches, chosen.repeats)
    decode_table(benches, chosen.steps)


if __name__ == "__main__":
    main()
