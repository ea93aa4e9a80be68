"""A widened model beside its small one and its shape: `python benchmarks/widened.py FOLDER`.

FOLDER is widened (`--like`) into a temporary place, in its own type. First the largest
difference from the small logits in fp32, computed in fp32 and in bf16, over 256 random tokens;
then tokens/s of the widened model and of random weights in the same shape, both loaded at once and
taking turns: medians of repeats and their ratio. `--skip-speed` and `--skip-logits` leave one out.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from headway import LLM
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan
from headway.core.request import SamplingParams
from offline import Rates
from widening import SHAPES, find_shape, widen

CONTEXT = 256
DTYPES = ("float32", "bfloat16")


@torch.inference_mode()
def logits(folder: Path, dtype: str, ids: list[int]) -> torch.Tensor:
    """Headway's logits after each of `ids`, (T, V), as served."""
    llm = LLM(folder, dtype=dtype, skip_tokenizer_init=True, kv_memory="64MiB")
    executor = llm.engine.executor
    blocks = list(range(1, 1 - (-len(ids) // executor.settings.cache.block_size)))
    new = NewSequence(0, 0, ids, len(ids), SamplingParams(), 0)
    plan = StepPlan(0, [new], [ScheduledSequence(0, 0, ids, [blocks], True)], [])
    executor.state.apply(plan)
    return executor.model.logits(executor.forward(executor.state.batch(plan)))


def compare(small: Path, wide: Path, vocab: int) -> None:
    """Print how far the widened model is from the small one in fp32, in either type."""
    ids = [random.Random(0).randrange(vocab) for _ in range(CONTEXT)]
    exact = logits(small, "float32", ids)
    print(f"logits of {CONTEXT} tokens, the largest {exact.abs().max():.1f}")
    for dtype in DTYPES:
        found = logits(wide, dtype, ids)
        own = logits(small, dtype, ids)
        kinds = [("widened", found[:, :vocab])]
        kinds += [("small", own)] if dtype != "float32" else []
        for name, values in kinds:
            agree = (values.argmax(-1) == exact.argmax(-1)).float().mean()
            largest = (values - exact).abs().max()
            print(f"  {name:<8} in {dtype:<9} differs by {largest:.2g}, top-1 {agree:.1%}")
        print(f"  padding  in {dtype:<9} at most {found[:, vocab:].max():.0f}")


def race(wide: Path, batches: list[int], repeats: int) -> None:
    """Print tokens/s of the widened model and of random weights, taking turns."""
    given = {"max_model_len": 1024, "max_num_seqs": 32, "skip_tokenizer_init": True}
    given["kv_memory"] = "1GiB"
    rates = {
        "widened": Rates(LLM(wide, **given)),
        "random": Rates(LLM(wide, load_format="dummy", **given)),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for repeat in range(-1, repeats):  # the first warms up
        for name in sorted(rates, reverse=repeat % 2 == 0):
            speeds = {"prefill": rates[name].prefill()}
            speeds |= {f"batch {batch}": rates[name].decode(batch) for batch in batches}
            for kind, speed in speeds.items():
                if repeat >= 0:
                    found.setdefault(kind, {}).setdefault(name, []).append(speed)
    print(f"{'tok/s':<10}{'widened':>10}{'random':>10}{'ratio':>8}{'of pairs':>16}")
    for kind, speeds_of in found.items():
        a, b = statistics.median(speeds_of["widened"]), statistics.median(speeds_of["random"])
        pairs = [x / y for x, y in zip(speeds_of["widened"], speeds_of["random"], strict=True)]
        print(f"{kind:<10}{a:>10.1f}{b:>10.1f}{a / b:>8.3f}{min(pairs):>9.2f} – {max(pairs):.2f}")


def main() -> None:
    """Widen, compare, race."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", default="qwen2.5-0.5b", help=", ".join(SHAPES))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-logits", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        wide = Path(place) / "wide"
        started = time.perf_counter()
        plan = widen(chosen.folder, find_shape(chosen.like), wide)
        size = (wide / "model.safetensors").stat().st_size
        print(f"written: {size / 2**20:.0f} MiB in {time.perf_counter() - started:.1f} s")
        if not chosen.skip_logits:
            compare(chosen.folder, wide, plan.small.vocab_size)
        if not chosen.skip_speed:
            race(wide, [int(batch) for batch in chosen.batches.split(",")], chosen.repeats)


if __name__ == "__main__":
    main()
