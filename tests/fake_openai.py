"""An OpenAI-compatible server of known delays, and what it really did: `python fake_openai.py …`.

It writes tokens at fixed times after a request arrived, may stall, drop, refuse or queue, and keeps
the truth: when each request arrived and when each chunk left, on the clock that both processes
share (CLOCK_MONOTONIC). It prints its port and ends when its standard input closes.
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

KNOWN = frozenset(
    "model prompt messages stream max_tokens temperature stream_options ignore_eos min_tokens "
    "return_token_ids service_class".split()
)
LARGE = 20_000


class Fake:
    """What all connections share: the behaviour and the truth."""

    def __init__(self, behaviour: argparse.Namespace) -> None:
        self.behaviour = behaviour
        self.truth: list[dict[str, Any]] = []
        self.loads = 0
        self.first_s = 0.0
        self.places = asyncio.Semaphore(behaviour.places)

    async def stalled(self) -> None:
        """Sleep to the end of the stall when it is on: nothing leaves in that time."""
        since_s = time.perf_counter() - self.first_s
        begin_s, end_s = self.behaviour.stall_at, self.behaviour.stall_at + self.behaviour.stall_for
        if self.loads and begin_s <= since_s < end_s:
            await asyncio.sleep(end_s - since_s)


def read_body(body: bytes) -> dict[str, Any]:
    """The fields, and `prompt_tokens`; a long prompt of ids is counted, not parsed."""
    at = body.find(b'"prompt":[')
    if len(body) > LARGE and at >= 0 and body.endswith(b"]}"):
        fields = json.loads(body[:at].rstrip(b",") + b"}")
        return {**fields, "prompt": None, "prompt_tokens": body.count(b",", at) + 1}
    fields = json.loads(body)
    prompt = fields.get("prompt", fields.get("messages"))
    text = (
        prompt
        if isinstance(prompt, str)
        else " ".join(m["content"] for m in prompt or [] if isinstance(m, dict))
    )
    return {**fields, "prompt_tokens": len(text.split()) if text else len(prompt)}


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.data = bytearray()
        self.length = -1
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        transport.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY

    def connection_lost(self, error: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.data += data
        while True:
            if self.length < 0:
                end = self.data.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self.data[:end])
                del self.data[: end + 4]
                found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                self.length = int(found[1]) if found else 0
                self.path = head.split(b" ", 2)[1].decode()
            if len(self.data) < self.length:
                return
            body, self.length = bytes(self.data[: self.length]), -1
            del self.data[: len(body)]
            self.task = asyncio.get_running_loop().create_task(self.answer(self.path, body))

    def whole(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.transport.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    async def answer(self, path: str, body: bytes) -> None:
        if path == "/v1/models":
            self.whole(200, {"data": [{"id": "fake"}]})
        elif path == "/health":
            self.whole(200, {})
        elif path == "/truth":
            self.whole(200, self.fake.truth)
        elif not path.startswith("/v1/"):
            self.whole(404, {"error": {"message": "nothing here"}})
        else:
            await self.stream(body, "chat" in path)

    async def stream(self, body: bytes, chat: bool) -> None:
        fake, how = self.fake, self.fake.behaviour
        if len(body) > LARGE // 2:
            await asyncio.sleep(how.slow_read)
        arrived_s = time.perf_counter()
        fields = read_body(body)
        unknown = [key for key in fields if key not in KNOWN | {"prompt_tokens"} | set(how.knows)]
        extensions = {
            "ignore_eos",
            "min_tokens",
            "return_token_ids",
            "service_class",
        } & fields.keys()
        if unknown or (how.plain and extensions):
            self.whole(400, {"error": {"message": f"unknown field {unknown or extensions}"}})
            return
        count = fields["max_tokens"]
        truth = {
            "arrived_s": arrived_s,
            "prompt_tokens": fields["prompt_tokens"],
            "max_tokens": count,
            "prompt": fields.get("prompt") if how.keep_prompts else None,
            "sent_s": [],
        }
        if count > 2:  # requests of two tokens only ask what we accept
            fake.loads += 1
            fake.first_s = fake.first_s or arrived_s
            truth["number"] = fake.loads
            fake.truth.append(truth)
        if how.refuse_every and fake.loads % how.refuse_every == 0 and count > 2:
            self.whole(503, {"error": {"message": "overloaded"}})
            return
        async with fake.places:
            start_s = time.perf_counter() if how.places < 10**6 else arrived_s
            await self.tokens(fields, truth, start_s, chat)

    async def tokens(
        self, fields: dict[str, Any], truth: dict[str, Any], start_s: float, chat: bool
    ) -> None:
        fake, how = self.fake, self.fake.behaviour
        count, step = fields["max_tokens"], how.per_chunk
        kind = "chat.completion.chunk" if chat else "text_completion"
        write = self.transport.write
        ids = bool(fields.get("return_token_ids"))
        write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            self.event({"object": kind, "choices": [first]})
        sent = 0
        while sent < count:
            n = min(step if sent or not how.first_alone else 1, count - sent)
            due_s = start_s + how.ttft + how.itl * sent
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await fake.stalled()
            text = " word" * n
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": "length" if sent + n == count else None,
            }
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if ids:
                choice["token_ids"] = [7] * n
            self.event({"object": kind, "choices": [choice]})
            truth["sent_s"].append(time.perf_counter())
            sent += n
            dropped = how.drop_every and truth.get("number", 1) % how.drop_every == 0
            if dropped and sent >= count // 2:
                self.transport.close()
                return
        if fields.get("stream_options") and not how.no_usage:
            usage = {"prompt_tokens": fields["prompt_tokens"], "completion_tokens": count}
            self.event({"object": kind, "choices": [], "usage": usage})
        write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, content: Any) -> None:
        data = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main(behaviour: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    fake = Fake(behaviour)
    server = await loop.create_server(lambda: Connection(fake), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("ttft", "itl", "stall-at", "stall-for", "slow-read"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--per-chunk", type=int, default=1)
    parser.add_argument("--places", type=int, default=10**6)
    parser.add_argument("--refuse-every", type=int, default=0)
    parser.add_argument("--drop-every", type=int, default=0)
    parser.add_argument("--knows", nargs="*", default=[])
    for name in ("plain", "no-usage", "first-alone", "keep-prompts"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


class FakeServer(contextlib.AbstractContextManager["FakeServer"]):
    """The fake in a process of its own: `with FakeServer(ttft=0.1) as fake: fake.url`."""

    def __init__(self, **behaviour: float | bool) -> None:
        flags = []
        for name, value in behaviour.items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [f"{flag}={value}"]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def truth(self) -> list[dict[str, Any]]:
        """Every request of the load, in the order of arrival."""
        with urllib.request.urlopen(self.url + "/truth", timeout=60) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())
            return found

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


if __name__ == "__main__":
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    run(main(arguments().parse_args()))
