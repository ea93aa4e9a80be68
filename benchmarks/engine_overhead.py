"""What a step and a streamed token cost beside the model: `python benchmarks/engine_overhead.py`.

The executor does nothing, so all that is left is ours. Part 1 runs the engine in this process and
times scheduling and book-keeping a step, without guesses and where `auto` finds none that pay
(most of its steps rest, as the median tells; some reckon whether any guess could pay), and beside
that what the cost model learns from each.
Part 2 starts the real server with 32 streams on it and divides the CPU time of both processes by
the tokens streamed; a bare ASGI application that sends as many chunks of the same size through the
same HTTP server is measured beside it.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common import children, cpu_s, free_port, serving
from headway.config.options import EngineOptions
from headway.core.request import Request, SamplingParams
from headway.engine import messages
from headway.engine.build import build_engine
from headway.perf.model import Prior, StepModel, work_done
from headway.planning import plan_settings
from headway.runtime.null import NullExecutor

PROMPT = list(range(300, 428))
BARE = """
import sys, uvicorn
chunk = b"data: " + b"x" * 225 + b"\\n\\n"
async def app(scope, receive, send):
    import asyncio
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(sys.argv[2])):
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
uvicorn.run(app, port=int(sys.argv[1]), http="h11", loop="uvloop", log_level="error")
"""


def step_cost(folder: Path, num_seqs: int, steps: int, method: str) -> dict[str, float]:
    """Milliseconds a decode step of `num_seqs` spends outside the executor, message included.

    `lesson_us`, in microseconds, is what a cost model of its own learns from each.
    """
    options = EngineOptions(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        load_format="dummy",
        device="cpu",
        speculative_method=method,
    )
    spec, settings, _, _ = plan_settings(folder, options)
    blocks = num_seqs * -(-(len(PROMPT) + steps + 50) // settings.cache.block_size) + 1
    settings = replace(settings, cache=replace(settings.cache, num_blocks=(blocks,)))
    null = NullExecutor(cycle=random_cycle(spec.vocab_size))
    engine = build_engine(
        null,
        settings,
        vocab_size=spec.vocab_size,
        eos_token_ids=(),
        prior=Prior(weights_s=1e-6, token_s=1e-2),  # a guess costs what a decode does: none can pay
    )
    engine.cost.learn = lambda work, actual_s: engine.cost.seconds(work)
    prompt = [token % spec.vocab_size for token in PROMPT]
    for i in range(num_seqs):
        engine.add(Request(i, prompt, SamplingParams(max_tokens=steps + 50)))
    while engine.scheduler.waiting:
        engine.step()
    costs, lessons, cost = [], [], StepModel()
    for _ in range(steps):
        before = time.perf_counter()
        updates, record = engine.step()
        messages.encode(messages.StepOutput(updates, record))
        costs.append(time.perf_counter() - before - record.execute_s)
        before = time.perf_counter()
        cost.learn(work_done(record), 0.02)
        lessons.append(time.perf_counter() - before)
    assert record.num_sampled == num_seqs
    return {
        "median_ms": statistics.median(costs) * 1e3,
        "mean_ms": statistics.mean(costs) * 1e3,
        "p95_ms": sorted(costs)[int(steps * 0.95)] * 1e3,
        "lesson_us": statistics.median(lessons) * 1e6,
    }


def random_cycle(vocab_size: int) -> tuple[int, ...]:
    """Tokens that seldom follow each other twice."""
    rng = random.Random(0)
    return tuple(rng.randrange(vocab_size) for _ in range(10_000))


async def read_stream(port: int, path: str, body: bytes) -> int:
    """POST and count the `data:` lines of the answer, [DONE] not included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(65536)
        if not data:
            raise SystemExit("a stream ended early")
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"no stream: {data.decode(errors='replace')}")
        window = tail + data
        count += window.count(b"data: ") - tail.count(b"data: ")
        tail = window[-32:]
    writer.close()
    return count - 1


async def load(port: int, path: str, body: bytes, streams: int) -> int:
    """Run the streams together; the chunks received."""
    return sum(await asyncio.gather(*(read_stream(port, path, body) for _ in range(streams))))


@contextlib.contextmanager
def served(folder: Path, streams: int) -> Iterator[tuple[int, list[int]]]:
    """A server whose executor does nothing: its port, and the ids of its processes, ours first."""
    flags = ("--executor=null", f"--max-num-seqs={streams}", "--log-level=error")
    with serving(folder, *flags) as (url, pid):
        yield int(url.rpartition(":")[2]), [pid, *children(pid)]


def token_cost(folder: Path, streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of CPU a streamed token costs, server and engine process."""
    body = json.dumps(
        {
            "model": folder.resolve().name,
            "prompt": PROMPT[:32],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    with served(folder, streams) as (port, pids):
        asyncio.run(load(port, "/v1/completions", body, streams))
        before = [cpu_s(pid) for pid in pids]
        received = asyncio.run(load(port, "/v1/completions", body, streams))
        spent = [cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)]
    made = streams * tokens
    return {
        "server_us": spent[0] / made * 1e6,
        "engine_us": sum(spent[1:]) / made * 1e6,
        "total_us": sum(spent) / made * 1e6,
        "chunks_per_token": received / made,
    }


def bare_cost(streams: int, chunks: int) -> float:
    """Microseconds of CPU a chunk costs a bare ASGI application on the same HTTP server."""
    port = free_port()
    command = [sys.executable, "-c", BARE, str(port), str(chunks)]
    server = subprocess.Popen(command)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as probe:
                probe.connect(("127.0.0.1", port))
                break
            time.sleep(0.1)
        before = cpu_s(server.pid)
        asyncio.run(load(port, "/", b"{}", streams))
        return (cpu_s(server.pid) - before) / (streams * chunks) * 1e6
    finally:
        server.terminate()
        server.wait(20)


def main() -> None:
    """Print both parts as tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    from headway.cli.common import model_folder

    folder = model_folder(str(chosen.folder) if chosen.folder else None)
    print("sequences   guesses   ms a step (mean)   median   p95     its lesson, µs")
    for num_seqs in (1, 32, 256):
        for method in ("off", "auto"):
            cost = step_cost(folder, num_seqs, chosen.steps, method)
            print(
                f"{num_seqs:>9}   {method:>7}   {cost['mean_ms']:>16.3f}   "
                f"{cost['median_ms']:>6.3f}   {cost['p95_ms']:.3f}   {cost['lesson_us']:>6.1f}"
            )
    print("\nCPU microseconds a streamed token, 32 streams (medians of repeats)")
    runs = [token_cost(folder, 32, chosen.tokens) for _ in range(chosen.repeats)]
    for name in runs[0]:
        print(f"{name:<18} {statistics.median(run[name] for run in runs):8.2f}")
    bare = [bare_cost(32, chosen.tokens) for _ in range(chosen.repeats)]
    print(f"{'bare ASGI, h11':<18} {statistics.median(bare):8.2f}")


if __name__ == "__main__":
    main()
