"""What KV blocks on a disk save after a restart, in long conversations, and what they cost:

    python benchmarks/kv_tiers.py                              # all three, on the embedded model
    python benchmarks/kv_tiers.py --only turns --shape qwen2.5-0.5b --layers 12 --quantization int4
    python benchmarks/kv_tiers.py --only counted               # the same turns, without a model
    python benchmarks/kv_tiers.py --only death --streams 50

`restart` asks a real server for a token behind 1,500 shared ones: cold, found in memory, and found
by the next server on the disk. `turns` is a conversation that is idle after each turn, so that
others have taken its memory when it goes on: the prompt tokens computed beside those that are new.
`counted` counts these on the device over an executor that computes nothing, in blocks of 16 and 64.
`never` asks prompts that nobody sent before, with the disk and without in turn: what is written and
never read costs. `death` kills the engine of a server with so many streams, and shows the gaps in
them. `--shape` takes random weights of a published model's shape.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np

from common import markdown, serving, write_json
from headway.assemble import make_executor, plan_settings
from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from mooncake_hits import engine_of
from widening import find_shape

SHARED, QUESTION = 1500, 24
ANSWER = 16
NEVER = 1000
IDLE_S = 60.0
COUNTED_TOKENS = 2**17


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

    def asked(url: str) -> list[float]:
        questions = [rng.integers(3, vocab, QUESTION).tolist() for _ in systems]
        return [first_token_s(url, s + q) for s, q in zip(systems, questions, strict=True)]

    with tempfile.TemporaryDirectory() as root:
        flags = [*flags, f"--kv-disk={root}/kv:4GB", "--kv-disk-write=through"]
        with serving(folder, *flags) as (url, _):
            first_token_s(url, rng.integers(3, vocab, shared).tolist())
            took = {"cold": asked(url), "memory": asked(url)}
            settle(Path(root))
        with serving(folder, *flags) as (url, _):
            first_token_s(url, rng.integers(3, vocab, shared).tolist())
            took["disk"] = asked(url)
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


async def stream(
    http: aiohttp.ClientSession, body: dict, tokens: list[int], times: list[float]
) -> list[int]:
    """The tokens of a streamed answer, and when each event came."""
    async with http.post("/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                if ids := event["choices"][0].get("token_ids"):
                    tokens += ids
                    times.append(time.perf_counter())
    return tokens


ENDINGS: list[dict] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1, "seed": 3, "ignore_eos": True},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{900}"}},
]
"""Greedy, seeded and structured."""


async def death(folder: Path | str, flags: list[str], count: int) -> dict:
    """Gaps of `count` streams whose engine is killed, with their blocks on a disk and without."""
    found = {}
    for name, more in (("through", ["--kv-disk-write=through"]), ("without", [])):
        with tempfile.TemporaryDirectory() as root:
            disk = [f"--kv-disk={root}/kv:4GB", *more] if more else []
            with serving(folder, "--dtype=float32", *flags, *disk) as (url, pid):
                found[name] = await one_death(url, pid, count)
        told = found[name]
        print(f"{name}: {count} streams, all go on with equal tokens: {told['equal']}; engine "
              f"again after {told['load_s']:.2f} s, slowest gap {told['gap_s']:.2f} s, median "
              f"{told['median_s']:.2f} s", flush=True)  # fmt: skip
    return found


async def one_death(url: str, server: int, count: int) -> dict:
    """Ask all undisturbed, ask all again under another salt, and kill the engine on the way."""
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    more = {"model": model, "max_tokens": 300, "return_token_ids": True}
    rng = np.random.default_rng(0)
    bodies = [
        {"prompt": rng.integers(10, 300, 700).tolist(), **ENDINGS[at % len(ENDINGS)], **more}
        for at in range(count)
    ]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as http:
        apart = [stream(http, body | {"cache_salt": "apart"}, [], []) for body in bodies]
        expected = await asyncio.gather(*apart)
        came: list[list[int]] = [[] for _ in bodies]
        times: list[list[float]] = [[] for _ in bodies]
        going = asyncio.gather(*map(stream, [http] * count, bodies, came, times))
        while min(map(len, came)) < 100:
            assert not going.done(), "they ended before the engine did"
            await asyncio.sleep(0.01)
        (engine,) = engines(server)
        os.kill(engine, signal.SIGKILL)
        killed_s = time.perf_counter()
        load_s = 0.0
        while not load_s and not going.done():
            async with http.get("/ready") as ready:
                load_s = time.perf_counter() - killed_s if ready.status == 200 else 0.0
            new = [pid for pid in engines(server) if pid != engine]
            load_s = load_s if new else 0.0
            await asyncio.sleep(0.02)
        got = await going
    gaps = [
        max(after - before for before, after in pairwise(each) if after > killed_s)
        for each in times
    ]
    return {"equal": got == expected, "load_s": load_s, "gap_s": max(gaps),
            "median_s": statistics.median(gaps)}  # fmt: skip


def engines(server: int) -> list[int]:
    """The engine processes that a server has started."""
    found = []
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with suppress(OSError):
            if b"headway.assemble" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


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
        made = Engine(self.executor, settings, vocab_size=self.vocab_size, eos_token_ids=())
        made.warm_up()
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


class Counted(Bench):
    """Engines with blocks of `size` tokens over an executor that computes nothing."""

    def __init__(self, size: int) -> None:
        self.size, self.vocab_size, self.number, self.num_failed = size, 100_000, 0, 0
        self.rng = np.random.default_rng(0)

    def engine(self, *, disk: bool = False) -> Engine:
        assert not disk, "nothing is written"
        return engine_of(COUNTED_TOKENS // self.size, "lfu", 1, self.size)


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
    engine = bench.engine(disk=idles or not isinstance(bench, Counted))
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


def never(bench: Bench, times: int, length: int, rows: int) -> dict:
    """Seconds to first tokens, and tokens a second of `rows` answers, with the disk and without."""
    engines = {"with": bench.engine(), "without": bench.engine(disk=False)}
    first: dict[str, list[float]] = {name: [] for name in engines}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(times):
        for name in sorted(engines, reverse=bool(turn % 2)):
            engine = engines[name]
            first[name].append(bench.ask(engine, bench.tokens(length), 1)[2])
            began, count = time.perf_counter(), 0
            for _ in range(rows):
                bench.number += 1
                sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
                engine.add(Request(bench.number, bench.tokens(64), sampling))
            while count < 64 * rows:
                count += sum(len(update.token_ids) for update in engine.step()[0])
            rates[name].append(count / (time.perf_counter() - began))
    found = {
        "first_token": statistics.median(first["with"]) / statistics.median(first["without"]),
        "rate": statistics.median(rates["with"]) / statistics.median(rates["without"]),
    }
    print(f"prompts that nobody sent: first token {found['first_token']:.3f}, tokens/s "
          f"{found['rate']:.3f} of those without the disk "
          f"({statistics.median(first['without']) * 1e3:.1f} ms, "
          f"{statistics.median(rates['without']):.0f} tok/s)\n", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--shape", help="random weights of a published shape: qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of turns and never")
    parser.add_argument("--only", choices=("restart", "turns", "counted", "never", "death"))
    parser.add_argument("--streams", type=int, default=50, help="that the engine has as it dies")
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
        if given.only in (None, "counted"):
            for size in (16, 64):
                print(f"blocks of {size}, counted:")
                told = conversation(Counted(size), given.turns, low, high, idles=False)
                results[f"turns, counted, {size}"] = told
        if given.only in (None, "never"):
            with opened(folder, given) as bench:
                length = min(NEVER, bench.settings.max_model_len - 2)
                results["never"] = never(bench, 3 * given.times, length, 8)
        if given.only == "death":
            flags = ["--kv-memory=512MiB", f"--max-num-seqs={given.streams}"]
            flags += ["--max-queue-wait=600s"]
            results["death"] = asyncio.run(death(folder, flags, given.streams))
    write_json(given.json, results, indent=1)


if __name__ == "__main__":
    main()
