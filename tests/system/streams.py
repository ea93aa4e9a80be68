"""Streams read as raw server-sent events, to see how each of them ends."""

import asyncio
from typing import Any

import aiohttp
import msgspec

LONG: dict[str, Any] = {"max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}


class Reader:
    """One streamed completion; `events` grows until the server closes the stream.

    What is sent while nothing else is, so that the connection stays open, is no event.
    """

    def __init__(self, http: aiohttp.ClientSession, model: str, prompt: list[int]) -> None:
        self.events: list[str] = []
        self.status = 0
        self._http = http
        self._body = {**LONG, "model": model, "prompt": prompt, "return_token_ids": True}

    def again(self, http: aiohttp.ClientSession) -> "Reader":
        """The same request, to be read from another server."""
        return Reader(http, self._body["model"], self._body["prompt"])

    async def read(self) -> "Reader":
        async with self._http.post("/v1/completions", json=self._body) as answer:
            self.status = answer.status
            data = b""
            async for piece in answer.content.iter_any():
                data += piece
                *whole, data = data.split(b"\n\n")
                texts = [event.decode() for event in whole]
                self.events += [t.removeprefix("data: ") for t in texts if not t.startswith(":")]
            assert data == b"", data
        return self

    @property
    def complete(self) -> bool:
        """Whether it ended as a whole answer does."""
        return self.events[-1:] == ["[DONE]"] and len(self.token_ids) == LONG["max_tokens"]

    @property
    def error(self) -> dict[str, Any]:
        """The error it ended with, or {}."""
        last = msgspec.json.decode(self.events[-1]) if self.events[-1] != "[DONE]" else {}
        error: dict[str, Any] = last.get("error", {})
        return error

    @property
    def token_ids(self) -> list[int]:
        chunks = [msgspec.json.decode(event) for event in self.events if event != "[DONE]"]
        return [t for c in chunks if "choices" in c for t in c["choices"][0].get("token_ids", [])]


async def open_streams(
    http: aiohttp.ClientSession, model: str, count: int
) -> tuple[list[Reader], "asyncio.Future[list[Reader]]"]:
    """`count` streams, each of which has begun; awaiting the second gives them ended."""
    readers = [Reader(http, model, [10 + i, 20, 30]) for i in range(count)]
    ended = asyncio.gather(*(reader.read() for reader in readers))
    while not all(reader.events for reader in readers):
        assert not ended.done() or ended.result(), "they ended before they began"
        await asyncio.sleep(0.005)
    return readers, ended
