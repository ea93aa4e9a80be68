r"""multipart/form-data, read as it arrives: nothing is kept but what may still be a delimiter.

    --B\r\n                                                        Begun({"name": "purpose"})
    content-disposition: form-data; name="purpose"\r\n\r\nbatch    Piece(b"batch")
    \r\n--B\r\n
    content-disposition: form-data; name="file"; filename="a"\r\n\r\n{…}   Begun, Piece(b"{…}"), …
    \r\n--B--                                                      finished

However the bytes are split, the pieces of a part joined are the same. A part's headers, and what
stands around the parts, are bounded; the caller bounds the pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message

from headway.core.errors import RequestError

MAX_HEAD_BYTES = 8192
MAX_BOUNDARY_BYTES = 200


@dataclass(frozen=True, slots=True)
class Begun:
    """A part begins: its `name`, and its `filename` where it is a file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of the part that began last."""

    data: bytes


class Multipart:
    """The reader; `feed` returns what each piece of the body brought."""

    def __init__(self, content_type: str) -> None:
        self._delimiter = b"\r\n--" + boundary(content_type)
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter looks like the others
        self._state: Callable[[list[Begun | Piece]], bool] = self._skip
        self.finished = False

    def feed(self, data: bytes) -> list[Begun | Piece]:
        """Parts and pieces that `data` completes; raises RequestError where it is no form."""
        self._buffer += data
        events: list[Begun | Piece] = []
        while not self.finished and self._state(events):
            pass
        if self.finished:
            self._buffer.clear()  # an epilogue is nothing
        return events

    def _skip(self, events: list[Begun | Piece]) -> bool:
        """Before the first delimiter."""
        at = self._buffer.find(self._delimiter)
        if (at if at >= 0 else len(self._buffer) - len(self._delimiter)) > MAX_HEAD_BYTES:
            raise malformed("it does not begin with its boundary")
        if at < 0:
            return False
        del self._buffer[: at + len(self._delimiter)]
        self._state = self._turn
        return True

    def _turn(self, events: list[Begun | Piece]) -> bool:
        """After a delimiter: another part, or the end."""
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
        """A part's headers."""
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
        """A part's bytes, up to the next delimiter or what may become one."""
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
    """The boundary that the header names."""
    message = Message()
    message["content-type"] = content_type
    found = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(found, str):
        raise RequestError(
            "Send the file as multipart/form-data with the fields purpose and file.",
            param="file",
            code="invalid_content_type",
        )
    name = found.encode("latin-1", "replace")
    if not 0 < len(name) <= MAX_BOUNDARY_BYTES:
        raise malformed("its boundary is empty or too long")
    return name


def begun(head: bytes) -> Begun:
    """The part that these header lines describe."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        message = Message()
        message["content-disposition"] = value.strip()
        field = message.get_param("name", header="content-disposition")
        if isinstance(field, str):
            return Begun(field, message.get_filename())
    raise malformed("a part has no name")


def malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", code="invalid_multipart")
