"""Lines of output and error files, in OpenAI's form, from the answers of endpoints.

{"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, …}, "error": null}

Of a message batch, in Anthropic's:

{"custom_id": "a", "result": {"type": "succeeded", "message": {…}}}

The answers of a gateway come from other servers: each is rewritten as one line of UTF-8.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.batches.files.store import new_id
from headway.edge.errors import anthropic_type
from headway.edge.json_limits import MALFORMED

Count = Annotated[int, Meta(ge=0, le=2**40)] | None
"""Tokens; null where a server does not report them."""


class InputDetails(msgspec.Struct):
    """Prompt tokens read from the prefix cache."""

    cached_tokens: Count = 0


class AnswerUsage(msgspec.Struct):
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
        cached = details.cached_tokens if details is not None else self.cache_read_input_tokens
        return cached or 0


class Answered(msgspec.Struct):
    """Part of an answer that a batch reads."""

    usage: AnswerUsage | None = None


def usage_of(body: bytes) -> AnswerUsage:
    """Return the usage of an answer; zeros where it has no valid usage."""
    try:
        return msgspec.json.decode(body, type=Answered).usage or AnswerUsage()
    except MALFORMED:
        return AnswerUsage()


def on_one_line(body: bytes) -> msgspec.Raw:
    """Return compact JSON: some servers indent their answers."""
    return msgspec.Raw(msgspec.json.format(body.decode("utf-8", "replace"), indent=-1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one line: the text to write, whether it failed, and its tokens."""

    line: bytes
    failed: bool
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


def answer_result(custom_id: str, status: int, request_id: str, body: bytes) -> Result:
    """Return the result of a line that an endpoint answered, with an answer or an error."""
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
    usage = usage_of(body) if status == 200 else AnswerUsage()
    return Result(
        line=msgspec.json.encode(content),
        failed=status != 200,
        input_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        output_tokens=usage.completion_tokens or usage.output_tokens or 0,
        cached_tokens=usage.cached_tokens,
    )


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that did not finish."""
    return msgspec.json.encode(
        {
            "id": new_id("batch_req_"),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


class ErrorText(msgspec.Struct):
    """Message of an error, OpenAI's or Anthropic's."""

    message: str = ""


class Refusal(msgspec.Struct):
    """Body of an error, OpenAI's or Anthropic's."""

    error: ErrorText


decode_refusal = msgspec.json.Decoder(Refusal).decode


def message_result(custom_id: str, status: int, request_id: str, body: bytes) -> Result:
    """Return the result of a message batch's request, with a message or an error."""
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
    """Return a line of the results of a message batch."""
    return msgspec.json.encode({"custom_id": custom_id, "result": {"type": kind, **fields}})
