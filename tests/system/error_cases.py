"""Bodies of every endpoint, values of every kind, and what an error must look like."""

from typing import Any

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
