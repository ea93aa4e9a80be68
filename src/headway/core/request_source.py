"""Source of a request: the fields by which its log line is match.

It is made of the headers before anything is checked, so that a refused request has a line too.
`key` is the name of its key, None until that is known and on servers without keys.
"""

import re
from typing import Any

import msgspec

MAX_CLIENT_ID, MAX_METHOD, MAX_PATH = 200, 20, 200
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestSource(msgspec.Struct, kw_only=True, gc=False):
    """Source of one request: `request_id` is the server's (`x-request-id` of the response),
    `client_request_id` the client's, `trace_id` that of its `traceparent`."""

    request_id: str
    method: str = "POST"
    path: str = ""
    key: str | None = None
    client_request_id: str | None = None
    trace_id: str | None = None
    is_logged: bool = False
    """Whether its line has been written."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of its log line."""
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "trace_id": self.trace_id,
            "key": self.key,
            "method": self.method[:MAX_METHOD],
            "path": self.path[:MAX_PATH],
        }


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id: 00-4bf92f3577b34da6a3ce929d0e0e4736-… → its second part, else None."""
    match = TRACEPARENT.match(traceparent or "")
    return match[1] if match else None


def client_id_of(*given: str | None) -> str | None:
    """Return the first valid client id: printable ASCII of at most 200 characters."""
    for text in given:
        if text and len(text) <= MAX_CLIENT_ID and text.isascii() and text.isprintable():
            return text
    return None
