"""From nothing to the first token: `python benchmarks/start.py FOLDER --quantization int4`.

Starts fresh processes, alternating without and with packed weights on disk, and prints medians:
interpreter and imports, loading (of it reading and packing), the engine's warm-up, the first token
of a prompt of 16. The first run of each kind warms the file cache and writes the packed weights,
and does not count. Weights are packed in a folder of this run alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = ("imports", "reading", "packing", "the rest of loading", "first token", "all")
PROMPT = list(range(1, 17))

Times = dict[str, float]
"""Part → seconds."""


def start(folder: Path, options: dict[str, str], began_s: float) -> Times:
    """In a fresh process: load the model, make a token; `began_s` is when it was started."""
    from headway import LLM, SamplingParams, assemble

    spent = {"reading": 0.0, "packing": 0.0}
    plain_executor = assemble.make_executor
    imported_s = 0.0

    def make_executor(*arguments: object) -> object:
        nonlocal imported_s
        lookup = assemble.look_up_weights(arguments[0], arguments[3])  # type: ignore[arg-type]
        from headway.runtime import checkpoint, executor, loading

        imported_s = time.monotonic()
        assemble.look_up_weights = lambda *_: lookup
        checkpoint.fill = timed(checkpoint.fill, spent, "reading")
        loading.cached_weights = timed(loading.cached_weights, spent, "reading")
        for kind in (loading.Linear, loading.ExpertLinear):
            kind.prepare = timed(kind.prepare, spent, "packing")  # type: ignore[method-assign]
        assert executor
        return plain_executor(*arguments)  # type: ignore[arg-type]

    assemble.make_executor = make_executor  # type: ignore[assignment]
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=2048, **options)
    loaded_s = time.monotonic()
    llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    done_s = time.monotonic()
    return {
        "imports": imported_s - began_s,
        **spent,
        "the rest of loading": loaded_s - imported_s - sum(spent.values()),
        "first token": done_s - loaded_s,
        "all": done_s - began_s,
    }


def timed(function, spent: Times, name: str):  # type: ignore[no-untyped-def]
    """`function`, whose seconds are added to spent[name]."""

    def call(*arguments, **named):  # type: ignore[no-untyped-def]
        started = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            spent[name] += time.monotonic() - started

    return call


def run(folder: Path, options: dict[str, str], cache: Path) -> Times:
    """One start in a process of its own."""
    arguments = [str(folder), "--child", json.dumps(options), "--began", str(time.monotonic())]
    output = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    times: Times = json.loads(output.splitlines()[-1])
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", default="int4", help="none, int8 or int4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(start(chosen.folder, json.loads(chosen.child), chosen.began)))
        return
    plain = {"quantization": chosen.quantization, "weight_cache": "0"}
    kinds = {"packed at each start": plain}
    if chosen.quantization != "none":
        kinds["packed on disk"] = {**plain, "weight_cache": "10GB"}
    found: dict[str, list[Times]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as cache:
        for repeat in range(chosen.repeats + 1):
            for name, options in kinds.items():
                times = run(chosen.folder, options, Path(cache))
                if repeat:
                    found[name].append(times)
    print(f"{chosen.folder.name}, {chosen.quantization}, seconds, median of {chosen.repeats}\n")
    print(f"| | {' | '.join(PARTS)} | least |\n|{' --- |' * (len(PARTS) + 2)}")
    for name, runs in found.items():
        cells = " | ".join(f"{statistics.median(r[part] for r in runs):.2f}" for part in PARTS)
        print(f"| {name} | {cells} | {min(r['all'] for r in runs):.2f} |")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
