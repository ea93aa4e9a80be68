"""What KV blocks on a disk save after a restart and in long conversations:

    python benchmarks/kv_tiers.py                              # both, on the embedded model
    python benchmarks/kv_tiers.py --only turns --shape qwen2.5-0.5b --layers 12 --quantization int4

`restart` asks a real server for a token behind 1,500 shared ones: cold, found in memory, and found
by the next server on the disk. `turns` is a conversation that is idle after each turn, so that
others have taken its memory when it goes on: the prompt tokens computed beside those that are new.
`--shape` takes random weights of a published model's shape.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import markdown, serving, write_json
from headway.assemble import make_executor
from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.engine.calibration import warm_up
from headway.engine.engine import Engine
from headway.planning import plan_settings
from widening import find_shape

SHARED, QUESTION = 1500, 24
ANSWER = 16
IDLE_S = 60.0


def write_shape(name: str, folder: Path, max_len: int, layers: int) -> Path:
    """The config.json of a published shape, or of `layers` layers of it, for random weights."""
    shape = find_shape(name)
    config = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": layers or shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ── a real server, twice ────────────────────────────────────────────────────────────────────


def first_token_s(url: str, prompt: list[int]) -> float:
    """Seconds until a streamed answer shows its first token."""
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.readline()
        took_s = time.perf_counter() - began
        answer.read()
    return took_s


def restart(folder: Path | str, flags: list[str], vocab: int, times: int, shared: int) -> dict:
    """Median milliseconds to a first token behind `shared` tokens: cold, in memory, on the disk."""
    rng = np.random.default_rng(0)
    systems = [rng.integers(3, vocab, shared).tolist() for _ in range(times)]

    def first_tokens_s(url: str) -> list[float]:
        questions = [rng.integers(3, vocab, QUESTION).tolist() for _ in systems]
        return [first_token_s(url, s + q) for s, q in zip(systems, questions, strict=True)]

    with tempfile.TemporaryDirectory() as root:
        flags = [*flags, f"--kv-disk={root}/kv:4GB", "--kv-disk-write=through"]
        with serving(folder, *flags) as (url, _):
            first_token_s(url, rng.integers(3, vocab, shared).tolist())
            took = {"cold": first_tokens_s(url), "memory": first_tokens_s(url)}
            settle(Path(root))
        with serving(folder, *flags) as (url, _):
            first_token_s(url, rng.integers(3, vocab, shared).tolist())
            took["disk"] = first_tokens_s(url)
    found = {name: statistics.median(each) * 1e3 for name, each in took.items()}
    found["ratio"] = found["disk"] / found["cold"]
    print(
        markdown(
            (f"first token behind {shared:,} tokens", "ms, median", "lowest to highest"),
            [
                (name, f"{found[name]:.1f}", f"{min(each) * 1e3:.1f} to {max(each) * 1e3:.1f}")
                for name, each in took.items()
            ],
        )
    )
    print(f"\nafter a restart {found['ratio']:.3f} of cold\n", flush=True)
    return found


def settle(root: Path) -> None:
    """Wait until the folder grows no more."""
    before, until_s = -1, time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        size = sum(path.stat().st_size for path in root.rglob("*.kv"))
        if size == before:
            return
        before = size
        time.sleep(0.5)


# ── an engine in this process ───────────────────────────────────────────────────────────────


class Bench:
    """An executor with a disk, and engines over it."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        spec, self.settings, _, machine = plan_settings(folder, options)
        self.executor = make_executor(folder, options, spec, self.settings, machine, None)
        self.vocab_size, self.number, self.num_failed = spec.vocab_size, 0, 0
        self.rng = np.random.default_rng(0)
        assert self.executor.transfers.disk is not None, "there is no disk"
        self.store = self.executor.transfers.disk.store

    def engine(self, *, disk: bool = True) -> Engine:
        cache = self.settings.cache
        settings = replace(
            self.settings, cache=replace(cache, disk_bytes=cache.disk_bytes if disk else 0)
        )
        made = build_engine(self.executor, settings, vocab_size=self.vocab_size, eos_token_ids=())
        warm_up(made)
        return made

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.vocab_size, count).tolist()

    def ask(self, engine: Engine, prompt: list[int], answer: int) -> tuple[list[int], int, float]:
        """(the answer, prompt tokens computed, seconds to its first token)."""
        self.number += 1
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        began, first_s = time.perf_counter(), 0.0
        engine.add(Request(self.number, prompt, sampling))
        got: list[int] = []
        computed = 0
        while len(got) < answer:
            updates, record = engine.step()
            computed += 0 if got else record.num_tokens
            self.num_failed += record.num_failed_reads
            for update in updates:
                first_s = first_s or time.perf_counter() - began
                got += update.token_ids
        return got, computed, first_s

    def idle(self, engine: Engine) -> None:
        """Write what is due; then others need the memory."""
        while engine.has_work:
            engine.step()
        self.store.flush()
        engine.step() if engine.has_work else None
        engine.kv.forget_free()


@contextmanager
def opened(folder: Path, given: argparse.Namespace, **more: object) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as root:
        options = EngineOptions(
            load_format="dummy" if given.shape else "auto",
            quantization=given.quantization,
            kv_cache_dtype=given.kv_cache_dtype,
            skip_tokenizer_init=bool(given.shape),
            kv_disk=f"{root}/kv:20GB",
            **more,
        )
        bench = Bench(folder, options)
        try:
            yield bench
        finally:
            bench.store.close()


def conversation(bench: Bench, turns: int, low: int, high: int, *, idles: bool) -> dict:
    """A conversation, on the device or idle after each turn: tokens computed beside those that are
    new."""
    engine = bench.engine()
    text: list[int] = []
    new, computed, first_s, lengths = [], [], [], []
    known = 0
    for turn in range(turns):
        text += bench.tokens(int(bench.rng.integers(low, high + 1)))
        answer, count, took_s = bench.ask(engine, list(text), ANSWER)
        new.append(len(text) - known)
        computed.append(count)
        lengths.append(len(text))
        first_s.append(took_s)
        known, text = len(text) + ANSWER - 1, text + answer
        if idles:
            bench.idle(engine)
        if (turn + 1) % 30 == 0:
            print(f"turn {turn + 1}: {len(text):,} tokens, first token {took_s * 1e3:.0f} ms")
    ratio = sum(computed) / sum(new)
    prompts = sum(lengths)
    where = "through the disk after each" if idles else "on the device"
    print(f"{turns} turns of {low} to {high} tokens and {ANSWER} of answer, {where}: "
          f"{sum(computed):,} computed of {sum(new):,} new, {ratio:.3f}; "
          f"{bench.num_failed} reads failed; without a cache {prompts:,}\n",
          flush=True)  # fmt: skip
    return {"new": sum(new), "computed": sum(computed), "ratio": ratio, "first_s": first_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--shape", help="random weights of a published shape: qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of turns")
    parser.add_argument("--only", choices=("restart", "turns"))
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--shared", type=int, default=SHARED)
    parser.add_argument("--turns", type=int, default=180)
    parser.add_argument("--turn-tokens", default="48-96", help="of a user, the fewest and the most")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    low, high = map(int, given.turn_tokens.split("-"))
    results = {}
    with tempfile.TemporaryDirectory() as made:
        longest = max(given.turns * (high + ANSWER) + ANSWER, 2 * SHARED)
        folder = (
            write_shape(given.shape, Path(made), longest, given.layers)
            if given.shape
            else model_folder(given.model)
        )
        if given.only in (None, "restart"):
            dummy = ["--load-format=dummy", "--skip-tokenizer-init"] if given.shape else []
            flags = [*dummy, f"--quantization={given.quantization}"]
            results["restart"] = restart(folder, flags, 4000, given.times, given.shared)
        if given.only in (None, "turns"):
            with opened(folder, given, kv_disk_write="through") as bench:
                longest = bench.settings.max_model_len
                turns = min(given.turns, longest // (high + ANSWER) - 1)
                for name, idles in (("device", False), ("disk", True)):
                    told = conversation(bench, turns, low, high, idles=idles)
                    results[f"turns, {name}"] = told
    write_json(given.json, results, indent=1)


if __name__ == "__main__":
    main()
