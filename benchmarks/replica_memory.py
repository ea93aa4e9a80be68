"""What the engines of one server hold: weights once, all else each, by the system's books.

    python benchmarks/replica_memory.py FOLDER [--replicas 1,2,4] [--formats none,int8,int4] [FLAGS]

Each server starts with an empty cache of packed weights, answers two requests by engine (drawn,
with log-probabilities), and where it has several engines loses one: how long that one is away, and
whether the answers of its next, and of every format's servers, are the same. FLAGS are `serve`'s.
"""

import argparse
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from common import children, get_json, markdown, serving

COLUMNS = ("engines", "format", "together", "shared weights", "each", "start", "back", "answers")
PATIENCE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--formats", default="none,int8,int4")
    options, flags = parser.parse_known_args()
    rows = []
    for format in options.formats.split(","):
        told: list[Any] = []
        for count in map(int, options.replicas.split(",")):
            own = (f"--replicas={count}", f"--quantization={format}", *flags)
            with tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache
                row = figures_of(options.folder, count, own, told)
            rows.append((count, format, *row))
            print(rows[-1], flush=True)
    print("MiB by the system's books (PSS: a page that several have counts once); seconds\n")
    print(markdown(COLUMNS, rows))


def figures_of(folder: str, count: int, flags: tuple[str, ...], told: list[Any]) -> list[object]:
    """The columns behind the format, of one server."""
    begun_s = time.monotonic()
    with serving(folder, *flags) as (url, pid):
        wait_until_ready(url, count)
        start_s = time.monotonic() - begun_s
        told.append(answers(url, 2 * count))
        held = [books(engine) for engine in engines(pid)]
        together = sum(each["Pss"] for each in held)
        shared = sum(each["Pss_Shmem"] for each in held)
        own = max(each["Private_Dirty"] for each in held)
        back = "-"
        if count > 1:
            gone, ended_s = engines(pid)[0], time.monotonic()
            os.kill(gone, signal.SIGKILL)
            while gone in engines(pid):
                time.sleep(0.02)
            time.sleep(1.0)  # the server looks four times a second
            wait_until_ready(url, count)
            back = f"{time.monotonic() - ended_s:.1f}"
            told.append(answers(url, 2 * count))
    same = all(answer == told[0][0] for each in told for answer in each)
    return [together, shared, own, f"{start_s:.1f}", back, "the same" if same else "differ"]


def wait_until_ready(url: str, count: int) -> None:
    """Return when all engines answer; SystemExit when they do not."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = get_json(f"{url}/stats")["engines"]
        if len(found) == count and all(each["ready"] for each in found):
            return
        time.sleep(0.05)
    raise SystemExit("the engines were not ready")


def answers(url: str, count: int) -> list[Any]:
    """Tokens and log-probabilities of the same request, `count` times."""
    body = {
        **{"model": get_json(f"{url}/v1/models")["data"][0]["id"], "prompt": "Once upon a time"},
        **{"max_tokens": 16, "temperature": 1, "seed": 3, "logprobs": 1, "ignore_eos": True},
    }
    found = []
    for _ in range(count):
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            choice = json.load(answer)["choices"][0]
        found.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return found


def engines(pid: int) -> list[int]:
    """The engine processes of a server."""
    return [
        child
        for child in children(pid)
        if b"headway.assemble" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def books(pid: int) -> Counter[str]:
    """MiB of a process, by the names of smaps_rollup."""
    held: Counter[str] = Counter()
    for text in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, size = text.partition(":")
        held[name] = int(size.split()[0]) // 1024
    return held


if __name__ == "__main__":
    main()
