"""Where a step's time goes outside the kernels: `python benchmarks/step_overhead.py [FOLDER]`.

Sequences of a context decode together; a line tells of one step, the median of many: the time of
the executor, the part of it inside native calls, their number, the rest (Python and torch), and
how many torch operations ran and tensors they allocated. Without a folder the model is
headway-tiny. `--rounds` repeats the measurement and keeps the quickest median, for a machine with
other work.
"""

import argparse
import dataclasses
import random
import statistics
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import heading
from headway import LLM, SamplingParams
from headway.core.request import Request
from headway.runtime.kernels import table
from headway.runtime.native.library import NativeLibrary


@dataclasses.dataclass(slots=True)
class Sums:
    """Of one step: seconds and number of native calls, torch operations, tensors made."""

    native_s: float = 0.0
    calls: int = 0
    operations: int = 0
    tensors: int = 0


class TimedCalls:
    """The native calls, each timed."""

    def __init__(self, calls: Any, sums: Sums) -> None:
        self._calls, self._sums = calls, sums

    def __getattr__(self, name: str) -> Any:
        call, sums = getattr(self._calls, name), self._sums

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments)
            sums.native_s += time.perf_counter() - started
            sums.calls += 1
            return result

        setattr(self, name, timed)
        return timed


class CountOperations(TorchDispatchMode):
    """Counts operations of torch, and their outputs that are no views."""

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._sums.operations += 1
        if isinstance(result, torch.Tensor) and not func.is_view:
            self._sums.tensors += 1
        return result


class Steps:
    """Decodes with one model, each step of its executor timed."""

    def __init__(self, folder: str, dtype: str, quantization: str) -> None:
        self.sums = Sums()
        original = table.load

        def load(*arguments: Any) -> tuple[NativeLibrary | None, str]:
            library, why = original(*arguments)
            if library is not None:
                library = dataclasses.replace(library, calls=TimedCalls(library.calls, self.sums))
            return library, why

        table.load = load
        self.llm = LLM(
            folder,
            dtype=dtype,
            quantization=quantization,
            max_model_len=1024,
            max_num_seqs=32,
            skip_tokenizer_init=True,
        )
        table.load = original
        self._random, self._number = random.Random(0), 0

    def start(self, num_seqs: int, context: int) -> None:
        """Sequences of `context` tokens each, ready to decode."""
        engine, vocab = self.llm.engine, self.llm.spec.vocab_size
        params = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
        for _ in range(num_seqs):
            prompt = [self._random.randrange(5, vocab) for _ in range(context)]
            self._number += 1
            engine.add(Request(self._number, prompt, params))
        scheduler = engine.scheduler
        while scheduler.waiting or any(s.num_known - s.computed > 1 for s in scheduler.running):
            engine.step()

    def end(self) -> None:
        """Forget the sequences."""
        for sequence in list(self.llm.engine.scheduler.running):
            self.llm.engine.abort(sequence.request.request_id)
        self.llm.engine.step()

    def step(self) -> tuple[float, float, int]:
        """(seconds in the executor, in native calls, number of these)."""
        self.sums.native_s, self.sums.calls = 0.0, 0
        record = self.llm.engine.step()[1]
        step_s = record.prepare_s + record.forward_s + record.sample_s
        return step_s, self.sums.native_s, self.sums.calls

    def counted(self) -> Sums:
        """What one step does in torch."""
        self.sums.operations = self.sums.tensors = 0
        with CountOperations(self.sums):
            self.llm.engine.step()
        return self.sums


def measure(steps: Steps, num_seqs: int, chosen: argparse.Namespace) -> str:
    """A line of the table."""
    steps.start(num_seqs, chosen.context)
    best = (float("inf"), 0.0, 0)
    for _ in range(chosen.rounds):
        found = [steps.step() for _ in range(chosen.steps)]
        best = min(best, tuple(statistics.median(column) for column in zip(*found, strict=True)))
    sums = steps.counted()
    steps.end()
    step_s, native_s, calls = best
    cells = [
        f"{step_s * 1e3:.3f}",
        f"{native_s * 1e3:.3f}",
        f"{calls:.0f}",
        f"{(step_s - native_s) * 1e3:.3f}",
        f"{(step_s - native_s) / step_s:.0%}",
        f"{sums.operations}",
        f"{sums.tensors}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantizations", nargs="*", default=["none"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    columns = ("step ms", "native ms", "calls", "rest ms", "rest", "torch", "tensors")
    print(heading(["weights", "sequences", *columns]))
    for quantization in chosen.quantizations:
        steps = Steps(chosen.folder, chosen.dtype, quantization)
        for num_seqs in chosen.batches:
            print(f"| {quantization} | {num_seqs} {measure(steps, num_seqs, chosen)}", flush=True)


if __name__ == "__main__":
    main()
