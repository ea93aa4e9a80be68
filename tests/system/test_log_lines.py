"""Lines of the log of a server and a gateway: where each request comes from, JSON from the first
line to the last, and what is said at the end."""

import asyncio
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from door_cases import ask
from live_gateway import LiveGateway
from live_server import NO_TORCH, PATIENT, LiveAddress, LiveServer, headway, wait_until
from streams import open_streams

from conftest import StartServer
from headway.edge.key_file import digest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ALICE, OPERATOR = "alice-key-1", "operator-key-1"
KEYS = f"""
keys:
  - {{name: alice, sha256: {digest(ALICE).hex()}}}
  - {{name: operator, sha256: {digest(OPERATOR).hex()}, admin: true}}
"""
BODY = {"prompt": [5], "max_tokens": 2}


def lines_of(live: LiveAddress) -> list[dict[str, Any]]:
    """All that was written to stdout and stderr, each line of it JSON with an ISO time."""
    texts = (live.stdout + live.stderr).splitlines()
    lines = [msgspec.json.decode(text) for text in texts]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert {"level", "logger", "message"} <= line.keys()
    return lines


def line_of(live: LiveAddress, request_id: str) -> dict[str, Any]:
    """The one line of a request."""

    def found() -> list[dict[str, Any]]:
        requests = [line["request"] for line in lines_of(live) if "request" in line]
        return [line for line in requests if line.get("request_id") == request_id]

    wait_until(found)
    (line,) = found()
    return line


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    live = LiveServer(
        tiny_model, NO_TORCH, "--log-format=json", f"--key-file={keys}", "--kv-memory=64MiB"
    )
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def before(keyed: LiveServer) -> Iterator[LiveGateway]:
    """A gateway before that server, with the same keys."""
    keys = keyed.temp / "gateway-keys.yaml"
    keys.write_text(KEYS)
    live = LiveGateway(
        file="models: [{name: '*', upstreams: [a]}]\n"
        f"upstreams: [{{name: a, url: {keyed.url}/v1, key_env: UPSTREAM_KEY, kind: headway}}]\n",
        env={"UPSTREAM_KEY": OPERATOR},
        flags=("--log-format=json", f"--key-file={keys}"),
    )
    try:
        yield live
    finally:
        live.close()


CASES: dict[str, tuple[str, str, str | None, dict[str, Any] | bytes, int]] = {
    "answered": ("POST", "/v1/completions", ALICE, BODY, 200),
    "streamed": ("POST", "/v1/completions", ALICE, {**BODY, "stream": True}, 200),
    "invalid": ("POST", "/v1/completions", ALICE, {**BODY, "temperature": 9}, 400),
    "not JSON": ("POST", "/v1/completions", ALICE, b"{", 400),
    "no key": ("POST", "/v1/completions", None, BODY, 401),
    "not an operator": ("GET", "/stats", ALICE, b"", 403),
    "nothing there": ("GET", "/v1/nothing", ALICE, b"", 404),
    "another method": ("GET", "/v1/completions", ALICE, b"", 405),
    "a small endpoint": ("POST", "/tokenize", ALICE, b"{", 400),
    "no such batch": ("GET", "/v1/batches/batch_1", ALICE, b"", 404),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["keyed", "before"])
def test_each_line_says_where_its_request_comes_from(
    which: str, name: str, request: pytest.FixtureRequest
) -> None:
    live: LiveAddress = request.getfixturevalue(which)
    method, path, key, body, expected = CASES[name]
    headers = {"x-request-id": f"job-{name}", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    status, answered, content = ask(live, method, path, headers, raw)
    assert status == expected, content
    line = line_of(live, answered["x-request-id"])
    assert line["client_request_id"] == f"job-{name}" and line["trace_id"] == TRACE
    assert (line["method"], line["path"], line["status"]) == (method, path, expected)
    assert line["key"] == (None if key is None else "alice")
    assert line["id"] != "-" and (line["code"] is None) == (expected == 200)


def test_a_gateways_request_is_found_in_the_log_of_its_server(
    keyed: LiveServer, before: LiveGateway
) -> None:
    headers = {"authorization": f"Bearer {ALICE}", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    raw = msgspec.json.encode(BODY)
    status, answered, content = ask(before, "POST", "/v1/completions", headers, raw)
    assert status == 200, content
    here = line_of(before, answered["x-request-id"])
    assert here["upstream"] == "a" and here["output_tokens"] == 2 and here["outcome"] == "ok"

    def there() -> list[dict[str, Any]]:
        requests = [line["request"] for line in lines_of(keyed) if "request" in line]
        return [r for r in requests if r.get("client_request_id") == here["request_id"]]

    wait_until(there)
    (line,) = there()
    assert line["key"] == "operator/alice" and line["trace_id"] == TRACE and line["status"] == 200


async def test_the_end_says_how_many_are_left_and_that_it_has_ended(
    start_server: StartServer,
) -> None:
    live = start_server(NO_TORCH, PATIENT, "--log-format=json", "--drain-timeout=10m").wait_ready()
    model, engine = live.model, live.engine_pid()
    async with aiohttp.ClientSession(live.url) as http:
        _, ended = await open_streams(http, model, 3)
        os.kill(engine, signal.SIGSTOP)  # holds the streams open
        live.signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not live.is_ready())
        async with http.post("/v1/completions", json={"model": model, **BODY}) as answer:
            assert answer.status == 503
            refused = answer.headers["x-request-id"]
        os.kill(engine, signal.SIGCONT)
        await ended
    assert await asyncio.to_thread(live.wait_end) == 0
    messages = [line["message"] for line in lines_of(live)]
    assert messages[-1] == "ended" and "draining, 3 left" in messages
    assert line_of(live, refused)["code"] == "shutting_down"


def test_a_gateway_says_that_it_ends(keyed: LiveServer) -> None:
    live = LiveGateway(keyed.url, flags=("--log-format=json",))
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(60) == 0
    messages = [line["message"] for line in lines_of(live)]
    live.close()
    assert messages[-1] == "ended" and "draining, 0 left" in messages


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--log-format=json", "--no-such-option"),
        ("serve", "--log-format", "json", "no-such-folder"),
        ("gateway", "--log-format=json"),
    ],
)
def test_what_keeps_a_server_from_starting_is_json(arguments: tuple[str, ...]) -> None:
    done = headway(*arguments)
    (line,) = [msgspec.json.decode(text) for text in done.stderr.splitlines()]
    assert done.returncode in (2, 3) and not done.stdout
    assert line["level"] == "error" and datetime.fromisoformat(line["time"])
