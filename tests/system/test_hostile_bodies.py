"""Bodies made to hold up others: each is refused by its limit, and /health answers meanwhile."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer

from conftest import StartServer

MB = 10**6
LONG = 9_900_000
SENTENCE = "The engine takes requests, and the scheduler forms the next step. "


def prose(num_bytes: int) -> str:
    return (SENTENCE * (num_bytes // len(SENTENCE) + 1))[:num_bytes]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def batch_of(**fields: Any) -> dict[str, Any]:
    return {"messages": chat("hi"), "max_tokens": 1, **fields}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOO_LONG: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a prompt": (TEXT, lambda: body(prompt=prose(LONG)), "prompt"),
    "a prompt without words": (TEXT, lambda: body(prompt="a" * LONG), "prompt"),
    "many prompts": (TEXT, lambda: body(prompt=[prose(LONG // 250)] * 250), "prompt[0]"),
    "a chat": (CHAT, lambda: body(messages=chat(prose(LONG))), "messages"),
    "a response": ("/v1/responses", lambda: body(input=prose(LONG)), "input"),
}
"""Texts that cannot fit in the context: path, body, and the field at fault."""


def many(count: int, entry: str = "[[]]") -> Callable[[], bytes]:
    """A chat whose response_format holds `count` times `entry`."""
    return lambda: (
        body(**batch_of(response_format={"type": "x", "x": 0}))[:-2]
        + (b', "y": [' + entry.encode() + (b"," + entry.encode()) * (count - 1) + b"]}}")
    )


TOO_MANY: dict[str, tuple[str, Callable[[], bytes], str | None]] = {
    "a schema of lists": (CHAT, many(1_800_000), "response_format"),
    "biases": (
        CHAT,
        lambda: body(**batch_of(logit_bias={str(i): 1 for i in range(700_000)})),
        "logit_bias",
    ),
    "tools": (CHAT, lambda: body(**batch_of(tools=[{"type": "function"}] * 200_000)), "tools"),
    "unknown fields": (
        CHAT,
        lambda: body(**batch_of(), **{f"x{i}": 1 for i in range(700_000)}),
        None,
    ),
    "ids": ("/detokenize", lambda: body(tokens=[1] * 3_200_000), "tokens"),
    "messages": (
        "/v1/messages",
        lambda: body(max_tokens=1, messages=chat("hi") * 280_000),
        "messages",
    ),
    "items": ("/v1/responses", lambda: body(input=chat("hi") * 280_000), "input"),
}
"""Values that cost more than their bytes."""


async def health_while(live: LiveServer, attack: asyncio.Task[Any]) -> float:
    """The slowest answer of /health, in seconds, until `attack` is over.

    Each has to come; how fast is asserted where it is timed, below.
    """
    slowest = 0.0
    async with aiohttp.ClientSession(live.url) as http:
        while not attack.done():
            began = time.monotonic()
            async with http.get("/health") as answer:
                assert answer.status == 200
                await answer.read()
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.005)
    return slowest


def error_of(path: str, content: dict[str, Any]) -> tuple[str | None, str | None, str]:
    """(code, param, message); Anthropic's shape has the last alone."""
    error = content["error"]
    return error.get("code"), error.get("param"), error["message"]


@pytest.mark.parametrize("name", TOO_LONG)
async def test_a_text_that_cannot_fit_is_refused_untokenized(server: LiveServer, name: str) -> None:
    path, make, param = TOO_LONG[name]
    data = make()
    attack = asyncio.create_task(asyncio.to_thread(server.post, path, data))
    await health_while(server, attack)
    status, content = await attack
    code, found, message = error_of(path, content)
    assert (status, code, found) == (400, "context_length_exceeded", param)
    assert "The context holds" in message
    assert " bytes" in message or " characters" in message, "its tokens were not counted"
    assert server.probe()


async def test_messages_that_cannot_fit_are_refused_as_their_clients_know_it(
    server: LiveServer,
) -> None:
    status, content = server.post("/v1/messages", body(max_tokens=1, messages=chat(prose(LONG))))
    assert status == 400
    assert content["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("name", TOO_MANY)
async def test_too_many_values_are_refused_unmade(server: LiveServer, name: str) -> None:
    path, make, param = TOO_MANY[name]
    data = make()
    assert len(data) < 10 * MB
    attack = asyncio.create_task(asyncio.to_thread(server.post, path, data))
    await health_while(server, attack)
    status, content = await attack
    code, found, message = error_of(path, content)
    assert status == 400 and "more than" in message
    if path != "/v1/messages":
        assert (code, found) == ("too_many_values", param)
    assert server.probe()


async def test_what_is_only_counted_may_be_longer_than_the_context(server: LiveServer) -> None:
    text = prose(300_000)
    status, content = server.post("/tokenize", body(prompt=text, return_token_strs=True))
    assert status == 200 and content["count"] == len(content["token_strs"]) > 10_000
    back = server.post("/detokenize", body(tokens=content["tokens"]))[1]["prompt"]
    assert back == text
    counted = server.post("/v1/messages/count_tokens", body(messages=chat(text)))
    assert counted[0] == 200 and counted[1]["input_tokens"] > content["count"] * 0.9
    attack = asyncio.create_task(
        asyncio.to_thread(
            server.post, "/tokenize", body(prompt=prose(LONG), return_token_strs=True)
        )
    )
    await health_while(server, attack)
    status, content = await attack
    assert status == 400 and content["error"]["code"] == "string_above_max_length"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_clients_that_leave_take_their_long_texts_along(server: LiveServer) -> None:
    """Twelve long texts whose clients are gone at once hold up nobody who comes after."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    data = body(prompt=prose(1_000_000))
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    for _ in range(12):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        await writer.drain()
        writer.close()
    status, content = await asyncio.to_thread(server.post, CHAT, body(**batch_of()))
    assert status == 200, content


BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}


def part(head: str) -> bytes:
    return b"--b\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\nx\r\n"


FORMS: dict[str, tuple[dict[str, str], bytes]] = {
    "semicolons": ({"content-type": "multipart/form-data;" + '";' * 29_000}, b""),
    "parameters": ({"content-type": "multipart/form-data" + ";a=b" * 14_000}, b""),
    "long part heads": (
        BOUNDARY,
        b"".join(part(f'name="f{i}"; x="' + '";' * 3900) for i in range(15)) + b"--b--",
    ),
    "a charset of no bytes": (BOUNDARY, part("name=file; filename*=undefined''x") + b"--b--"),
    "a charset of names": (BOUNDARY, part("name=file; filename*=idna''x") + b"--b--"),
    "a charset with a NUL": (BOUNDARY, part("name=file; filename*=utf\0-8''x") + b"--b--"),
}
"""Forms that took seconds, or a 500: headers and body."""


async def send_form(live: LiveServer, name: str) -> tuple[int, dict[str, Any]]:
    headers, data = FORMS[name]
    async with (
        aiohttp.ClientSession(live.url) as http,
        http.post("/v1/files", headers=headers, data=data) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("name", FORMS)
async def test_forms_that_cannot_be_read_are_a_400(server: LiveServer, name: str) -> None:
    attack = asyncio.create_task(send_form(server, name))
    await health_while(server, attack)
    status, content = await attack
    assert status == 400, content
    assert content["error"]["code"] in ("invalid_multipart", "invalid_content_type")


# ── the figures ─────────────────────────────────────────────────────────────────────────────

ATTACKER = r"""
import asyncio, sys, time
url, path, count, rounds, file = sys.argv[1:]
data = open(file, "rb").read()

async def attack():
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
                 f"content-length: {len(data)}\r\n\r\n".encode())
    for at in range(0, len(data), 1 << 17):
        writer.write(data[at : at + (1 << 17)])
        await writer.drain()
    sent = time.perf_counter()
    status = (await reader.readline()).split()[1].decode()
    print(status, time.perf_counter() - sent)
    writer.close()

async def main():
    for _ in range(int(rounds)):
        await asyncio.gather(*(attack() for _ in range(int(count))))

asyncio.run(main())
"""


async def attacked(
    live: LiveServer, path: str, data: bytes, count: int, rounds: int = 1
) -> list[tuple[int, float]]:
    """(status, seconds after the last byte) of `count` such bodies at once, sent by a process."""
    file = live.temp / "attack"
    file.write_bytes(data)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ATTACKER, live.url, path, str(count), str(rounds), str(file)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return [(int(a), float(b)) for a, b in (line.split() for line in out.decode().splitlines())]


async def test_bodies_sent_at_once_wait_in_their_sockets(server: LiveServer) -> None:
    """Sixteen of 10 MB: the server holds some of them at a time, not 160 MB and what it makes."""
    before = resident_bytes(server.pid)
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins again
    refused = await attacked(server, TEXT, body(prompt=prose(LONG)), 16)
    status = Path(f"/proc/{server.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024
    print(f"{(peak - before) / MB:.0f} MB more")
    assert [status for status, _ in refused] == [400] * 16
    assert peak - before < 120 * MB


@pytest.fixture
async def embedded(start_server: StartServer) -> LiveServer:
    """The embedded model under the name of the bodies here, warm."""
    import headway

    folder = Path(headway.__file__).parent / "embedded" / "headway-tiny"
    live = start_server("--served-model-name=tiny", folder=folder).wait_ready()
    for _ in range(8):
        await asyncio.to_thread(live.post, CHAT, body(messages=chat("What is 2 + 3?")))
    return live


async def first_tokens(live: LiveServer, times: list[float], over: asyncio.Event) -> None:
    """One user's chats, one after the other; seconds until the first token of each."""
    async with aiohttp.ClientSession(live.url) as http:
        while not over.is_set():
            began = time.monotonic()
            asked = {"messages": chat("What is 2 + 3?"), "max_tokens": 16, "stream": True}
            async with http.post(CHAT, data=body(**asked)) as answer:
                assert answer.status == 200
                async for line in answer.content:
                    if b'"content":"' in line and b'"content":""' not in line:
                        times.append(time.monotonic() - began)
                        break
                await answer.read()
            await asyncio.sleep(0.1)


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


@pytest.mark.hardening
async def test_long_prompts_beside_chats(embedded: LiveServer) -> None:
    """Eight of 10 MB beside ten chats: refused in 0.3 s, TTFT + 50 ms at p99, 200 MB.

    The chats' client has nothing else to do meanwhile, for its own pauses would count as TTFT.
    """
    data = body(prompt=prose(LONG))
    times: list[float] = []
    over = asyncio.Event()
    chats = [asyncio.create_task(first_tokens(embedded, times, over)) for _ in range(10)]
    await asyncio.sleep(2)
    times.clear()
    await asyncio.sleep(6)
    quiet, before = p99(times), resident_bytes(embedded.pid)
    times.clear()
    attack, grown = asyncio.create_task(attacked(embedded, TEXT, data, 8, rounds=10)), 0
    while not attack.done():
        grown = max(grown, resident_bytes(embedded.pid) - before)
        await asyncio.sleep(0.01)
    refused = await attack
    over.set()
    await asyncio.gather(*chats)
    slowest, under = max(seconds for _, seconds in refused), p99(times)
    print(f"refused within {slowest:.3f} s, {grown / MB:.0f} MB more")
    print(f"TTFT p99 {quiet * 1e3:.0f} ms before, {under * 1e3:.0f} ms meanwhile")
    assert {status for status, _ in refused} == {400}
    assert slowest < 0.3 and under - quiet < 0.05 and grown < 200 * MB


COUNTED = {"a text that is counted": ("/tokenize", lambda: body(prompt=prose(LONG)), "prompt")}


@pytest.mark.hardening
@pytest.mark.parametrize("name", [*TOO_LONG, *TOO_MANY, *COUNTED])
async def test_health_answers_within_100_ms_of_hostile_bodies(
    embedded: LiveServer, name: str
) -> None:
    path, make, _ = (TOO_LONG | TOO_MANY | COUNTED)[name]
    attack = asyncio.create_task(attacked(embedded, path, make(), 4))
    slowest = await health_while(embedded, attack)
    print(f"{name}: /health within {slowest * 1e3:.0f} ms")
    assert {status for status, _ in await attack} == {400}
    assert slowest < 0.1


@pytest.mark.hardening
@pytest.mark.parametrize("name", FORMS)
async def test_health_answers_within_100_ms_of_hostile_forms(
    embedded: LiveServer, name: str
) -> None:
    attack = asyncio.create_task(send_form(embedded, name))
    slowest = await health_while(embedded, attack)
    assert (await attack)[0] == 400 and slowest < 0.1
