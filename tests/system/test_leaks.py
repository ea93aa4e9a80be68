"""Leaks: what a client sends, its prompt and its key, turns up nowhere but in its own answer."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from door_cases import ask
from live_server import LiveServer, wait_until

KEY, WRONG_KEY = "canary-key-4b1d", "canary-wrong-9e2f"
PROMPT = "canaryprompt"
FORGED = "x\n2026-11-21 10:00:00,000 ERROR headway.server forged\x1b[2J"
REFUSED: list[dict[str, Any]] = [
    {"model": PROMPT},
    {"temperature": PROMPT},
    {"stop": [PROMPT] * 40},
    {"messages": [{"role": "user", "content": [{"type": PROMPT}]}]},
    {"max_tokens": 10**9},
    {"chat_template_kwargs": {"bos_token": PROMPT}},
]


@pytest.fixture(scope="module", params=["text", "json"])
def live(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LiveServer]:
    opened = LiveServer(
        tiny_model, f"--log-format={request.param}", f"--api-key={KEY}", "--log-level=debug",
        "--served-model-name=m", "--kv-memory=64MiB",
    )  # fmt: skip
    try:
        yield opened.wait_ready()
    finally:
        opened.close()


def test_leaks_of_prompts_and_keys(live: LiveServer) -> None:
    """Answers, refusals and a dead engine later, the canaries are in no log and no figure."""
    headers = {"Authorization": f"Bearer {KEY}"}
    chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 3}),
        *(("/v1/chat/completions", {**chat, **wrong}) for wrong in REFUSED),
        ("/tokenize", {"prompt": PROMPT}),
        ("/v1/nothing", chat),
    ):
        status, _, content = ask(live, "POST", path, headers, msgspec.json.encode(body))
        assert status < 500, content
        assert KEY.encode() not in content
    wrong = {"Authorization": f"Bearer {WRONG_KEY}", "x-headway-user": PROMPT}
    status, _, content = ask(live, "POST", "/v1/completions", wrong, b"{}")
    assert status == 401 and WRONG_KEY.encode() not in content
    os.kill(live.engine_pid(), signal.SIGKILL)
    again = re.compile(rb"^headway:engine_restarts_total\{.*\} 1\.0$", re.MULTILINE)
    wait_until(lambda: again.search(ask(live, "GET", "/metrics", headers)[2]))
    wait_until(lambda: ask(live, "GET", "/ready", {})[0] == 200)
    places = {"stdout": live.stdout, "stderr": live.stderr}
    for path in ("/metrics", "/stats", "/trace", "/ready", "/v1/models"):
        places[path] = ask(live, "GET", path, headers)[2].decode()
    for place, text in places.items():
        for canary in (KEY, WRONG_KEY, PROMPT):
            assert canary not in text, f"{canary} in {place}"


def upload_of(purpose: str, filename: str) -> bytes:
    """A form with one file."""
    return (
        f'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--b\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
        "{}\r\n--b--\r\n"
    ).encode()


def test_what_a_client_sends_cannot_forge_a_line_of_the_log(live: LiveServer) -> None:
    body = {"model": "m", "prompt": [5], "max_tokens": 1, FORGED: 1}
    headers = {"Authorization": f"Bearer {KEY}"}
    raw = msgspec.json.encode(body)
    assert ask(live, "POST", "/v1/completions", headers, raw)[0] == 200
    host, _, port = live.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 30) as raw_client:
        raw_client.sendall(FORGED.encode() + b"\r\n\r\n")
        raw_client.recv(1000)
    form = {"content-type": "multipart/form-data; boundary=b"}
    for path, more, sent in (
        ("/v1/completions", {}, msgspec.json.encode({**body, "model": FORGED})),
        ("/v1/completions", {"traceparent": "\x1b[2J", "user-agent": "\x1b[2J"}, raw),
        ("/v1/completions", {"x-request-id": "\x1b[2J"}, b'{"model": "\\u001b[2J"'),
        ("/" + quote(FORGED), {}, raw),
        ("/v1/models/" + quote(FORGED), {}, b""),
        ("/v1/batches/" + quote(FORGED) + "/cancel", {}, b""),
        ("/v1/files", form, upload_of("x", FORGED)),
        ("/v1/files", form, upload_of(FORGED, "x")),
    ):
        assert ask(live, "POST", path, headers | more, sent)[0] < 500
    wait_until(lambda: "ignored fields" in live.stderr)
    assert "\x1b" not in live.stderr
    assert not any(line.endswith("forged") for line in live.stderr.splitlines())
    assert not any(line.startswith("2026-11-21 10:00:00,000") for line in live.stderr.splitlines())


def test_json_logs_are_json(live: LiveServer) -> None:
    if "--log-format=json" not in live.process.args:  # type: ignore[operator]
        pytest.skip("this server logs text")
    headers = {"Authorization": f"Bearer {KEY}"}
    assert ask(live, "POST", "/v1/completions", headers, b'{"prompt": [5], "odd": 1}')[0] == 200
    wait_until(lambda: "ignored fields: odd" in live.stderr)
    for line in (live.stdout + live.stderr).splitlines():
        assert {"time", "level", "logger", "message"} <= msgspec.json.decode(line).keys()
