"""Loads that plant one bottleneck, and the doctor's word on it.

Each load is a coroutine that goes on until it is cancelled; `ask_doctor` runs `headway doctor` on
the server meanwhile, as a person would.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from live_server import LiveServer, headway

Load = Callable[[aiohttp.ClientSession], Awaitable[None]]
HEAVY = {"hidden": 768, "intermediate": 2048, "layers": 6, "vocab": 4000}
"""43 M parameters, 172 MB in fp32: several times a last-level cache."""


def write_heavy_model(folder: Path) -> Path:
    """A config alone, for `--load-format dummy`."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEAVY["hidden"],
        "intermediate_size": HEAVY["intermediate"],
        "num_hidden_layers": HEAVY["layers"],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": HEAVY["vocab"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


HEAVY_FLAGS = ("--load-format=dummy", "--skip-tokenizer-init", "--kv-memory=256MiB", "--threads=1")
"""One thread: on a busy machine each fork-join would wait for a thread that does not run."""


def body(prompt: int, output: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A streamed completion of `output` tokens for a prompt of `prompt` ids."""
    return {
        "model": "tiny",
        "prompt": [5 + (seed * 31 + i * 7) % 300 for i in range(prompt)],
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


async def send(http: aiohttp.ClientSession, what: dict[str, Any]) -> int:
    """One request, read to its end; the status."""
    async with http.post("/v1/completions", json=what) as answer:
        await answer.read()
        return answer.status


def closed_loop(count: int, make: Callable[[int], dict[str, Any]]) -> Load:
    """`count` clients, each of which sends its next request when one has been answered."""

    async def load(http: aiohttp.ClientSession) -> None:
        numbers = itertools.count()

        async def client() -> None:
            while True:
                await send(http, make(next(numbers)))

        await asyncio.gather(*(client() for _ in range(count)))

    return load


def open_loop(gap_s: float, make: Callable[[int], dict[str, Any]]) -> Load:
    """A request every `gap_s`, whether the others were answered or not."""

    async def load(http: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                tasks.create_task(send(http, make(number)))
                await asyncio.sleep(gap_s)

    return load


def both(*loads: Load) -> Load:
    """Several loads at once."""

    async def load(http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(each(http) for each in loads))

    return load


def slow_reader(url: str, gap_s: float = 0.2) -> Load:
    """A client that takes a kilobyte now and then.

    Its answer must be larger than what the kernel buffers on the way, 4 MB and more: 16 choices of
    480 tokens with 20 alternatives each.
    """
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": 470,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "n": 16,
        "logprobs": True,
        "top_logprobs": 20,
    }

    async def load(http: aiohttp.ClientSession) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, (host, int(port)))
            data = json.dumps(asked).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
            head += f"content-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(raw, head.encode() + data)
            while await loop.sock_recv(raw, 1024):
                await asyncio.sleep(gap_s)

    return load


@contextlib.asynccontextmanager
async def under(server: LiveServer, load: Load, warm_s: float = 1.0) -> AsyncIterator[None]:
    """The load is on, for `warm_s` already; it ends with the block."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as http:
        running = asyncio.ensure_future(load(http))
        await asyncio.sleep(warm_s)
        try:
            yield
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def ask_doctor(what: str, seconds: float, *flags: str) -> dict[str, Any]:
    """What `headway doctor --json` says of a server or a report."""
    done = await asyncio.to_thread(
        headway, "doctor", what, f"--seconds={seconds}", "--json", *flags
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


async def diagnose_under(
    server: LiveServer, load: Load, seconds: float = 5, warm_s: float = 1.0
) -> dict[str, Any]:
    """The doctor's word on a server under this load."""
    async with under(server, load, warm_s):
        return await ask_doctor(server.url, seconds)


# ── a server that only has vLLM's metrics ───────────────────────────────────────────────────────


class FakeMetrics(ThreadingHTTPServer):
    """Serves `/metrics` alone: every second two requests end that queued for 6 of their 7 s."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MetricsOnly)
        self.started_s = time.monotonic()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def text(self) -> str:
        """The metrics of this moment."""
        passed_s = time.monotonic() - self.started_s
        done = 10 + int(2 * passed_s)
        labels = 'engine="0",model_name="far"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} 12.0",
            f"vllm:num_requests_waiting{{{labels}}} {20 + 3 * passed_s}",
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.99",
            "# TYPE vllm:num_preemptions counter",
            f"vllm:num_preemptions_total{{{labels}}} {done}",
        ]
        for name, seconds in (
            ("time_to_first_token_seconds", 6.5),
            ("request_queue_time_seconds", 6.0),
            ("request_prefill_time_seconds", 0.5),
            ("e2e_request_latency_seconds", 7.0),
        ):
            lines.append(f"# TYPE vllm:{name} histogram")
            lines.append(f'vllm:{name}_bucket{{{labels},le="+Inf"}} {done}')
            lines.append(f"vllm:{name}_count{{{labels}}} {done}")
            lines.append(f"vllm:{name}_sum{{{labels}}} {done * seconds}")
        return "\n".join(lines) + "\n"


class MetricsOnly(BaseHTTPRequestHandler):
    """404 for everything else."""

    server: FakeMetrics

    def do_GET(self) -> None:
        found = self.path == "/metrics"
        data = self.server.text().encode() if found else b"nothing here"
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
