r"""Parser of an upstream's event stream; relayed events have `data:` and `event:` only.

    id: 7\r\nevent: x\r\ndata: {…}\r\n\r\n    →  Event("x", b"{…}")
    : headway 40 0 311\n\n                    →  Event(comment=b": headway 40 0 311")

Limits protect the gateway from a faulty upstream: an event has at most 8 MiB, and the number of
events and comments without content is bounded.
"""

import asyncio
import re
from codecs import BOM_UTF8
from math import inf
from typing import NamedTuple

import aiohttp

from headway.gateway.timeouts import SilenceTimeout

SLICE_BYTES = 8192
"""Bytes per read, between two turns of the event loop: a few milliseconds of work."""
MAX_EVENT_BYTES = 8 * 2**20
MAX_IDLE_PARTS, MAX_IDLE_S = 1000, 300.0
"""Maximum consecutive events and comments without content, and seconds after the last content."""
NAME = re.compile(rb"[a-z][a-z0-9_.]{0,63}")


class Event(NamedTuple):
    """One event: its name, its data (joined lines), or a comment."""

    name: bytes = b""
    data: bytes = b""
    comment: bytes = b""

    def encoded(self) -> bytes:
        """Return the bytes that a client gets."""
        if self.name:
            return b"event: " + self.name + b"\ndata: " + self.data + b"\n\n"
        return b"data: " + self.data + b"\n\n"


class EventCutter:
    """Incremental parser of events; each byte is scanned once.

    `num_parts` counts the parts between blank lines so far.
    """

    __slots__ = ("_held", "_may_begin", "_rest", "num_parts")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._held = b""
        self._may_begin = True
        """Whether a byte order mark may follow: only at the start of a stream."""
        self.num_parts = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that are complete now; ValueError beyond `MAX_EVENT_BYTES`."""
        if self._may_begin:
            data, self._held = self._held + data, b""
            if len(data) < len(BOM_UTF8) and BOM_UTF8.startswith(data):
                self._held = data
                return []
            self._may_begin = False
            data = data.removeprefix(BOM_UTF8)
        if self._held or b"\r" in data:
            data = self._held + data
            self._held = b"\r" if data.endswith(b"\r") else b""  # the \n may follow
            data = data[: len(data) - len(self._held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._rest:
            since = len(self._rest) - 1
            self._rest += data
            if self._rest.find(b"\n\n", since) < 0:
                self._check_rest()
                return []
            data = bytes(self._rest)
        *parts, rest = data.split(b"\n\n")
        self._rest = bytearray(rest)
        self._check_rest()
        self.num_parts += len(parts)
        events: list[Event] = []
        for part in parts:
            if b"\n" in part:
                events += events_of(part)
            elif part.startswith(b"data: "):
                events.append(Event(b"", part[6:]))
            elif part.startswith(b":"):
                events.append(Event(b"", b"", part))
            else:
                events += events_of(part)
        return events

    def _check_rest(self) -> None:
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")


class RelayEventReader:
    """Reader of the events of one answer in slices, so that other tasks get their turn."""

    def __init__(
        self,
        content: aiohttp.StreamReader,
        max_bytes: int,
        silence: SilenceTimeout | None = None,
    ) -> None:
        """`silence` is notified while the reader waits for the upstream."""
        self._content = content
        self._max_bytes = max_bytes
        self._silence = silence
        self._cutter = EventCutter()
        self._now_s = asyncio.get_running_loop().time
        self._num_bytes = 0
        self._content_s = inf
        self._content_parts = 0

    async def read(self) -> list[Event] | None:
        """Return the next events, possibly none; None at the end. ValueError beyond the limits."""
        silence, now_s = self._silence, self._now_s()
        idle_parts = self._cutter.num_parts - self._content_parts
        if idle_parts > MAX_IDLE_PARTS or now_s - self._content_s > MAX_IDLE_S:
            raise ValueError("a stream that shows nothing")
        if silence is not None:
            silence.since_s = now_s
        data = await self._content.read(SLICE_BYTES)
        if silence is not None:
            silence.since_s = inf
        if not data:
            return None
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise ValueError("a stream that is too long")
        if len(data) == SLICE_BYTES:
            await asyncio.sleep(0)  # a fast upstream must not occupy the event loop
        return self._cutter.feed(data)

    def note_content(self) -> None:
        """Record that the last events showed content."""
        self._content_s, self._content_parts = self._now_s(), self._cutter.num_parts


def events_of(part: bytes) -> list[Event]:
    """Parse the part between two blank lines: comments, then one event with its data."""
    name, events, lines = b"", [], []
    for line in part.split(b"\n"):
        field, colon, value = line.partition(b":")
        if colon and not field:
            events.append(Event(comment=line))
            continue
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event" and NAME.fullmatch(value):
            name = value
    if lines:
        events.append(Event(name, b" ".join(lines)))
    return events
