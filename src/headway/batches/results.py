"""The lines of output and error files, in OpenAI's form, from what an endpoint answered.

{"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, …}, "error": null}

Of a message batch, in Anthropic's:

{"custom_id": "a", "result": {"type": "succeeded", "message": {…}}}

A gateway's lines hold what other servers answered: each of them is one line here, and UTF-8.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.batches.files.store import new_id
from headway.edge.errors import anthropic_type
from headway.edge.json_limits import MALFORMED

Count = Annotated[int, Meta(ge=0, le=2**40)] | None
"""Tokens; null where a server does not tell them."""


class InputDetails(msgspec.Struct):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: Count = 0


class Usage(msgspec.Struct):
    """Tokens of one answer or of many; chat's names and the Responses API's."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_input_tokens: Count = 0
    prompt_tokens_details: InputDetails | None = None
    input_tokens_details: InputDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details or self.input_tokens_details
        found = details.cached_tokens if details is not None else self.cache_read_input_tokens
        return found or 0


class Answered(msgspec.Struct):
    """What a batch needs to know of an answer."""

    usage: Usage | None = None


def usage_of(body: bytes) -> Usage:
    """The tokens that an answer tells; none where what it tells is no count of them."""
    try:
        return msgspec.json.decode(body, type=Answered).usage or Usage()
    except MALFORMED:
        return Usage()


def on_one_line(body: bytes) -> msgspec.Raw:
    """JSON without space between its parts: some servers indent what they answer."""
    return msgspec.Raw(msgspec.json.format(body.decode("utf-8", "replace"), indent=-1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line's end: what is written, whether it failed, and the tokens it took."""

    line: bytes
    failed: bool
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> Result:
    """The result of a line that an endpoint answered, with an answer or an error."""
    content = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": request_id,
            "body": on_one_line(body),
        },
        "error": None,
    }
    usage = usage_of(body) if status == 200 else Usage()
    return Result(
        line=msgspec.json.encode(content),
        failed=status != 200,
        input_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        output_tokens=usage.completion_tokens or usage.output_tokens or 0,
        cached_tokens=usage.cached_tokens,
    )


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that never ran to its end."""
    return msgspec.json.encode(
        {
            "id": new_id("batch_req_"),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


class Message(msgspec.Struct):
    """What an error says, in either shape."""

    message: str = ""


class Refusal(msgspec.Struct):
    """The body of an error, OpenAI's or Anthropic's."""

    error: Message


decode_refusal = msgspec.json.Decoder(Refusal).decode


def message_answered(custom_id: str, status: int, request_id: str, body: bytes) -> Result:
    """The result of a message batch's request that was answered, with a message or an error."""
    if status != 200:
        fault = {"type": anthropic_type(status), "message": decode_refusal(body).error.message}
        error = {"type": "error", "error": fault, "request_id": request_id}
        return Result(line=message_line(custom_id, "errored", error=error), failed=True)
    usage = usage_of(body)
    return Result(
        line=message_line(custom_id, "succeeded", message=on_one_line(body)),
        failed=False,
        input_tokens=(usage.input_tokens or 0) + usage.cached_tokens,
        output_tokens=usage.output_tokens or 0,
        cached_tokens=usage.cached_tokens,
    )


def message_line(custom_id: str, kind: str, **fields: object) -> bytes:
    """A line of the results of a message batch."""
    return msgspec.json.encode({"custom_id": custom_id, "result": {"type": kind, **fields}})
