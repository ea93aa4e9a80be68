r"""An upstream's event stream, cut into events that are ours: `data:` and `event:`, nothing else.

    id: 7\r\nevent: x\r\ndata: {…}\r\n\r\n    →  Event("x", b"{…}")
    : headway 40 0 311\n\n                    →  Event(comment=b": headway 40 0 311")

Whatever an upstream sends, its own stream alone is broken by it: an event has at most 8 MiB.
"""

import re
from typing import NamedTuple

MAX_EVENT_BYTES = 8 * 2**20
NAME = re.compile(rb"[a-z][a-z0-9_.]{0,63}")


class Event(NamedTuple):
    """One event: its name, its data (lines joined), or a comment."""

    name: bytes = b""
    data: bytes = b""
    comment: bytes = b""

    def encoded(self) -> bytes:
        """As a client gets it."""
        if self.name:
            return b"event: " + self.name + b"\ndata: " + self.data + b"\n\n"
        return b"data: " + self.data + b"\n\n"


class EventCutter:
    """Bytes in, events out; what is left waits for the next bytes."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now; ValueError beyond `MAX_EVENT_BYTES`."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its \n may be on its way
            data = data.replace(b"\r\n", b"\n")
            data = data[:-1].replace(b"\r", b"\n") + b"\r" if held else data.replace(b"\r", b"\n")
        parts = data.split(b"\n\n")
        self._rest = parts.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
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


def events_of(part: bytes) -> list[Event]:
    """The events of what stands between two blank lines: comments by themselves, then data."""
    name, found, lines = b"", [], []
    for line in part.split(b"\n"):
        field, colon, value = line.partition(b":")
        if colon and not field:
            found.append(Event(comment=line))
            continue
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event" and NAME.fullmatch(value):
            name = value
    if lines:
        found.append(Event(name, b" ".join(lines)))
    return found
