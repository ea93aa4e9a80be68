"""From plain torch to int4 with a drafting model, one rung after the other, as gpt-fast has it.

    python benchmarks/ladder.py FOLDER [--draft DRAFT] [--kind conversation] [--json FILE]

Each rung decodes the same chats one by one, greedily: transformers in plain torch, its decode step
through `torch.compile` (a static cache, weights frozen), then this engine in bf16, int8 and int4,
and int4 with draft tokens: of a draft model if `--draft` names one, and of all proposers (`auto`).
All rungs take turns within a repeat, which has prompts of its own: headway-tiny's chats, or one of
`speculation.py`'s kinds. The table has tokens a second from an answer's first token to its last;
the ceiling, which is what the bytes that a step reads (weights, and KV of the mean context) take at
the memory's bandwidth as probed in this run, times the tokens of a step; and whether the rungs with
draft tokens have int4's answers. `fidelity.py` measures what a format costs in quality. `--rungs`
chooses some rungs; what is not measured is taken from FILE, which keeps all figures.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common import markdown, use_instruction_set, write_json
from headway import LLM
from headway.core.request import Request, SamplingParams
from headway.perf.roofline import ModelWork
from speculation import make_prompts

CONTEXT = 512
MAX_TOKENS = 120
PROBE_S = 0.6

Figures = dict[str, Any]
TimedAnswer = tuple[list[int], float, int]
"""An answer's tokens, seconds from its first token to its last, and the steps that took."""


def say(words: str) -> None:
    """A line of progress."""
    print(words, file=sys.stderr, flush=True)


# ── rungs ───────────────────────────────────────────────────────────────────────────────────


class Torch:
    """transformers in bf16, as it comes or with its decode step compiled."""

    def __init__(self, folder: Path, threads: int, compiled: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.threads, self.compiled = threads, compiled
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends)
        self._step = self.model.forward
        if compiled:
            import torch._inductor.config as inductor

            inductor.freezing = True
            self._step = torch.compile(self.model.forward, dynamic=False)
            from transformers import StaticCache

            self._static = StaticCache(self.model.config, max_cache_len=CONTEXT)
        parameters = {id(p): p.nbytes for p in self.model.parameters()}  # a tied head counts once
        self.weight_bytes = sum(parameters.values())

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> TimedAnswer:
        from transformers import DynamicCache

        torch.set_num_threads(self.threads)
        cache = DynamicCache()
        if self.compiled:
            cache = self._static  # what is compiled holds its memory
            cache.reset()
        logits = self.model(torch.tensor([prompt]), past_key_values=cache).logits
        tokens = [int(logits[0, -1].argmax())]
        started = time.perf_counter()
        while tokens[-1] not in self.ends and len(tokens) < max_tokens:
            at = torch.tensor([[len(prompt) + len(tokens) - 1]])
            given = {"past_key_values": cache, "position_ids": at}
            logits = self._step(torch.tensor([tokens[-1:]]), **given).logits
            tokens.append(int(logits[0, -1].argmax()))
        spent = time.perf_counter() - started
        torch.set_num_threads(1)
        return tokens, spent, len(tokens) - 1


class Native:
    """This engine."""

    def __init__(self, folder: Path, quantization: str, **options: object) -> None:
        room = {"max_model_len": CONTEXT, "max_num_seqs": 1, "kv_memory": "256MiB"}
        self.llm = LLM(folder, dtype="bfloat16", quantization=quantization, **room, **options)
        settings = self.llm.settings
        per_weight = self.llm.engine.executor.describe().bytes_per_weight
        self.work = ModelWork(self.llm.spec, settings.dtype, settings.cache.dtype, per_weight)
        self.weight_bytes = self.work.weight_bytes
        self._ids = iter(range(1, 10**9))

    def answer(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> TimedAnswer:
        engine = self.llm.engine
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine.add(Request(next(self._ids), prompt, greedy))
        tokens: list[int] = []
        times: list[float] = []
        while engine.has_work:
            updates, _ = engine.step()
            new_tokens = [token for update in updates for token in update.token_ids]
            if new_tokens:
                tokens += new_tokens
                times.append(time.perf_counter())
        return tokens, times[-1] - times[0], len(times) - 1


def makers(chosen: argparse.Namespace, threads: int) -> dict[str, Callable[[], Torch | Native]]:
    """By name what makes a rung, from the lowest up."""
    folder = chosen.folder
    options = {"quantization_group": chosen.group, "draft_model": chosen.draft}
    rungs: dict[str, Callable[[], Torch | Native]] = {
        "plain torch, bf16": lambda: Torch(folder, threads, compiled=False),
        "torch.compile, bf16": lambda: Torch(folder, threads, compiled=True),
        "native step, bf16": lambda: Native(folder, "none"),
        "int8": lambda: Native(folder, "int8"),
        "int4": lambda: Native(folder, "int4", quantization_group=chosen.group),
        "int4, draft model": lambda: Native(folder, "int4", speculative_method="draft", **options),
        "int4, auto": lambda: Native(folder, "int4", speculative_method="auto", **options),
    }
    if not chosen.draft:
        del rungs["int4, draft model"]
    return rungs


# ── speed ───────────────────────────────────────────────────────────────────────────────────


def measure_speed(
    rungs: dict[str, Torch | Native], prober: Native, kind: str, repeats: int, requests: int
) -> tuple[Figures, float]:
    """Name → figures, and the best bandwidth probed, in bytes a second."""
    made = make_prompts(prober.llm, kind, repeats + 1, requests)
    sets = [[token_ids for token_ids, _ in prompts] for prompts in made]
    for name, rung in rungs.items():
        began = time.perf_counter()
        for prompt in sets[repeats][:3]:
            rung.answer(prompt)
        say(f"{name}: warm after {time.perf_counter() - began:.1f} s")
    found: Figures = {
        name: {"rates": [], "tokens": [], "contexts": [], "answers": []} for name in rungs
    }
    bandwidth = 0.0
    for repeat, prompts in enumerate(sets[:repeats]):
        executor = prober.llm.engine.executor
        executor.probe(PROBE_S)
        bandwidth = max(bandwidth, executor.describe().ceilings.bandwidth_bytes_per_s)
        turns = list(rungs.items())
        for name, rung in turns if repeat % 2 == 0 else reversed(turns):
            answers = [rung.answer(prompt) for prompt in prompts]
            tokens = sum(len(t) - 1 for t, _, _ in answers)
            spent = sum(s for _, s, _ in answers)
            steps = sum(n for _, _, n in answers)
            figures = found[name]
            figures["rates"].append(tokens / spent)
            figures["tokens"].append(tokens / steps)
            figures["answers"] += [t for t, _, _ in answers]
            figures["contexts"] += [len(p) + len(t) / 2 for p, (t, _, _) in zip(prompts, answers)]
            say(f"repeat {repeat + 1} of {repeats}, {name}: {tokens / spent:.1f} tok/s")
    kv_bytes = sum(prober.work.kv_bytes)
    for name, rung in rungs.items():
        figures = found[name]
        context = statistics.mean(figures.pop("contexts"))
        figures["step_bytes"] = rung.weight_bytes + context * kv_bytes
    return found, bandwidth


# ── table ───────────────────────────────────────────────────────────────────────────────────


def summarize(figures: Figures, names: Sequence[str]) -> list[Figures]:
    """One row for each rung that was measured; rates are medians of the repeats."""
    rows, first = [], 0.0
    for name in names:
        speed = figures["speed"].get(name)
        if speed is None:
            continue
        rate, a_step = (statistics.median(speed[field]) for field in ("rates", "tokens"))
        first = first or rate
        ceiling = figures["bandwidth"] / speed["step_bytes"] * a_step
        rows.append(
            {
                "name": name,
                "rate": rate,
                "a_step": a_step,
                "ceiling": ceiling,
                "times": rate / first,
            }
            | {
                "low": min(speed["rates"]),
                "high": max(speed["rates"]),
                "bytes": speed["step_bytes"],
            }
        )
    return rows


def format_agreement(figures: Figures, one: str, other: str) -> str:
    """In how many answers two rungs wrote the same tokens: "18 of 18"."""
    pairs = [figures["speed"].get(name, {}).get("answers", []) for name in (one, other)]
    same = sum(a == b for a, b in zip(*pairs))
    return f"{same} of {min(map(len, pairs))}"


def table(rows: Sequence[Figures]) -> str:
    """Markdown."""
    columns = ("tok/s", "of repeats", "x the first", "tokens a step", "GB a step", "ceiling")
    cells = []
    for row in rows:
        rates = [f"{row['rate']:.1f}", f"{row['low']:.1f} … {row['high']:.1f}"]
        rates += [f"{row['times']:.2f}", f"{row['a_step']:.2f}", f"{row['bytes'] / 1e9:.3f}"]
        ceiling = f"{row['ceiling']:.0f} ({row['rate'] / row['ceiling']:.0%})"
        cells.append([row["name"], *rates, ceiling])
    return markdown(["rung", *columns], cells)


def main() -> None:
    """Measure what is asked for, add it to what is known, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="", help="a draft model: headway-draft, a folder")
    parser.add_argument("--kind", default="chats", help="of prompts, as speculation.py has them")
    parser.add_argument("--rungs", nargs="+", default=[], help="words in the names of some")
    parser.add_argument("--group", type=int, default=0, help="of int4 scales; 0: by module")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="chats of each repeat")
    parser.add_argument("--instruction-set", default="", help="avx2, avx512 …; the best if not")
    parser.add_argument("--json", type=Path, help="keeps figures; read where it exists")
    chosen = parser.parse_args()
    use_instruction_set(chosen.instruction_set)

    figures: Figures = {"speed": {}, "bandwidth": 0.0}
    if chosen.json and chosen.json.exists():
        figures |= json.loads(chosen.json.read_text())
    threads = len(os.sched_getaffinity(0))
    rungs = makers(chosen, threads)
    names = [name for name in rungs if any(w in name for w in chosen.rungs or [""])]
    made = {}
    for name in names:
        say(f"making {name}")
        made[name] = rungs[name]()
    prober = next((r for r in made.values() if isinstance(r, Native)), None)
    prober = prober or Native(chosen.folder, "int4")
    speed, bandwidth = measure_speed(made, prober, chosen.kind, chosen.repeats, chosen.requests)
    figures["speed"] |= speed
    figures["bandwidth"] = max(bandwidth, figures["bandwidth"])
    write_json(chosen.json, figures)
    rows = summarize(figures, list(rungs))
    print(f"{chosen.folder.name}, {threads} threads, {figures['bandwidth'] / 1e9:.1f} GB/s\n")
    print(table(rows))
    for one, *others in (list(rungs)[:2], list(rungs)[list(rungs).index("int4") :]):
        for other in (each for each in others if each in figures["speed"]):
            print(
                f"\n{other}: the tokens of {one} in {format_agreement(figures, one, other)} answers"
            )
    rates = {row["name"]: row["rate"] for row in rows}
    if "native step, bf16" in rates:
        for name in list(rungs)[5:]:
            if name in rates:
                gain = rates[name] / rates["native step, bf16"]
                print(f"\nfrom the native step in bf16 to {name}: {gain:.2f}x")


if __name__ == "__main__":
    main()
