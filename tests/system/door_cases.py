"""Every path of the server, a way to ask it, and the error in its answer."""

import http.client
from typing import Any

import msgspec
from live_server import LiveAddress

from headway.batches.files.routes import FILE_ROUTES
from headway.batches.message_batches import MESSAGE_BATCH_ROUTES
from headway.batches.routes import BATCH_ROUTES
from headway.server import page
from headway.server.app import SMALL_ROUTES

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    *((method, path.replace("{name:path}", "careful")) for method, path, _ in SMALL_ROUTES),
    *(
        (method, path.replace("{id}", "x"))
        for method, path, _ in [*FILE_ROUTES, *BATCH_ROUTES, *MESSAGE_BATCH_ROUTES]
    ),
    *(("GET", path) for path in sorted(page.PATHS)),
    ("GET", "/nowhere"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
]


def ask(
    live: LiveAddress,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """One request with the path exactly as given."""
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=30)
    try:
        headers = headers or {}
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def error_of(content: bytes) -> dict[str, Any]:
    body = msgspec.json.decode(content)
    error: dict[str, Any] = body["error"]
    if "request_id" in body:  # below /v1/messages
        assert set(body) == {"type", "error", "request_id"}
        assert set(error) == {"message", "type"} and error["type"] == "authentication_error"
        return {**error, "code": "invalid_api_key"}
    assert set(error) == {"message", "type", "param", "code"}
    return error
