"""What an upstream sends is parsed in slices, and has a bounded number of informational heads."""

import asyncio

import aiohttp
import pytest

from headway.edge import http_client
from headway.edge.http_client import SLICE_BYTES, make_session, read_bounded
from raw_upstream import raw_upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def client() -> aiohttp.ClientSession:
    return make_session({}, aiohttp.ClientTimeout(60))


async def asked(url: str) -> bytes:
    async with client() as http, http.post(url, data=b"{}") as answer:
        return await read_bounded(answer, 2**24)


async def test_informational_responses_are_dropped_up_to_a_number() -> None:
    with raw_upstream(CONTINUE * 16 + OK + b"content-length: 2\r\n\r\nhi") as upstream:
        assert await asked(upstream.url) == b"hi"
    too_many = pytest.raises(aiohttp.ClientResponseError, match="informational")
    with raw_upstream(b"", CONTINUE * 1000, 2**26) as upstream, too_many:
        await asked(upstream.url)
    assert upstream.num_sent < 2**26


async def test_the_loop_has_a_turn_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in chunks of one byte is parsed slice by slice; nothing of it is lost."""
    monkeypatch.setattr(http_client, "TURN_S", 0.0)
    body = b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    with raw_upstream(OK + b"transfer-encoding: chunked\r\n\r\n" + body) as upstream:
        assert await asked(upstream.url) == b"a" * 50_000
    counting.cancel()
    assert turns >= len(body) / SLICE_BYTES


async def test_a_reader_that_pauses_gets_all_of_it() -> None:
    """Flow control holds the parser amid slices, and goes on where it stopped."""
    parts = [b"%06x\r\n%b\r\n" % (50_000, bytes([number]) * 50_000) for number in range(200)]
    data = OK + b"transfer-encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"
    with raw_upstream(data) as upstream:
        async with client() as http, http.post(upstream.url, data=b"{}") as answer:
            found = bytearray()
            while piece := await answer.content.read(30_000):
                found += piece
                await asyncio.sleep(0.001)
    assert bytes(found) == b"".join(bytes([number]) * 50_000 for number in range(200))


async def test_bytes_behind_an_answer_do_not_answer_the_next_request() -> None:
    body = b"a" * 3 * SLICE_BYTES
    one = OK + b"content-length: %d\r\n\r\n" % len(body) + body
    with raw_upstream(one + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad" * 2000) as upstream:
        async with client() as http:
            for _ in range(3):
                async with http.post(upstream.url, data=b"{}") as answer:
                    assert await read_bounded(answer, 2**24) == body
    assert upstream.num_asked == 3
