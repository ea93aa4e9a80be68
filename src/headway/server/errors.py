"""Errors as OpenAI's clients expect them: always {"error": {message, type, param, code}}."""

import math

import msgspec
from starlette.responses import Response

from headway.core.errors import RequestError

MAX_MESSAGE, MAX_PARAM = 1000, 200


def error_body(error: RequestError) -> dict[str, dict[str, str | None]]:
    """The JSON body of an error; what it repeats of the request is cut to a readable length."""
    return {
        "error": {
            "message": str(error)[:MAX_MESSAGE],
            "type": error.type,
            "param": error.param and error.param[:MAX_PARAM],
            "code": error.code,
        }
    }


def error_response(error: RequestError) -> Response:
    """The HTTP answer of an error; 429 and 503 say when to come back."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`content` as JSON; NaN and infinities, which JSON lacks, become null."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def not_found(path: str) -> RequestError:
    """There is nothing at `path`, or not yet."""
    later = LATER_ENDPOINTS.get(path.rstrip("/"))
    if later:
        return RequestError(
            f"{path} ({later}) is not served yet.", code="unsupported_endpoint", status=404
        )
    return RequestError(f"There is nothing at {path}.", code="unknown_url", status=404)


LATER_ENDPOINTS = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/messages": "the Anthropic dialect",
    "/v1/messages/count_tokens": "the Anthropic dialect",
    "/v1/audio/transcriptions": "audio",
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring",
}
