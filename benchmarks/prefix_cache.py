"""What the prefix cache saves, and what it costs where it finds nothing:

    python benchmarks/prefix_cache.py                          # the embedded model
    python benchmarks/prefix_cache.py --model qwen0.5b --load-format dummy --times 5

Part 1 is the time to the first token behind a system prompt of 1,500 tokens, computed and found.
Part 2 is a conversation of ten turns with the cache and without: prompt tokens computed, and the
time until each answer begins. Part 3 asks prompts that nobody sent before, with the cache and
without in turn: on the model, and on an executor that does nothing, per prompt token.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import write_json
from headway.assemble import make_executor
from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.core.plan import Executor
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.planning import plan_settings
from headway.runtime.null import NullExecutor

SYSTEM, QUESTION, ANSWER, TURNS = 1500, 24, 32, 10


class Bench:
    """Engines over one executor, with the cache or without, and prompts of random tokens."""

    def __init__(self, executor: Executor, settings: Settings, vocab_size: int) -> None:
        self.executor, self.settings, self.vocab_size = executor, settings, vocab_size
        self.rng = np.random.default_rng(0)
        self.number = 0

    def engine(self, policy: str) -> Engine:
        settings = replace(self.settings, cache=replace(self.settings.cache, prefix_cache=policy))
        return build_engine(self.executor, settings, vocab_size=self.vocab_size, eos_token_ids=())

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.vocab_size, count).tolist()

    def ask(self, engine: Engine, prompt: list[int], answer: int) -> tuple[float, list[int], int]:
        """(seconds to the first token, the answer, prompt tokens computed)."""
        self.number += 1
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        began = time.perf_counter()
        engine.add(Request(self.number, prompt, sampling))
        first_s, got, computed = 0.0, [], 0
        while engine.has_work:
            updates, record = engine.step()
            computed += 0 if got else record.num_tokens
            for update in updates:
                first_s = first_s or time.perf_counter() - began
                got += update.token_ids
        return first_s, got, computed


def system_prompt(bench: Bench, times: int, length: int) -> dict[str, float]:
    """Seconds to the first token, cold and warm, the best of `times`."""
    engine, cold, warm = bench.engine("lfu"), [], []
    for _ in range(times):
        system = bench.tokens(length)
        cold.append(bench.ask(engine, system + bench.tokens(QUESTION), 1)[0])
        warm.append(bench.ask(engine, system + bench.tokens(QUESTION), 1)[0])
    return {"cold_s": min(cold), "warm_s": min(warm), "ratio": min(warm) / min(cold)}


def conversation(bench: Bench, times: int) -> dict[str, float]:
    """Ten turns: prompt tokens computed and seconds to first tokens in all, with and without."""
    found: dict[str, float] = {}
    for name, policy in (("with", "lfu"), ("without", "")):
        best_s = float("inf")
        for _ in range(times):
            engine, text, seconds, tokens = bench.engine(policy), [], 0.0, 0
            for _ in range(TURNS):
                text += bench.tokens(3 * QUESTION)
                first_s, answer, computed = bench.ask(engine, list(text), ANSWER)
                text += answer
                seconds, tokens = seconds + first_s, tokens + computed
            best_s = min(best_s, seconds)
        found |= {f"{name}_s": best_s, f"{name}_tokens": tokens}
    found["ratio_tokens"] = found["with_tokens"] / found["without_tokens"]
    found["ratio_s"] = found["with_s"] / found["without_s"]
    return found


def unique(bench: Bench, times: int, length: int, count: int) -> dict[str, float]:
    """Microseconds a prompt token with and without, in turn; best of `times`, median of ratios."""
    engines = {"with": bench.engine("lfu"), "without": bench.engine("")}
    took: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(times * count):
        prompt = bench.tokens(length)
        for name in sorted(engines, reverse=bool(turn % 2)):
            began = time.perf_counter()
            bench.ask(engines[name], prompt, 1)
            took[name].append((time.perf_counter() - began) * 1e6 / length)
    ratios = [a / b for a, b in zip(took["with"], took["without"], strict=True)]
    return {
        **{f"{name}_us": min(values) for name, values in took.items()},
        "added_us": min(took["with"]) - min(took["without"]),
        "ratio": min(took["with"]) / min(took["without"]),
        "median_ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = model_folder(given.model)
    options = EngineOptions(
        device="cpu", load_format=given.load_format, quantization=given.quantization
    )
    spec, settings, _, machine = plan_settings(folder, options)
    executor = make_executor(folder, options, spec, settings, machine, None)
    bench = Bench(executor, settings, spec.vocab_size)
    length = min(SYSTEM, settings.max_model_len - 2 * QUESTION)
    bench.ask(bench.engine(""), bench.tokens(length), 2)
    results = {
        "system_prompt": system_prompt(bench, given.times, length),
        "conversation": conversation(bench, max(given.times // 2, 1)),
        "unique": unique(bench, given.times, length // 2, 2),
        "unique_null": unique(
            Bench(NullExecutor(), settings, spec.vocab_size), 4 * given.times, length, 20
        ),
    }
    one, two, real, null = results.values()
    print(f"first token behind {length} tokens: {one['cold_s'] * 1e3:.1f} ms cold, "
          f"{one['warm_s'] * 1e3:.1f} ms warm: {one['ratio']:.3f} (target 0.2)")  # fmt: skip
    print(f"{TURNS} turns: {two['with_tokens']:.0f} of {two['without_tokens']:.0f} prompt tokens "
          f"computed: {two['ratio_tokens']:.3f}; {two['with_s'] * 1e3:.1f} of "
          f"{two['without_s'] * 1e3:.1f} ms: {two['ratio_s']:.3f} (target 0.3)")  # fmt: skip
    print(f"unique prompts: {real['with_us']:.2f} and {real['without_us']:.2f} µs a token, with "
          f"and without: {real['ratio']:.4f}, median {real['median_ratio']:.4f} "
          "(target 1.01)")  # fmt: skip
    print(f"without a model: {null['with_us']:.3f} and {null['without_us']:.3f} µs a token: "
          f"the cache adds {null['added_us']:.3f} µs")  # fmt: skip
    share = null["added_us"] / real["without_us"]
    print(f"which is {share:.2%} of what a token takes on this model (target 1%)")
    write_json(given.json, results, indent=1)


if __name__ == "__main__":
    main()
