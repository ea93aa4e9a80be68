"""Errors in the form that clients expect: OpenAI's {"error": {message, type, param, code}}, and
below /v1/messages Anthropic's {"type": "error", "error": {type, message}}.
"""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from headway.core.errors import RequestError

MAX_MESSAGE, MAX_PARAM = 1000, 200


def error_body(error: RequestError) -> dict[str, dict[str, str | None]]:
    """Return the JSON body of an error; texts from the request are cut to a readable length."""
    return {
        "error": {
            "message": str(error)[:MAX_MESSAGE],
            "type": error.type,
            "param": error.param and error.param[:MAX_PARAM],
            "code": error.code,
        }
    }


def anthropic_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return the JSON body in Anthropic's form; the field at fault is part of the message."""
    return {
        "type": "error",
        "error": {"type": anthropic_type(error.status), "message": str(error)[:MAX_MESSAGE]},
        "request_id": request_id,
    }


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_type(status: int) -> str:
    """Return Anthropic's type of a status: 404 → not_found_error."""
    return ANTHROPIC_TYPES.get(status, "invalid_request_error")


def speaks_anthropic(path: str) -> bool:
    """Return whether clients at `path` expect Anthropic's form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(
    error: RequestError, request_id: str = "", *, anthropic: bool = False
) -> Response:
    """Return the HTTP response of an error; 429 and 503 have Retry-After, 405 has Allow."""
    headers = {} if error.allow is None else {"allow": error.allow}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    body = anthropic_body(error, request_id) if anthropic else error_body(error)
    return json_response(body, status=error.status, headers=headers)


def error_event(error: RequestError) -> bytes:
    """Return the event that ends a stream of OpenAI's chunks instead of `[DONE]`."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return `content` as JSON; NaN and infinities, which JSON lacks, become null."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def unknown_url_error(path: str) -> RequestError:
    """Return the 404 of a path that is not served; it names what official clients use it for."""
    known = unserved_purpose(path)
    what, code = (f" ({known})", "unsupported_endpoint") if known else ("", "unknown_url")
    return RequestError(f"{path}{what} is not served here.", code=code, status=404)


def unserved_purpose(path: str) -> str:
    """Return the purpose of a path of OpenAI's or Anthropic's API that is not served, or ""."""
    for name, what in UNSERVED.items():
        if path == name or path.startswith(name + "/"):
            return what
    return ""


UNSERVED = {
    "/v1/responses/compact": "compaction",
    "/v1/conversations": "conversations",
    "/v1/complete": "Anthropic's text completions",
    "/v1/embeddings": "embeddings",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime",
    "/v1/moderations": "moderations",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring",
    "/v1/uploads": "uploads in parts",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/containers": "containers",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
}
"""Path of an official client's call, and all paths below it → its purpose."""
