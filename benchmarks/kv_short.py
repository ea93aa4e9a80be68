"""Goodput where KV memory is short: `python benchmarks/kv_short.py FOLDER --sequences 4`.

The memory for KV holds `--sequences` whole sequences in int8, and `--requests` come at once. Each
format answers all of them: how many run in a step on average, preemptions, tokens that are computed
before an answer goes on (prompts, and again what was preempted), output tokens/s from the first
step to the last token, and their share beside int8's. What the weights say does not matter:
`--load-format dummy` draws them. `--blind` lets who fits now start, as if nobody knew how long
answers become.

`--counts` needs no model but its config.json and computes nothing: steps, rows and preemptions are
counted, with `--weights-ms` and `--token-ms` for what a step takes. There `--ends` lets answers end
at lengths that nobody knows before, about `--answer` in the mean and from a few tokens to four
times that, behind prompts of up to twice `--prompt`.
"""

import argparse
import gc
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import heading
from headway import LLM
from headway.assemble import plan_settings, read_spec
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.core.plan import StepResult
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.perf.model import Prior
from headway.runtime.null import NullExecutor
from headway.spec import ModelSpec

SIZE = 64
"""Blocks of int4 KV; of the others, too, so that nothing but the format differs."""
EOS = 2
SPREAD = 0.8
"""Standard deviation of a length's logarithm."""


class Ending(NullExecutor):
    """Computes nothing, and ends each answer at its length, by request."""

    def __init__(self) -> None:
        super().__init__(cycle=tuple(range(100, 200)))
        self.lengths: list[int] = []
        self._ends: dict[int, int] = {}

    def collect(self) -> StepResult:
        plan = self._plan
        assert plan is not None
        for new in plan.new:
            number = new.token_ids[0] - len(self.lengths)
            if new.sampling.max_tokens is None:
                self._ends[new.sequence_id] = new.num_prompt_tokens + self.lengths[number]
        result = super().collect()
        known = {row.sequence_id: row.start + len(row.token_ids) for row in plan.scheduled}
        for sample in result.samples:
            if known[sample.sequence_id] + 1 == self._ends.get(sample.sequence_id):
                sample.token_ids[:] = [EOS]
        return result


def draw_requests(chosen: argparse.Namespace, vocab_size: int) -> tuple[list[Request], list[int]]:
    """The requests and the lengths of their answers; with `--ends` the first token of a prompt is
    the request's number and how many there are."""
    draw, requests, lengths = random.Random(0), list[Request](), list[int]()
    for number in range(chosen.requests):
        length, answer = chosen.prompt, chosen.answer
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        if chosen.ends:
            length = draw.randrange(chosen.prompt // 8, 2 * chosen.prompt)
            answer = round(chosen.answer * math.exp(draw.gauss(-(SPREAD**2) / 2, SPREAD)))
            answer = min(max(answer, 4), 4 * chosen.answer)
            params = SamplingParams(temperature=0, max_tokens=None)
        ids = [draw.randrange(300, vocab_size) for _ in range(length)]
        if chosen.ends:
            ids[0] = number + chosen.requests
        requests.append(Request(number, ids, params))
        lengths.append(answer)
    return requests, lengths


def measure(
    engine: Engine, vocab_size: int, chosen: argparse.Namespace
) -> tuple[float, list[str | int]]:
    """(output tokens/s, the cells of a row)."""
    requests, lengths = draw_requests(chosen, vocab_size)
    if isinstance(engine.executor, Ending):
        engine.executor.lengths = lengths
    engine.scheduler.room.predicts_growth = not chosen.blind
    for request in requests:
        engine.add(request)
    computed, running, started = 0, list[int](), time.perf_counter()
    while engine.has_work:
        _, record = engine.step()
        computed += record.num_prefill_tokens
        running.append(len(engine.scheduler.running))
    spent_s = time.perf_counter() - started
    rate = sum(lengths) / spent_s
    cells = [f"{statistics.mean(running):.1f}", engine.scheduler.num_preemptions, computed]
    if chosen.counts:
        return rate, [*cells, len(running)]
    return rate, [*cells, len(running), f"{spent_s / len(running) * 1e3:.1f}", f"{rate:.0f}"]


def counting_engine(
    chosen: argparse.Namespace, options: EngineOptions
) -> tuple[Engine, ModelSpec, Settings]:
    """One that computes nothing, and believes what it is told of the costs."""
    spec, settings, _, _ = plan_settings(chosen.folder, options)
    prior = Prior(weights_s=chosen.weights_ms / 1e3, token_s=chosen.token_ms / 1e3)
    engine = Engine(
        Ending(), settings, vocab_size=spec.vocab_size, eos_token_ids=(EOS,), prior=prior
    )
    engine.cost.learn = lambda work, actual_s: actual_s  # type: ignore[method-assign]
    return engine, spec, settings


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
    parser.add_argument("--blind", action="store_true", help="who fits now starts")
    parser.add_argument("--counts", action="store_true", help="compute nothing")
    parser.add_argument("--ends", action="store_true", help="answers end where nobody knows")
    parser.add_argument("--weights-ms", type=float, default=5.0, help="a step, where it counts")
    parser.add_argument("--token-ms", type=float, default=1.6, help="and a token of it")
    chosen = parser.parse_args()
    blocks = -(-(chosen.prompt + chosen.answer) // SIZE)
    options: dict[str, Any] = {
        "quantization": chosen.quantization,
        "load_format": chosen.load_format,
        "max_num_seqs": chosen.requests,
        "max_model_len": blocks * SIZE * (4 if chosen.ends else 1),
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
    print(heading(titles + ([] if chosen.counts else ["ms a step", "output tok/s", "× int8"])))
    for name in chosen.formats.split(","):
        how: dict[str, Any] = {**options, "kv_cache_dtype": name, "kv_memory": memory}
        if chosen.counts:
            engine, spec, settings = counting_engine(chosen, EngineOptions(**how, speculate="off"))
        else:
            llm = LLM(chosen.folder, **how)
            engine, spec, settings = llm.engine, llm.spec, llm.settings
        held = (settings.cache.token_blocks[0] - 1) * SIZE
        rate, cells = measure(engine, spec.vocab_size, chosen)
        base = rate if name == "int8" else base
        if not chosen.counts:
            cells.append(f"{rate / base:.2f}" if base else "")
        per_token = spec.kv_bytes_per_token(settings.cache.dtype)
        print(f"| {name} | {per_token} | {held} |", " | ".join(map(str, cells)), "|", flush=True)
        del engine
        llm = None
        gc.collect()


if __name__ == "__main__":
    main()
