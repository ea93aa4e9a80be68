r"""Refusal of header lines that two servers could read differently (request smuggling).

h11 accepts what RFC 9112 permits: lines that end in a bare \n, folded lines, both a length and
chunks. A proxy in front may see another end of the request, and then the rest of one client's
request is read as the beginning of another's.

Chunks of a stream are written without h11's state machine, which does not change between them.
"""

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from h11._writers import ChunkedWriter

LINE_ENDS = "Each header line must end in CR LF."
FOLDED = "A header line must not go on in a second one."
TWO_LENGTHS = "Send content-length or transfer-encoding, not both."
OLD_CHUNKS = "HTTP/1.0 has no transfer-encoding."
AMBIGUOUS = (LINE_ENDS, FOLDED, TWO_LENGTHS, OLD_CHUNKS)
BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")
CONTENT_LENGTH = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)
TRANSFER_ENCODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class StrictBuffer(ReceiveBuffer):
    """Receive buffer of h11 that refuses ambiguous blocks of header lines."""

    def __init__(self) -> None:
        super().__init__()
        self._takes_lines = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._takes_lines = True
        try:
            return super().maybe_extract_lines()
        finally:
            self._takes_lines = False

    def _extract(self, count: int) -> bytearray:
        block = super()._extract(count)
        if self._takes_lines:
            fault = ambiguity(block)
            if fault is not None:
                raise h11.LocalProtocolError(fault)
        return block


class StrictConnection(h11.Connection):
    """h11 connection with a strict buffer and a fast path for the chunks of a stream."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = StrictBuffer()

    def send(self, event: h11.Event) -> Any:
        """Return the bytes of an event; None for the end of the connection."""
        if type(event) is not h11.Data or not isinstance(self._writer, ChunkedWriter):
            return super().send(event)
        if self.our_state is not h11.SEND_BODY or not event.data:
            return super().send(event)
        return b"%x\r\n%b\r\n" % (len(event.data), event.data)


def ambiguity(head: bytes | bytearray) -> str | None:
    """Return what is ambiguous in the header lines of a request, up to the empty line; or None."""
    if BARE_LINE_END.search(head):
        return LINE_ENDS
    if b"\n " in head or b"\n\t" in head:
        return FOLDED
    if TRANSFER_ENCODING.search(head):
        if CONTENT_LENGTH.search(head):
            return TWO_LENGTHS
        if head.partition(b"\r\n")[0].endswith(b"HTTP/1.0"):
            return OLD_CHUNKS
    return None
