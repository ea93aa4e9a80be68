"""Decode speed with fewer tokens by layer: `python benchmarks/kv_layers.py FOLDER`.

32 sequences of 2,048 random tokens are computed by the whole model and by the same model with
windows by layer, both in one process; then both decode in turn, some steps each, so that neighbours
on the machine meet both. Without `--kv-layers FILE` the windows leave `--share` of the KV: the
second layer sees everything, all others one window and 4 sinks. With `--kv-read 25%` the second
model reads its best blocks in their place, with `--kv-keep 25%` it keeps a part of each prompt;
layers 1 and 2 are whole then, where no file says others: so headway-tiny passes the gate.
The ceiling counts the bytes that a step must read, packed weights and KV with bounds of keys, over
the bandwidth that the runtime probed last.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from common import heading
from headway import LLM, SamplingParams
from headway.config.kv_keep import tokens_kept
from headway.config.kv_read import blocks_read
from headway.core.request import Request
from headway.perf.roofline import ModelWork
from headway.spec import read_model_spec

ROOM = 160
"""Tokens that a sequence may decode."""
SINKS = 4
TWO_WHOLE = "layers: {1-2: whole}\n"
PROBE_S = 0.6


class Decoding:
    """One engine whose sequences all decode."""

    def __init__(
        self, folder: Path, chosen: argparse.Namespace, kv_layers: str = "", **less: str
    ) -> None:
        self.llm = LLM(
            folder,
            quantization=chosen.quantization,
            kv_cache_dtype=chosen.kv_cache_dtype,
            kv_layers=kv_layers,
            **less,
            max_model_len=chosen.context + ROOM,
            max_num_seqs=chosen.batch,
            prefix_cache=False,
            skip_tokenizer_init=True,
        )
        self.batch, self.context = chosen.batch, chosen.context
        engine, draw = self.llm.engine, random.Random(0)
        params = SamplingParams(temperature=0, max_tokens=ROOM, ignore_eos=True)
        for number in range(1, chosen.batch + 1):
            prompt = [draw.randrange(self.llm.spec.vocab_size) for _ in range(chosen.context)]
            engine.add(Request(number, prompt, params))
        scheduler = engine.scheduler
        while scheduler.waiting or any(s.num_known - s.computed > 1 for s in scheduler.running):
            engine.step()
        assert len(scheduler.running) == chosen.batch, "the KV memory does not hold the batch"
        self.rates: list[float] = []

    def decode(self, steps: int) -> None:
        """Tokens/s over so many steps."""
        started = time.perf_counter()
        for _ in range(steps):
            self.llm.engine.step()
        self.rates.append(self.batch * steps / (time.perf_counter() - started))

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values that a step reads."""
        cache, groups = self.llm.settings.cache, self.llm.spec.kv_groups
        best = cache.block_size * blocks_read(cache.read, -(-self.context // cache.block_size))
        total = 0.0
        for g in groups:
            keys = replace(g, bounds=0).bytes_per_token(cache.dtype)
            bounds = self.context * (g.bytes_per_token(cache.dtype) - keys)
            seen = g.seen(self.context)
            if g.chooses:
                seen = tokens_kept(cache.keep, self.context, cache.block_size)
            total += keys * (best if g.bounds else seen) + bounds
        return self.batch * total

    @property
    def weight_bytes(self) -> float:
        """Bytes of packed weights that a step reads."""
        per_weight = self.llm.engine.executor.describe().bytes_per_weight
        settings = self.llm.settings
        work = ModelWork(self.llm.spec, settings.dtype, settings.cache.dtype, per_weight)
        return float(work.weight_bytes)

    def row(self, name: str, whole: "Decoding") -> str:
        """A line of the table; the ratio is the median of the rounds' own."""
        rate = statistics.median(self.rates)
        ratio = statistics.median(a / b for a, b in zip(self.rates, whole.rates, strict=True))
        bandwidth = self.llm.engine.executor.describe().ceilings.bandwidth_bytes_per_s
        ceiling = self.batch * bandwidth / (self.kv_bytes + self.weight_bytes)
        return (
            f"| {name} | {self.kv_bytes / whole.kv_bytes:.3f} | {self.kv_bytes / 1e9:.2f} "
            f"| {self.weight_bytes / 1e9:.2f} | {rate:.1f} ({min(self.rates):.1f} … "
            f"{max(self.rates):.1f}) | {ratio:.2f} | {ceiling:.0f} |"
        )


def evenly(folder: Path, share: float, context: int) -> str:
    """The YAML of one whole layer and one window in all others, which together leave `share`."""
    layers = read_model_spec(folder).num_layers
    window = int((share * layers - 1) * context / (layers - 1)) - SINKS
    assert window > 0, f"one whole layer of {layers} is more than --share"
    row = f"{{window: {window}, sinks: {SINKS}}}"
    return f"layers: {{0: {row}, 2-{layers - 1}: {row}}}\n"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--kv-layers", help="YAML file; by default windows alike that leave --share"
    )
    parser.add_argument("--kv-read", default="", help="the best blocks, as 25%%, and no windows")
    parser.add_argument("--kv-keep", default="", help="a part of each prompt, as 25%%, no windows")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="of each in a round")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.kv_layers or str(Path(folder, "windows.yaml"))
        if not chosen.kv_layers:
            windows = evenly(chosen.folder, chosen.share, chosen.context)
            Path(path).write_text(TWO_WHOLE if chosen.kv_read or chosen.kv_keep else windows)
        whole = Decoding(chosen.folder, chosen)
        less = {"kv_read": chosen.kv_read, "kv_keep": chosen.kv_keep}
        narrow = Decoding(chosen.folder, chosen, path, **less)
    for each in (whole, narrow):
        each.llm.engine.executor.probe(PROBE_S)
    for _ in range(chosen.rounds):
        for each in (whole, narrow):
            each.decode(chosen.steps)
    columns = ("KV read", "GB of KV", "GB of weights", "tok/s (least … most)", "ratio", "ceiling")
    print(heading([f"{chosen.batch} × {chosen.context:,}", *columns]))
    print(whole.row("whole", whole))
    name = f"best {chosen.kv_read}" if chosen.kv_read else "windows"
    print(narrow.row(f"kept {chosen.kv_keep}" if chosen.kv_keep else name, whole))


if __name__ == "__main__":
    main()
