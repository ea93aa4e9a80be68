"""A soak: mixed requests at a steady rate, and what the server's processes hold meanwhile.

    python benchmarks/soak.py FOLDER --seconds 7200

starts a server for FOLDER and sends 20 requests a second: short, long, streamed, whole, n > 1,
log-probabilities, grammars, some refused, some whose clients leave. Once a second it reads resident
memory and open descriptors of the server and its children. The report has the slope of the memory
after a warm-up (least squares), the descriptors, the statuses and whatever went wrong.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

WARM_UP = 0.25
"""Share of the time that is not looked at: caches fill, allocators take what they will keep."""
TEXTS = ("Once upon a time", "Lily and Tom went to the park and", "The big dog", "One day, a bird")


@dataclass(slots=True, kw_only=True)
class Report:
    """What a soak found; memory in MB, of the server and its children together."""

    seconds: float = 0.0
    num_sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rss_mb_first: float = 0.0
    rss_mb_last: float = 0.0
    rss_slope_mb_per_min: float = 0.0
    descriptors_first: int = 0
    descriptors_last: int = 0
    descriptors_most: int = 0
    num_restarts: int = 0


def body_of(source: random.Random, model: str) -> tuple[str, dict[str, Any], float | None]:
    """A path, a body, and after which part of a second its client leaves, if it does."""
    kind = source.random()
    body: dict[str, Any] = {
        "model": model,
        "prompt": source.choice(TEXTS) * source.choice((1, 1, 1, 4, 12)),
        "max_tokens": source.choice((1, 8, 16, 32, 64)),
        "temperature": source.choice((0, 0.8, 1.2)),
        "stream": source.random() < 0.6,
    }
    if kind < 0.1:
        body["n"] = source.choice((2, 3))
    elif kind < 0.2:
        body |= {"logprobs": 5, "stop": ["."], "seed": source.randrange(1000)}
    elif kind < 0.25:
        body |= {"presence_penalty": 1, "logit_bias": {"5": -100}, "min_tokens": 1}
    elif kind < 0.3:
        body["temperature"] = 7
    elif kind < 0.33:
        body["model"] = "nobody"
    elif kind < 0.36:
        return "/tokenize", {"prompt": body["prompt"]}, None
    elif kind < 0.42:
        pattern = f"[a-zA-Z ,]{{1,{source.randrange(1, 400)}}}\\."
        body["structured_outputs"] = {"regex": pattern}
    leaves_s = source.random() * 0.3 if source.random() < 0.05 else None
    return "/v1/completions", body, leaves_s


class Soak:
    """One run against one server process."""

    def __init__(self, url: str, pid: int, *, rate: float, seconds: float, seed: int) -> None:
        self.url, self.pid = url, pid
        self.rate, self.seconds = rate, seconds
        self.source = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[tuple[float, float, int]] = []
        self.num_sent = 0

    async def run(self) -> Report:
        """Send, watch, wait for the last answer, and sum up."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as http:
            async with http.get("/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            watching = asyncio.create_task(self._watch())
            await self._send_all(http, model)
            watching.cancel()
            async with http.get("/stats") as answer:
                restarts = (await answer.json())["totals"]["engine_restarts"]
        return self._report(restarts)

    async def _send_all(self, http: aiohttp.ClientSession, model: str) -> None:
        """Requests at random times of the given rate, none of which waits for another."""
        began = due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while due - began < self.seconds:
                due += self.source.expovariate(self.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._ask(http, *body_of(self.source, model)))
                self.num_sent += 1

    async def _ask(
        self, http: aiohttp.ClientSession, path: str, body: dict[str, Any], leaves_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(leaves_s):
                async with http.post(path, json=body) as answer:
                    data = await answer.read()
        except TimeoutError:
            self.statuses["left"] += leaves_s is not None
            if leaves_s is None:
                self.problems.append(f"no answer to {body}")
            return
        except aiohttp.ClientError as error:
            self.problems.append(f"{error!r} for {body}")
            return
        self.statuses[str(answer.status)] += 1
        whole = not body.get("stream") or answer.status != 200 or data.endswith(b"[DONE]\n\n")
        if answer.status >= 500 or not whole:
            self.problems.append(f"{answer.status} {data[-300:]!r} for {body}")

    async def _watch(self) -> None:
        began = time.monotonic()
        while True:
            rss, descriptors = 0.0, 0
            for pid in family(self.pid):
                rss += rss_mb(pid)
                descriptors += num_descriptors(pid)
            self.samples.append((time.monotonic() - began, rss, descriptors))
            await asyncio.sleep(1)

    def _report(self, num_restarts: int) -> Report:
        looked_at = self.samples[int(len(self.samples) * WARM_UP) :]
        times, rss, descriptors = (np.array(column) for column in zip(*looked_at))
        slope = np.polyfit(times / 60, rss, 1)[0] if len(looked_at) > 2 else 0.0
        return Report(
            seconds=self.seconds,
            num_sent=self.num_sent,
            statuses=dict(sorted(self.statuses.items())),
            problems=self.problems[:20],
            rss_mb_first=round(float(rss[0]), 1),
            rss_mb_last=round(float(rss[-1]), 1),
            rss_slope_mb_per_min=round(float(slope), 3),
            descriptors_first=int(descriptors[0]),
            descriptors_last=int(descriptors[-1]),
            descriptors_most=int(descriptors.max()),
            num_restarts=num_restarts,
        )


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = Path(f"/proc/{pid}/task").iterdir()
    for thread in threads:  # a child belongs to the thread that made it
        children += (thread / "children").read_text().split()
    return [pid, *{int(child) for child in children}]


def rss_mb(pid: int) -> float:
    """Resident memory; 0 for a process that has just gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def num_descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "headway.cli.main", "serve", arguments.folder, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        greeting = server.stdout.readline()
        if "is ready: " not in greeting:
            return server.wait()
        url = greeting.split("is ready: ")[1].strip().removesuffix("/v1")
        soak = Soak(
            url, server.pid, rate=arguments.rate, seconds=arguments.seconds, seed=arguments.seed
        )
        try:
            report = asyncio.run(soak.run())
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    print(json.dumps(asdict(report) | {"exit_status": server.returncode}, indent=2))
    return 1 if report.problems or report.num_restarts or server.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
