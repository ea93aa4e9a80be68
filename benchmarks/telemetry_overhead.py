"""What telemetry costs: `python benchmarks/telemetry_overhead.py [FOLDER]`.

A decode step at 32 and 256 sequences, everything counted: the record in the engine, encoding and
decoding it, the record in the server, and a timestamp for each token. Then a request from arrival
to verdict. Best of several runs, microseconds; nothing else of the server or the engine is in it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.core.plan import StepPlan
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.planning import plan_settings
from headway.runtime.null import NullExecutor
from headway.spec import read_model_spec
from headway.telemetry.live import Telemetry


def best_us(work: Callable[[], object], runs: int = 200, repeats: int = 10) -> float:
    """Microseconds of one call, in the best of the repeats."""
    best_s = float("inf")
    for _ in range(repeats):
        started_s = time.perf_counter()
        for _ in range(runs):
            work()
        best_s = min(best_s, (time.perf_counter() - started_s) / runs)
    return best_s * 1e6


class LastPlan(NullExecutor):
    """Keeps the last plan, so that its record can be made again."""

    plan: StepPlan

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan
        super().submit(plan)


def step_cost(folder: Path, num_seqs: int) -> dict[str, float]:
    """Microseconds of telemetry in one decode step."""
    options = EngineOptions(
        max_num_seqs=num_seqs, max_num_batched_tokens=8192, load_format="dummy", device="cpu"
    )
    spec, settings, _, _ = plan_settings(folder, options)
    blocks = (num_seqs * 12 + 1,) * len(settings.cache.num_blocks)
    settings = replace(settings, cache=replace(settings.cache, num_blocks=blocks))
    executor = LastPlan()
    engine = build_engine(executor, settings, vocab_size=spec.vocab_size, eos_token_ids=())
    for i in range(num_seqs):
        engine.add(Request(i, [1] * 64, SamplingParams(max_tokens=100)))
    while engine.scheduler.waiting or executor.plan.num_tokens > num_seqs:
        engine.step()
    make, last = engine.recorder.record, list[Any]()

    def keep(*given: Any, is_idle: bool) -> StepRecord:
        last[:] = given
        return make(*given, is_idle=is_idle)

    engine.recorder.record = keep  # type: ignore[method-assign]
    record = engine.step()[1]
    model = Telemetry(["bench"], spec)
    timelines = [
        model.begin(str(i), arrived_s=model.clock.now_s(), num_prompt=64, num_choices=1)
        for i in range(num_seqs)
    ]

    def tokens() -> None:
        for timeline in timelines:
            timeline.add_tokens(0, 1)

    frame = msgspec.msgpack.encode(record)
    decoder = msgspec.msgpack.Decoder(StepRecord)
    return {
        "engine: record": best_us(lambda: make(*last, is_idle=False)),
        "message": best_us(lambda: decoder.decode(msgspec.msgpack.encode(record))),
        "server: record": best_us(lambda: model.on_step(record)),
        "server: tokens": best_us(tokens),
        "bytes": float(len(frame)),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    folder = model_folder(parser.parse_args().folder)
    costs = {n: step_cost(folder, n) for n in (32, 256)}
    print(f"{'us a step':<24}" + "".join(f"{n:>10}" for n in costs))
    for name in costs[32]:
        print(f"{name:<24}" + "".join(f"{cost[name]:>10.1f}" for cost in costs.values()))
    totals = [sum(v for k, v in cost.items() if k != "bytes") for cost in costs.values()]
    print(f"{'all':<24}" + "".join(f"{total:>10.1f}" for total in totals))

    model = Telemetry(["bench"], read_model_spec(folder))

    def request() -> None:
        timeline = model.begin("x", arrived_s=model.clock.now_s(), num_prompt=9, num_choices=1)
        timeline.add_tokens(0, 1)
        timeline.complete()

    print(f"{'a request':<24}{best_us(request):>10.1f} us")


if __name__ == "__main__":
    main()
