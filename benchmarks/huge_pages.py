"""Packed weights in huge pages beside weights mapped from the cache: steps, memory, seconds.

    python benchmarks/huge_pages.py FOLDER [--threads 2] [--formats none,int4] [--starts 3]

Steps: engines of one process decode in turns, 1 and 8 sequences (with --threads 1 their CPU time
tells beside other work, too; ratios are to `mapped`, in 16 bits to `packed`). `packed` has its
weights from the checkpoint, `mapped` and `read` from the cache on disk, the first in pages of
4 KiB, `shared` in memory as replicas have them.
Starts: fresh processes in turns, from the first line to the first token; `cold` has the cache's
file and the checkpoint dropped from the page cache. Memory is of such a process, and of two of a
kind beside each other, by the system's books (PSS: a page that two have counts half in each).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import heading, markdown
from headway import LLM, SamplingParams
from headway.assemble import assemble
from headway.config.options import EngineOptions
from headway.core.clock import SystemClock
from headway.core.request import Request
from headway.engine.engine import Engine
from headway.runtime import weight_cache
from headway.runtime.shared_weights import make_shared

ROWS = (1, 8)
PROMPT = [5, 7, 9, 11]
LONGEST, KV_BYTES = 512, 256 * 2**20
GIVES = weight_cache.gives_huge_pages
BOOKS = ("Pss", "Pss_File", "FilePmdMapped", "Anonymous", "AnonHugePages")
STEP_COLUMNS = (
    *("format", "sequences", "weights", "median ms", "least ms", "least CPU ms"),
    *("median of mapped", "CPU of mapped"),
)
START_COLUMNS = ("format", "page cache", "weights", "ready s", "CPU s", "first token s", *BOOKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", default="none,int8,int4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--starts", type=int, default=3, help="of each kind; 0: none")
    parser.add_argument("--child", choices=("mapped", "read"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    options = {"threads": chosen.threads, "kv_memory": KV_BYTES, "max_model_len": LONGEST}
    options |= {"speculate": "off", "skip_tokenizer_init": True, "device": "cpu"}
    if chosen.child:
        start(chosen.folder, {**options, "quantization": chosen.formats}, chosen.child)
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        print(heading(STEP_COLUMNS), flush=True)
        for format in chosen.formats.split(","):
            own = {**options, "quantization": format}
            for row in steps(chosen.folder, own, chosen.steps):
                print("|", " | ".join(map(str, (format, *row))), "|", flush=True)
        if chosen.starts:
            print("\nMiB; the least of", chosen.starts, "for seconds\n")
            for format in chosen.formats.split(","):
                if format != "none":
                    command = [sys.executable, __file__, str(chosen.folder), "--formats", format]
                    command += ["--threads", str(chosen.threads)]
                    files = [*Path(cache).rglob("*.weights"), *chosen.folder.glob("*.safetensors")]
                    print(markdown(START_COLUMNS, starts(command, format, files, chosen.starts)))


def engine_of(folder: Path, options: dict[str, Any], kind: str, weights: list[int]) -> Engine:
    """An engine whose weights lie as its kind says."""
    given = {**options, "weight_cache": 0} if kind == "packed" else options
    with_huge_pages(kind != "mapped")
    shared = weights if kind == "shared" else []
    engine = assemble(folder, EngineOptions(**given), clock=SystemClock(), weights=shared).engine
    for thread in threading.enumerate():
        if thread.name == "weight cache writer":
            thread.join()
    return engine


def with_huge_pages(has: bool) -> None:
    """Let what is read from the cache from now on lie in huge pages, or stay in the file."""
    weight_cache.gives_huge_pages = GIVES if has else lambda: False


def steps(folder: Path, options: dict[str, Any], count: int) -> list[tuple[object, ...]]:
    """The columns behind the format: by sequences, by kind of engine."""
    kinds = ["packed", "shared"]
    weights = make_shared(2)
    if options["quantization"] != "none":
        engine_of(folder, options, "mapped", [])  # fills the cache on disk
        gc.collect()
        in_small_pages(list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.weights")))
        kinds[1:1] = ["mapped", "read"]
    engines = {kind: engine_of(folder, options, kind, weights) for kind in kinds}
    rows: list[tuple[object, ...]] = []
    number = 0
    for sequences in ROWS:
        for engine in engines.values():
            for row in range(sequences):
                number += 1
                sampling = SamplingParams(temperature=0, max_tokens=LONGEST - 9, ignore_eos=True)
                engine.add(Request(number, [row, *PROMPT], sampling))
            engine.flush()
            for _ in range(8):
                engine.step()
        taken: dict[str, list[float]] = defaultdict(list)
        worked: dict[str, list[float]] = defaultdict(list)
        for turn in range(count):
            for kind in kinds if turn % 2 else kinds[::-1]:
                begun_s, worked_s = time.perf_counter(), time.process_time()
                engines[kind].step()
                taken[kind].append(1e3 * (time.perf_counter() - begun_s))
                worked[kind].append(1e3 * (time.process_time() - worked_s))
        one = "mapped" if "mapped" in kinds else "packed"
        for kind in kinds:
            median, least = statistics.median(taken[kind]), min(worked[kind])
            ratios = median / statistics.median(taken[one]), least / min(worked[one])
            cells = f"{median:.2f}", f"{min(taken[kind]):.2f}", f"{least:.2f}"
            rows.append((sequences, kind, *cells, *(f"{each:.3f}" for each in ratios)))
        for engine in engines.values():
            for sequence in list(engine.scheduler.running):
                engine.abort(sequence.request.request_id)
            while engine.has_work:
                engine.step()
    for descriptor in weights:
        os.close(descriptor)
    del engine, engines
    gc.collect()
    return rows


def start(folder: Path, options: dict[str, Any], kind: str) -> None:
    """In a fresh process: load, make a token, tell, and wait for a word."""
    with_huge_pages(kind == "read")
    llm = LLM(folder, **options)
    ready_s, ready_cpu_s = time.monotonic(), time.process_time()
    sampling = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([PROMPT], sampling, use_tqdm=False)
    print(json.dumps([ready_s, ready_cpu_s, time.monotonic()]), flush=True)
    sys.stdin.read()


def starts(
    command: list[str], format: str, files: list[Path], count: int
) -> list[tuple[object, ...]]:
    """Rows of starts with a warm and a cold page cache, and of two processes beside each other."""
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for turn in range(count):
        for cache in ("warm", "cold"):
            for kind in ("mapped", "read") if turn % 2 else ("read", "mapped"):
                if cache == "cold":
                    drop(files)
                begun_s = time.monotonic()
                with begun(command, kind) as process:
                    ready_s, cpu_s, token_s = told(process)
                    memory = books(process.pid)
                times = [ready_s - begun_s, cpu_s, token_s - begun_s]
                found[cache, kind].append([*times, *memory])
    rows: list[tuple[object, ...]] = []
    for (cache, kind), each in found.items():
        columns = list(zip(*each, strict=True))
        seconds = [f"{min(column):.2f}" for column in columns[:3]]
        memory = [f"{statistics.median(column):.0f}" for column in columns[3:]]
        rows.append((format, cache, kind, *seconds, *memory))
    for kind in ("mapped", "read"):
        with begun(command, kind) as first, begun(command, kind) as second:
            for process in (first, second):
                told(process)
            both = zip(books(first.pid), books(second.pid), strict=True)
        rows.append((format, "two beside", kind, "", "", "", *map(sum, both)))
    return rows


def begun(command: list[str], kind: str) -> "subprocess.Popen[str]":
    """A process that starts; the end of `with` ends it."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "--child", kind], **pipes)


def told(process: "subprocess.Popen[str]") -> list[float]:
    """When it was ready, the CPU seconds until then, when its first token was there."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            return [float(one) for one in json.loads(line)]
    raise SystemExit("a process ended before it was ready")


def drop(files: list[Path]) -> None:
    """Forget what the page cache has of these files."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_small_pages(files: list[Path]) -> None:
    """Have them in the page cache in pages of 4 KiB; some systems read ahead in larger ones."""
    drop(files)
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            while file.read(1 << 16):
                pass


def books(pid: int) -> list[int]:
    """MiB of a process, by the names in BOOKS."""
    held = {}
    for text in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, size = text.partition(":")
        held[name] = int(size.split()[0]) // 1024
    return [held[name] for name in BOOKS]


if __name__ == "__main__":
    main()
