"""How well steps and times to first token are predicted: `python benchmarks/cost_model.py`.

    python benchmarks/cost_model.py --seconds 60 headway-tiny FOLDER FOLDER:int8

For each model, in one process and without HTTP: a mixed load (80% of prompts of about 150 tokens,
15% of 1,000, 5% of 3,000) under a token budget that changes every few steps, so that decodes stand
alone and beside chunks of all sizes. Each step is predicted before it runs and learned after it.
Then every plan runs twice, which tells how far the same step is from itself; the target is a median
error of 10% and 95% of the steps within 30% beyond that spread. Last, requests arrive at random
under one budget, and the time to first token predicted at each arrival is compared with what came.
Prints a table, and the parts learned; `--json FILE` keeps both, `--svg FILE` draws them.
"""

import argparse
import random
import time
from collections.abc import Sequence as TypingSequence
from math import exp
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common import heading, line, write_json
from headway import LLM, SamplingParams
from headway.core.plan import GrammarMasks, StepPlan, StepResult
from headway.core.records import StepRecord
from headway.core.request import Request
from headway.engine.engine import Engine
from headway.measure.chart import Panel, chart
from headway.perf.model import Work

BUDGETS = (32, 48, 64, 100, 128, 256, 512, 1024, 2048)
LEVELS = (0.25, 0.5, 1, 1, 2)
"""Shares of the usual number of requests that run at once; another every hundred steps."""
PROMPTS = ((0.80, 150), (0.95, 1000), (1.0, 3000))
MEAN_OUTPUT = 50
CHUNK_BUDGET = 256


class Twice:
    """An executor that runs each plan a second time when asked, and notes both durations."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.again = inner, False
        self.pairs: list[tuple[float, float]] = []

    def submit(self, plan: StepPlan) -> None:
        self.plan, self.started_s = plan, time.perf_counter()
        self.inner.submit(plan)

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self.inner.sample(step, masks)

    def collect(self) -> StepResult:
        result: StepResult = self.inner.collect()
        first_s = time.perf_counter() - self.started_s
        if self.again and self.plan.scheduled:
            self.pairs.append((first_s, self.repeat()))
        return result

    def repeat(self) -> float:
        """Seconds of the same rows once more: their blocks are known, their KV is written again."""
        rows = [
            msgspec.structs.replace(row, new_blocks=[[] for _ in row.new_blocks])
            for row in self.plan.scheduled
        ]
        started_s = time.perf_counter()
        self.inner.submit(StepPlan(self.plan.step, [], rows, []))
        self.inner.sample(self.plan.step, GrammarMasks())
        self.inner.collect()
        return time.perf_counter() - started_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Load:
    """Requests of mixed lengths for one engine; greedy, with prompts that share nothing."""

    def __init__(self, engine: Engine, level: float, seed: int = 0) -> None:
        self.engine, self.level = engine, level
        self.draw = random.Random(seed)
        self.budget = engine.scheduler.max_num_batched_tokens
        self.next_id = 1

    def add(self) -> int:
        """One more request; returns its id."""
        draw, most = self.draw, self.engine.settings.max_model_len
        at = draw.random()
        length = next(length for share, length in PROMPTS if at <= share)
        answer = max(2, round(draw.expovariate(1 / MEAN_OUTPUT)))
        length = max(1, min(round(length * exp(draw.gauss(0, 0.5))), most - answer - 2))
        prompt = [draw.randrange(self.engine.vocab_size) for _ in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self.next_id += 1
        self.engine.add(Request(self.next_id, prompt, sampling))
        return self.next_id

    def run(self, seconds: float) -> list[StepRecord]:
        """Steps under budgets that change; their records."""
        records: list[StepRecord] = []
        ends_s, scheduler = time.perf_counter() + seconds, self.engine.scheduler
        held, level = 0, self.level
        while time.perf_counter() < ends_s:
            if len(records) % 100 == 0:
                level = self.level * self.draw.choice(LEVELS)
            if not self.engine.num_requests:
                self.add()
            while self.engine.num_requests < level and self.draw.random() < 0.5:
                self.add()
            if held == 0:
                held = self.draw.randint(1, 20)
                choices = [budget for budget in BUDGETS if budget <= self.budget]
                scheduler.max_num_batched_tokens = self.draw.choice(choices)
            held -= 1
            records.append(self.engine.step()[1])
        return records

    def first_tokens(self, seconds: float) -> list[tuple[float, float]]:
        """(predicted, actual) seconds to the first token of requests that arrive at random.

        They are as dense as keeps half of the usual number in the house.
        """
        engine = self.engine
        engine.scheduler.max_num_batched_tokens = min(CHUNK_BUDGET, self.budget)
        waiting: dict[int, tuple[float, float]] = {}
        found = []
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s or waiting:
            dense = engine.num_requests < self.level * self.draw.expovariate(1)
            if not engine.num_requests or (dense and time.perf_counter() < ends_s):
                name = self.add()
                waiting[name] = predict_first_token(engine), engine.clock.now_s()
            updates, _ = engine.step()
            for update in updates:
                if update.request_id in waiting:
                    predicted_s, arrived_s = waiting.pop(update.request_id)
                    found.append((predicted_s, engine.clock.now_s() - arrived_s))
        return found


def predict_first_token(engine: Engine) -> float:
    """Seconds until the newest request has its first token: all prompts ahead of it, and its own.

    The scheduler serves them in order and gives them what decodes leave of the budget.
    """
    scheduler = engine.scheduler
    missing = [(len(s.tokens) - s.computed, s.computed) for s in scheduler.running]
    contexts = [computed + 1 for count, computed in missing if count == 1]
    rows, context = len(contexts), sum(contexts)
    prompts = [pair for pair in missing if pair[0] > 1]
    prompts += [(sequence.num_known, 0) for sequence in scheduler.waiting]
    chunk = max(scheduler.max_num_batched_tokens - rows, 1)
    return engine.cost.backlog_s(prompts, chunk, Work(rows, rows, context, context))


def quantiles(values: TypingSequence[float]) -> tuple[float, float]:
    """(median, 95th percentile)."""
    if not len(values):
        return float("nan"), float("nan")
    median, p95 = np.percentile(values, (50, 95)).tolist()
    return median, p95


def by_size(records: list[StepRecord]) -> dict[str, tuple[int, float, float]]:
    """Tokens of a step → (steps, median, p95 of the error)."""
    found = {}
    for low, high in ((1, 16), (16, 64), (64, 256), (256, 1 << 30)):
        errors = [error(r) for r in records if low <= r.num_tokens < high]
        if errors:
            found[f"{low}+"] = (len(errors), *quantiles(errors))
    return found


def error(record: StepRecord) -> float:
    """|predicted / actual − 1| of a step and the gap before it."""
    return abs(record.predicted_s / (record.duration_s + record.gap_s) - 1)


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model, `FOLDER` or `FOLDER:QUANTIZATION`."""
    folder, _, quantization = name.partition(":")
    options: dict[str, Any] = {"quantization": quantization} if quantization else {}
    options["policy"] = "fcfs"  # under which a first token comes when all before it have theirs
    llm = LLM(folder, skip_tokenizer_init=True, kv_memory=given.kv_memory, **options)
    engine = llm.engine
    engine.executor = twice = Twice(engine.executor)
    load = Load(engine, given.requests)
    records = [r for r in load.run(given.seconds) if r.predicted_s]
    twice.again = True
    load.run(given.seconds / 2)
    twice.again = False
    spreads = [abs(first_s / second_s - 1) for first_s, second_s in twice.pairs]
    parts = engine.cost.parts
    firsts = load.first_tokens(given.seconds)
    engine.cost.check_integrity()
    off = [abs(predicted_s / actual_s - 1) for predicted_s, actual_s in firsts]
    return {
        "model": f"{Path(folder).name} {quantization or llm.settings.dtype}",
        "steps": len(records),
        "error": quantiles([error(record) for record in records]),
        "by_size": by_size(records),
        "spread": quantiles(spreads),
        "pairs": len(spreads),
        "first_token": quantiles(off),
        "requests": len(firsts),
        "parts": parts,
        "curve": curve(records),
        "firsts": firsts,
    }


def curve(records: list[StepRecord]) -> list[tuple[float, float, float]]:
    """(tokens, measured ms, predicted ms): medians over the steps of 1, 2, 3 to 4, … tokens."""
    found = []
    for power in range(15):
        some = [r for r in records if (r.num_tokens - 1).bit_length() == power]
        if some:
            rows = [(r.num_tokens, r.duration_s + r.gap_s, r.predicted_s) for r in some]
            tokens, measured_s, predicted_s = np.median(np.array(rows), axis=0).tolist()
            found.append((tokens, 1e3 * measured_s, 1e3 * predicted_s))
    return found


def show(results: list[dict[str, Any]]) -> None:
    """The table of all so far; the errors by size and the parts of the last."""
    columns = ("median", "p95", "same step twice", "p95", "first token", "p95")
    print(f"\n{heading(['model', 'steps', *columns])}")
    for result in results:
        figures = [*result["error"], *result["spread"], *result["first_token"]]
        print(line([result["model"], result["steps"], *(f"{100 * f:.1f}%" for f in figures)]))
    sizes, parts = results[-1]["by_size"].items(), results[-1]["parts"].items()
    print(f"\n{results[-1]['model']}, by tokens of a step: ", end="")
    print(", ".join(f"{k} {100 * m:.1f}% p95 {100 * p:.0f}% ({n})" for k, (n, m, p) in sizes))
    print(", ".join(f"{k} {1e6 * v:.4g}" for k, v in parts), "µs", flush=True)


def panels(results: list[dict[str, Any]]) -> list[Panel]:
    """For each model: a step by its tokens, and first tokens from the soonest to the latest."""
    found = []
    for result in results:
        steps, firsts = result["curve"], sorted(result["firsts"], key=lambda pair: pair[1])
        found.append(
            Panel(
                title=f"{result['model']}: a step",
                x="tokens of the step",
                y="ms, median",
                log_x=True,
                lines={
                    "measured": [(n, measured) for n, measured, _ in steps],
                    "predicted": [(n, predicted) for n, _, predicted in steps],
                },
            )
        )
        if firsts:
            found.append(
                Panel(
                    title=f"{result['model']}: first token",
                    x="requests, soonest first",
                    y="ms",
                    lines={
                        "measured": [(i, 1e3 * actual) for i, (_, actual) in enumerate(firsts, 1)],
                        "predicted": [(i, 1e3 * said) for i, (said, _) in enumerate(firsts, 1)],
                    },
                )
            )
    return found


def main() -> None:
    """Measure each model, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["headway-tiny"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the load, for each model")
    parser.add_argument("--requests", type=float, default=8.0, help="that run at once, usually")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    results = []
    for name in given.models:
        results.append(measure(name, given))
        show(results)
        write_json(given.json, results, indent=1)
        if given.svg:
            given.svg.write_text(chart(panels(results)))


if __name__ == "__main__":
    main()
