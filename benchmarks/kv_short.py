"""Goodput where KV memory is short: `python benchmarks/kv_short.py FOLDER --sequences 4`.

The memory for KV holds `--sequences` whole sequences in int8, and `--requests` come at once. Each
format answers all of them: how many run in a step on average, preemptions, tokens that are computed
before an answer goes on (prompts, and again what was preempted), output tokens/s from the first
step to the last token, and their share beside int8's. What the weights say does not matter:
`--load-format dummy` draws them.
"""

import argparse
import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import heading
from headway import LLM
from headway.assemble import read_spec
from headway.core.options import EngineOptions
from headway.core.request import Request, SamplingParams

SIZE = 64
"""Blocks of int4 KV; of the others, too, so that nothing but the format differs."""


def measure(llm: LLM, chosen: argparse.Namespace) -> tuple[float, str]:
    """(output tokens/s, the cells of a row)."""
    engine, draw = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=chosen.answer, ignore_eos=True)
    for i in range(chosen.requests):
        ids = [draw.randrange(llm.spec.vocab_size) for _ in range(chosen.prompt)]
        engine.add(Request(i, ids, params))
    computed, running, started = 0, [], time.perf_counter()
    while engine.has_work:
        _, record = engine.step()
        computed += record.num_prefill_tokens
        running.append(len(engine.scheduler.running))
    spent = time.perf_counter() - started
    rate = chosen.requests * chosen.answer / spent
    counts = f"{engine.scheduler.num_preemptions} | {computed} | {len(running)}"
    times = f"{spent / len(running) * 1e3:.1f} | {rate:.0f}"
    return rate, f"{statistics.mean(running):.1f} | {counts} | {times}"


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=4, help="of int8 that the memory holds")
    parser.add_argument("--formats", default="int8,int4", help="of auto, int8, int4")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--load-format", default="auto")
    chosen = parser.parse_args()
    blocks = -(-(chosen.prompt + chosen.answer) // SIZE)
    options: dict[str, Any] = {
        "quantization": chosen.quantization,
        "load_format": chosen.load_format,
        "max_num_seqs": chosen.requests,
        "max_model_len": blocks * SIZE,
        "skip_tokenizer_init": True,
        "prefix_cache": False,
        "block_size": SIZE,
    }
    spec = read_spec(chosen.folder, EngineOptions())
    whole = chosen.sequences * blocks + 1  # and block 0, which is nobody's
    memory, base = whole * SIZE * spec.kv_bytes_per_token("int8"), 0.0
    sizes = f"{chosen.requests} × ({chosen.prompt} + {chosen.answer})"
    print(f"{memory / 1e6:.1f} MB for KV, {sizes}\n")
    titles = ["KV", "bytes a token", "tokens held", "running", "preempted", "prefilled", "steps"]
    print(heading([*titles, "ms a step", "output tok/s", "× int8"]))
    for name in chosen.formats.split(","):
        llm = LLM(chosen.folder, **options, kv_cache_dtype=name, kv_memory=memory)
        cache = llm.settings.cache
        held = (cache.token_blocks[0] - 1) * SIZE
        rate, cells = measure(llm, chosen)
        base = rate if name == "int8" else base
        share = f"{rate / base:.2f}" if base else ""
        per_token = llm.spec.kv_bytes_per_token(cache.dtype)
        print(f"| {name} | {per_token} | {held} | {cells} | {share} |", flush=True)
        del llm
        gc.collect()


if __name__ == "__main__":
    main()
