r"""Streaming reader of multipart/form-data: buffers only what may still be a delimiter.

    --B\r\n                                                        Begun({"name": "purpose"})
    content-disposition: form-data; name="purpose"\r\n\r\nbatch    Piece(b"batch")
    \r\n--B\r\n
    content-disposition: form-data; name="file"; filename="a"\r\n\r\n{…}   Begun, Piece(b"{…}"), …
    \r\n--B--                                                      finished

The joined pieces of a part do not depend on how the bytes were split. The headers of a part and the
text around parts are bounded; the caller bounds the pieces.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from headway.core.errors import RequestError

MAX_HEAD_BYTES = 8192
MAX_BOUNDARY_BYTES = 200
CHARSETS = ("utf-8", "iso-8859-1")
PARAMETER = re.compile(
    r';[ \t]*(?P<name>[^\s=;"]+)[ \t]*=[ \t]*'
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s;"]*))[ \t]*'
)
"""No two neighbours in it match the same character, so that it never tries twice. The standard
library's parser of these headers takes seconds for 60 kB of semicolons."""
ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class Begun:
    """Begin of a part: its `name`, and its `filename` if it is a file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of the part that began last."""

    data: bytes


class Multipart:
    """Reader of one form; `feed` returns the events of each piece of the body."""

    def __init__(self, content_type: str) -> None:
        self._delimiter = b"\r\n--" + boundary(content_type)
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter looks like the others
        self._state: Callable[[list[Begun | Piece]], bool] = self._skip
        self.finished = False

    def feed(self, data: bytes) -> list[Begun | Piece]:
        """Return the events that `data` completes; raises RequestError if it is no form."""
        self._buffer += data
        events: list[Begun | Piece] = []
        while not self.finished and self._state(events):
            pass
        if self.finished:
            self._buffer.clear()  # an epilogue is ignored
        return events

    def _skip(self, events: list[Begun | Piece]) -> bool:
        """Skip the text before the first delimiter."""
        at = self._buffer.find(self._delimiter)
        if (at if at >= 0 else len(self._buffer) - len(self._delimiter)) > MAX_HEAD_BYTES:
            raise malformed("it does not begin with its boundary")
        if at < 0:
            return False
        del self._buffer[: at + len(self._delimiter)]
        self._state = self._turn
        return True

    def _turn(self, events: list[Begun | Piece]) -> bool:
        """Read what follows a delimiter: another part, or the end."""
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self.finished = True
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise malformed("a boundary is followed by something else")
        self._state = self._head
        return True

    def _head(self, events: list[Begun | Piece]) -> bool:
        """Read the headers of a part."""
        at = self._buffer.find(b"\r\n\r\n")
        if (at if at >= 0 else len(self._buffer) - 4) > MAX_HEAD_BYTES:
            raise malformed("the headers of a part are too long")
        if at < 0:
            return False
        events.append(begun(bytes(self._buffer[:at])))
        del self._buffer[: at + 4]
        self._state = self._body
        return True

    def _body(self, events: list[Begun | Piece]) -> bool:
        """Read the bytes of a part, up to the next delimiter or what may become one."""
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        if end:
            events.append(Piece(bytes(self._buffer[:end])))
        if at < 0:
            del self._buffer[:end]
            return False
        del self._buffer[: at + len(self._delimiter)]
        self._state = self._turn
        return True


def boundary(content_type: str) -> bytes:
    """Return the boundary of a Content-Type header."""
    kind, given = parameters(content_type)
    if kind != "multipart/form-data" or "boundary" not in given:
        raise RequestError(
            "Send the file as multipart/form-data with the fields purpose and file.",
            param="file",
            code="invalid_content_type",
        )
    name = given["boundary"].encode("latin-1", "replace")
    if not 0 < len(name) <= MAX_BOUNDARY_BYTES:
        raise malformed("its boundary is empty or too long")
    return name


def begun(head: bytes) -> Begun:
    """Return the begin of the part with these header lines."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        _, given = parameters(value)
        if given.get("name"):
            return Begun(given["name"], filename_of(given))
    raise malformed("a part has no name")


def parameters(header: str) -> tuple[str, dict[str, str]]:
    """Parse 'form-data; name="a"; x=1' → ("form-data", {"name": "a", "x": "1"}) in linear time."""
    kind, _, rest = header.partition(";")
    rest = ";" + rest.rstrip("; \t")
    if len(header) > MAX_HEAD_BYTES:
        raise malformed("a header is too long")
    given: dict[str, str] = {}
    at = 0 if len(rest) > 1 else 1
    while at < len(rest):
        match = PARAMETER.match(rest, at)
        if match is None or match["name"].lower() in given:
            raise malformed("a header's parameters are no name=value, or one stands there twice")
        quoted = match["quoted"]
        value = match["plain"] if quoted is None else ESCAPED.sub(r"\1", quoted)
        given[match["name"].lower()] = value
        at = match.end()
    return kind.strip().lower(), given


def filename_of(given: dict[str, str]) -> str | None:
    """Return `filename*` (RFC 8187), else `filename`, else None."""
    if any(name.startswith("filename*") and name != "filename*" for name in given):
        raise malformed('a file\'s name comes in pieces; send filename="NAME"')
    extended = given.get("filename*")
    if extended is None:
        return given.get("filename")
    charset, _, rest = extended.partition("'")
    _, mark, text = rest.partition("'")
    if not mark or charset.lower() not in CHARSETS:
        raise malformed("filename* must be UTF-8''NAME, its bytes written as %XX")
    try:
        return unquote_to_bytes(text).decode(charset)
    except UnicodeDecodeError:
        raise malformed(f"filename* is not valid {charset}") from None


def malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", code="invalid_multipart")
