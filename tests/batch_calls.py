"""Files and batches through the official client: upload, begin, wait, read the results."""

import json
import time
from collections.abc import Callable
from typing import Any

import openai

KEYS = ("key-one", "key-two")
"""Of the server that `keyed` starts."""


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "max_tokens": 4, "temperature": 0, "seed": 1, **body}
    if "chat" not in url:
        asked = {"prompt": "Tell me", **asked}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def chat_line(name: str, text: str = "What is 2 + 3?", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return line(name, "/v1/chat/completions", messages=messages, **body)


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(content).encode() + b"\n" for content in lines)


def upload(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, data), purpose="batch").id


def begin(client: openai.OpenAI, data: bytes, endpoint: str, **more: Any) -> str:
    file_id = upload(client, data)
    batch = client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", **more
    )
    assert batch.status == "validating"
    return batch.id


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    def over() -> openai.types.Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "cancelled", "expired") else None

    return wait_until(over)


def wait_until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return value


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """custom_id → line; every id once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    found = {content["custom_id"]: content for content in lines}
    assert len(found) == len(lines)
    assert len({content["id"] for content in lines}) == len(lines)
    return found
