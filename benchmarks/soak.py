"""A soak: mixed requests at a steady rate, and what the server's processes hold meanwhile.

    python benchmarks/soak.py FOLDER --minutes 120 --rate 2

starts a server for FOLDER with native kernels and sends `--rate` requests a second at random times:
short, long, streamed, whole, n > 1, log-probabilities, grammars, chats in three dialects, tools,
uploads, batches, some that are refused, some whose clients leave; with `--kind`, one of them alone.
What is bounded by design is full within a warm-up of 7,000 requests and five minutes: KV blocks and
stored responses, made few here, 250 compiled grammars, five minutes of history. Meanwhile it
samples resident memory, open files and threads of the server and its children, KV blocks in use,
sequences in the engine and open tickets of admission.

The report has for each of these the slope after a warm-up (least squares over means of 20 parts,
with its standard error) and whether it grows: `grows` is true where the slope less two standard
errors makes more of the run than `ALLOWED`. `verdict` is "holds" where nothing grows, nothing is
held when the load is over, nothing went wrong and the engine was never started again; a run that is
too short to tell says so instead. Ctrl-C ends the load early; the report is of what was seen. The
exit status is 0 where it holds.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from common import children, serve_command

WARM_UP = 0.25
"""Share of the time that is not looked at: caches fill, allocators take what they will keep."""
PARTS = 20
"""Means of so many parts are fitted: samples that follow each other are not independent."""
ALLOWED = {
    "rss_mb": 20.0,
    "rss_mb_server": 10.0,
    "rss_mb_engine": 10.0,
    "descriptors": 8.0,
    "threads": 4.0,
    "kv_usage": 0.05,
    "sequences": 4.0,
    "tickets": 4.0,
}
"""Column → how much of it a run may gain."""
HELD_AT_THE_END = ("kv_usage", "sequences", "tickets")
QUIET_S = 60.0
"""How long what is held may take to go back to none when the load is over."""
GAUGES = {
    "kv_usage": ("kv_cache_usage_perc",),
    "sequences": ("num_requests_running", "num_requests_waiting"),
    "tickets": ("num_requests_admitted",),
}
WORDS = (
    "once upon a time the big dog went to park with Lily and Tom they saw red bird one day".split()
)
KINDS = (
    *("plain", "n", "logprobs", "penalties", "refused", "tokenize", "grammar", "messages"),
    *("responses", "tools", "chat", "left", "upload"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One column: means of the first and last part looked at, and the slope an hour."""

    first: float
    last: float
    most: float
    slope_per_hour: float
    error_per_hour: float
    grows: bool


@dataclass(slots=True, kw_only=True)
class Report:
    """What a soak found; memory in MB."""

    seconds: float = 0.0
    num_sent: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    trends: dict[str, Trend] = field(default_factory=dict)
    bytes_a_request: dict[str, int] = field(default_factory=dict)
    """The slopes of resident memory over the rate, by process."""
    held: dict[str, float] = field(default_factory=dict)
    """What was still held `QUIET_S` after the last answer."""
    num_restarts: int = 0

    @property
    def verdict(self) -> str:
        """One sentence: that it holds, or all that does not."""
        grown = [
            f"{name} grows by {trend.slope_per_hour:.3g} ± {trend.error_per_hour:.2g} an hour"
            for name, trend in self.trends.items()
            if trend.grows
        ]
        held = [f"{name} is {value:g} at the end" for name, value in self.held.items()]
        wrong = [f"{len(self.problems)} problems"] if self.problems else []
        again = [f"the engine was started again {self.num_restarts} times"]
        found = grown + held + wrong + (again if self.num_restarts else [])
        return "; ".join(found or self._too_little()) or "holds"

    def _too_little(self) -> list[str]:
        """Why nothing can be said of a run in which nothing went wrong."""
        few = [] if self.trends else ["too few samples to say whether anything grows"]
        return few + ([] if self.statuses.get("200") else ["no request was answered with 200"])


# ── the load ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request; `leaves_s` is when its client goes away, if it does."""

    path: str
    body: dict[str, Any]
    leaves_s: float | None = None
    kind: str = "plain"


def one_of(kind: str, source: random.Random, model: str, chats: bool) -> PlannedRequest:
    """A request of one kind of the mix, or of any where `kind` is ""."""
    while True:
        asked = one_of_many(source, model, chats)
        if kind in ("", "left" if asked.leaves_s is not None else asked.kind):
            return asked


def one_of_many(source: random.Random, model: str, chats: bool) -> PlannedRequest:
    """A request of the mix."""
    leaves_s = source.random() * 0.3 if source.random() < 0.05 else None
    if chats and source.random() < 0.3:
        return PlannedRequest(leaves_s=leaves_s, **chat_of(source, model))
    prompt = " ".join(source.choices(WORDS, k=source.choice((3, 8, 20, 60, 200))))
    drawn, kind = source.random(), "plain"
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": source.choice((1, 8, 16, 32, 64)),
        "temperature": source.choice((0, 0.8, 1.2)),
        "stream": source.random() < 0.6,
    }
    if drawn < 0.1:
        kind, body["n"] = "n", source.choice((2, 3))
    elif drawn < 0.2:
        kind = "logprobs"
        body |= {"logprobs": 5, "stop": ["."], "seed": source.randrange(1000)}
    elif drawn < 0.25:
        kind = "penalties"
        body |= {"presence_penalty": 1, "logit_bias": {"5": -100}, "min_tokens": 1}
    elif drawn < 0.3:
        kind, body["temperature"] = "refused", 7
    elif drawn < 0.33:
        kind, body["model"] = "refused", "nobody"
    elif drawn < 0.36:
        return PlannedRequest(path="/tokenize", body={"prompt": prompt}, kind="tokenize")
    elif drawn < 0.42:
        most, another = source.randrange(1, 400), source.randrange(10_000)
        pattern = f"[a-zA-Z ,]{{1,{most}}}\\.( {another})?"
        kind, body["structured_outputs"] = "grammar", {"regex": pattern}
    return PlannedRequest(path="/v1/completions", body=body, leaves_s=leaves_s, kind=kind)


def chat_of(source: random.Random, model: str) -> dict[str, Any]:
    """Path, body and kind of a chat, in one of the three dialects."""
    question = f"What is {source.randrange(100)} + {source.randrange(100)}?"
    messages = [{"role": "user", "content": question}]
    shared = {"model": model, "stream": source.random() < 0.6}
    kind = source.random()
    if kind < 0.2:
        body = {**shared, "messages": messages, "max_tokens": 24}
        return {"path": "/v1/messages", "body": body, "kind": "messages"}
    if kind < 0.4:
        return {
            "path": "/v1/responses",
            "body": {**shared, "input": question, "max_output_tokens": 24},
            "kind": "responses",
        }
    body, called = {**shared, "messages": messages, "max_tokens": 24}, kind < 0.6
    if called:
        body |= {"tools": [TOOL], "tool_choice": "required"}
    elif kind < 0.7:
        body["messages"] = [{"role": "system", "content": " ".join(WORDS * 3)}, *messages]
    return {"path": "/v1/chat/completions", "body": body, "kind": "tools" if called else "chat"}


class Soak:
    """One run against one server process."""

    def __init__(
        self, url: str, pid: int, *, rate: float, seconds: float, seed: int, kind: str = ""
    ) -> None:
        self.url, self.pid = url, pid
        self.rate, self.seconds, self.kind = rate, seconds, kind
        self.source = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[dict[str, float]] = []
        self.num_sent = 0
        self.stopped = asyncio.Event()
        """Set, it ends the load early."""

    async def run(self) -> Report:
        """Send, watch, wait for the last answer, and sum up."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as http:
            (card,) = (await get_json(http, "/v1/models"))["data"]
            began = time.monotonic()
            watching = asyncio.create_task(self._watch(http, began))
            await self._send_all(http, card["id"], chats="messages" in card["accepts"])
            if watching.done():
                self.problems.append(f"the watch ended early: {watching.exception()!r}")
            watching.cancel()
            held = await self._what_is_held(http)
            stats = await get_json(http, "/stats")
        seconds, found = time.monotonic() - began, trends(self.samples)
        return Report(
            seconds=round(seconds, 1),
            num_sent=self.num_sent,
            kernels={name: backend for name, (backend, _) in stats["kernels"].items()},
            statuses=dict(sorted(self.statuses.items())),
            problems=self.problems[:20],
            trends=found,
            bytes_a_request=bytes_a_request(found, self.num_sent / seconds),
            held=held,
            num_restarts=stats["totals"]["engine_restarts"],
        )

    async def _send_all(self, http: aiohttp.ClientSession, model: str, chats: bool) -> None:
        """Requests at random times of the given rate, none of which waits for another."""
        began = due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while due - began < self.seconds and not self.stopped.is_set():
                due += self.source.expovariate(self.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self.kind == "upload" or (not self.kind and self.source.random() < 0.01):
                    group.create_task(self._upload(http, model))
                else:
                    asked = one_of(self.kind, self.source, model, chats)
                    group.create_task(self._ask(http, asked))
                self.num_sent += 1

    async def _ask(self, http: aiohttp.ClientSession, asked: PlannedRequest) -> None:
        try:
            async with asyncio.timeout(asked.leaves_s):
                async with http.post(asked.path, json=asked.body) as answer:
                    data = await answer.read()
        except TimeoutError:
            self.statuses["left"] += asked.leaves_s is not None
            if asked.leaves_s is None:
                self.problems.append(f"no answer to {asked}")
            return
        except aiohttp.ClientError as error:
            self.problems.append(f"{error!r} for {asked}")
            return
        self.statuses[str(answer.status)] += 1
        streamed = asked.body.get("stream") and answer.status == 200
        if answer.status >= 500 or (streamed and not is_whole(asked.path, data)):
            self.problems.append(f"{answer.status} {data[-300:]!r} for {asked}")

    async def _upload(self, http: aiohttp.ClientSession, model: str) -> None:
        """A file, a batch of it whose end is waited for, and all files deleted."""
        body = {"model": model, "prompt": "once", "max_tokens": 4}
        line = {"method": "POST", "url": "/v1/completions", "body": body}
        lines = [json.dumps({"custom_id": str(number), **line}) + "\n" for number in range(4)]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "".join(lines).encode(), filename="in.jsonl")
        file = await self._json(http, "POST", "/v1/files", data=form)
        if file is None:
            return
        created = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = await self._json(http, "POST", "/v1/batches", json=created)
        files = [file["id"]] + (await self._wait_for(http, batch) if batch else [])
        for name in files:
            await self._json(http, "DELETE", f"/v1/files/{name}")

    async def _wait_for(self, http: aiohttp.ClientSession, batch: dict[str, Any]) -> list[str]:
        """The files that a batch has written when it is over."""
        path = f"/v1/batches/{batch['id']}"
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(1)
            told = await self._json(http, "GET", path)
            if told is None:
                return []
            batch = told
        self.statuses[f"batch {batch['status']}"] += 1
        if batch["request_counts"] != {"total": 4, "completed": 4, "failed": 0}:
            self.problems.append(f"a batch ended as {batch}")
        written = (batch["output_file_id"], batch["error_file_id"])
        return [name for name in written if name is not None]

    async def _json(
        self, http: aiohttp.ClientSession, method: str, path: str, **sent: Any
    ) -> dict[str, Any] | None:
        """An answer of files and batches; None, counted, where it is refused.

        What is not a limit's 429 is a problem too.
        """
        try:
            async with http.request(method, path, **sent) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.problems.append(f"{error!r} for {method} {path}")
            return None
        if answer.status == 200:
            found: dict[str, Any] = json.loads(data)
            return found
        self.statuses[str(answer.status)] += 1
        if answer.status != 429:
            self.problems.append(f"{answer.status} {data[-300:]!r} for {method} {path}")
        return None

    # ── what is held ────────────────────────────────────────────────────────────────────────

    async def _watch(self, http: aiohttp.ClientSession, began: float) -> None:
        """Sample every 5 s, or 120 times a run; a line on stderr every ten minutes."""
        pause_s = min(5.0, max(0.25, self.seconds / 120))
        told = began
        while True:
            sample = {"at_s": time.monotonic() - began, **held_by(self.pid), **await gauges(http)}
            self.samples.append(sample)
            if time.monotonic() - told > 600:
                told = time.monotonic()
                print(json.dumps({k: round(v, 2) for k, v in sample.items()}), file=sys.stderr)
            await asyncio.sleep(pause_s)

    async def _what_is_held(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """What should be zero by now and is not, `QUIET_S` after the last answer."""
        deadline = time.monotonic() + QUIET_S
        while True:
            now = await gauges(http)
            held = {name: now[name] for name in HELD_AT_THE_END if now[name]}
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.5)


def is_whole(path: str, data: bytes) -> bool:
    """Whether a stream came to the end that its dialect has."""
    if path == "/v1/messages":
        return b"event: message_stop" in data[-200:]
    if path == "/v1/responses":
        return b"response.completed" in data or b"response.incomplete" in data
    return data.endswith(b"[DONE]\n\n")


async def get_json(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(path) as answer:
        return await answer.json()


async def gauges(http: aiohttp.ClientSession) -> dict[str, float]:
    """The server's own figures: each column the sum of some gauges of /metrics."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    values: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0].removeprefix("headway:")] += float(value)
    missing = {name for names in GAUGES.values() for name in names} - values.keys()
    assert not missing, f"/metrics has no {missing}"
    return {column: sum(values[name] for name in names) for column, names in GAUGES.items()}


def held_by(pid: int) -> dict[str, float]:
    """Memory, open files and threads of a server and of all processes below it."""
    rss: Counter[str] = Counter()
    descriptors = threads = 0
    for member in family(pid):
        try:
            role = "server" if member == pid else role_of(member)
            status = Path(f"/proc/{member}/status").read_text().splitlines()
            descriptors += len(os.listdir(f"/proc/{member}/fd"))
        except OSError:  # it has just gone
            continue
        fields = dict(line.split(":", 1) for line in status)
        rss[role] += int(fields.get("VmRSS", "0 kB").split()[0]) / 1024
        threads += int(fields["Threads"])
    return {
        "rss_mb": sum(rss.values()),
        "rss_mb_server": rss["server"],
        "rss_mb_engine": rss["engine"],
        "descriptors": descriptors,
        "threads": threads,
    }


def role_of(pid: int) -> str:
    """engine, or other: what renders templates and compiles grammars comes and goes."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "engine" if b"headway.assemble" in command else "other"


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    found, new = [], [pid]
    while new:
        found += new
        new = [child for parent in new for child in children(parent)]
    return found


def trends(samples: list[dict[str, float]]) -> dict[str, Trend]:
    """Each column's trend after the warm-up."""
    looked_at = samples[int(len(samples) * WARM_UP) :]
    if len(looked_at) < 2 * PARTS:
        return {}
    hours = np.array([sample["at_s"] for sample in looked_at]) / 3600
    return {
        name: trend(hours, np.array([sample[name] for sample in looked_at]), allowed)
        for name, allowed in ALLOWED.items()
    }


def trend(hours: Any, values: Any, allowed: float) -> Trend:
    """The slope of the means of `PARTS` parts, and whether it makes more than `allowed`."""
    x = np.array([part.mean() for part in np.array_split(hours, PARTS)])
    y = np.array([part.mean() for part in np.array_split(values, PARTS)])
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    left = y - y.mean() - slope * (x - x.mean())
    error = float(np.sqrt((left**2).sum() / (PARTS - 2) / spread))
    return Trend(
        first=round(float(y[0]), 3),
        last=round(float(y[-1]), 3),
        most=round(float(values.max()), 3),
        slope_per_hour=round(float(slope), 4),
        error_per_hour=round(error, 4),
        grows=bool((slope - 2 * error) * (hours[-1] - hours[0]) > allowed),
    )


def bytes_a_request(found: dict[str, Trend], rate: float) -> dict[str, int]:
    """7.9 MB an hour at 4 requests a second: 575 bytes."""
    return {
        name: round(trend.slope_per_hour * 2**20 / 3600 / rate)
        for name, trend in found.items()
        if name.startswith("rss_mb") and rate
    }


# ── the server ──────────────────────────────────────────────────────────────────────────────


async def run_one(soak: Soak) -> Report:
    """`soak` to its end, or to Ctrl-C."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, soak.stopped.set)
    return await soak.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--rate", type=float, default=2, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", default="native", help="as of headway serve")
    parser.add_argument(
        "--kv-memory",
        default="32MiB",
        help="blocks are resident when first written: few of them are full within the warm-up",
    )
    parser.add_argument(
        "--response-memory",
        default="256KiB",
        help="stored responses: few of them are full within the warm-up",
    )
    parser.add_argument(
        "--kind", choices=("", *KINDS), default="", help="of the mix; all by default"
    )
    given = parser.parse_args()
    command = serve_command(given.folder, "--port=0", f"--kernels={given.kernels}")
    command.append(f"--kv-memory={given.kv_memory}")
    command.append(f"--response-memory={given.response_memory}")
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as data:
        command.append(f"--data-dir={data}")
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert server.stdout is not None
        greeting = server.stdout.readline()
        if "is ready: " not in greeting:
            return server.wait()
        url = greeting.split("is ready: ")[1].strip().removesuffix("/v1")
        seconds, kind = given.minutes * 60, given.kind
        soak = Soak(url, server.pid, rate=given.rate, seconds=seconds, seed=given.seed, kind=kind)
        try:
            report = asyncio.run(run_one(soak))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    if server.returncode:
        report.problems.append(f"the server's exit status is {server.returncode}")
    print(json.dumps(asdict(report) | {"verdict": report.verdict}, indent=2))
    return 0 if report.verdict == "holds" else 1


if __name__ == "__main__":
    sys.exit(main())
