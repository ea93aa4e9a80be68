"""Bodies of every endpoint, values of every kind, and what an error must look like."""

import io
import json
import typing
from typing import Any

import aiohttp
import msgspec

from headway.server.openai.schema import ChatBody, CompletionBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"model": "tiny", "prompt": "hi", "max_tokens": 2},
}
STRUCTS = {CHAT: ChatBody, TEXT: CompletionBody}


def check_error(status: int, content: Any) -> None:
    """The one shape errors have."""
    assert status in (400, 401, 403, 404, 405, 413, 429, 503), (status, content)
    assert set(content) == {"error"}
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) < 2000
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)


Answer = tuple[int, Any, typing.Mapping[str, str]]


async def send(http: aiohttp.ClientSession, path: str, body: Any) -> Answer:
    """POST a body, bytes as they are; checks what every answer promises."""
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    headers = {"content-type": "application/json"}
    async with http.post(path, data=data, headers=headers) as answer:
        content = msgspec.json.decode(await answer.read())
        assert answer.headers["x-request-id"]
        assert answer.content_type == "application/json"
        if answer.status != 200:
            check_error(answer.status, content)
        return answer.status, content, dict(answer.headers)


def changed(path: str, **fields: Any) -> dict[str, Any]:
    """A good body with some fields set; `...` leaves one out."""
    body = {**BODIES[path], **fields}
    return {name: value for name, value in body.items() if value is not ...}
