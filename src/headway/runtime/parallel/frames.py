"""Messages between a leader and its followers: msgspec in frames, over a pair of sockets.

The ranks are processes of one machine and one user: a follower inherits its end of the pair, and
nothing listens. A frame is its length in four bytes, then at most 64 MiB.
"""

import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from headway.config.options import plain
from headway.config.resolve import Settings
from headway.core.machine import Machine
from headway.core.plan import StepPlan
from headway.runtime.sockets import receive
from headway.spec import ModelSpec

MAX_FRAME_BYTES = 64 * 2**20
LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, tag=True):
    """The first message to a follower: it is rank `rank` of the model in `folder`; `meeting` is the
    folder where ranks meet.

    `ends` are the descriptors of its sockets to the stage before and to the next, -1 where there is
    none. `parent` is the process of rank 0.
    """

    folder: str
    spec: ModelSpec
    settings: Settings
    machine: Machine
    rank: int
    meeting: str
    ends: tuple[int, int] = (-1, -1)
    parent: int = 0


class StepOrder(msgspec.Struct, tag=True):
    """Run your part of this step."""

    plan: StepPlan


class LogitsOrder(msgspec.Struct, tag=True):
    """Compute your part of the logits of `count` rows, which rank 0 broadcasts; no reply."""

    count: int


class StepDone(msgspec.Struct, tag=True):
    """The end of a step or of the start: `error` is what was raised, "" for nothing.

    `cause` and `fix` are those of an error that a user can correct.
    """

    error: str = ""
    cause: str = ""
    fix: str = ""
    exit_code: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    experts_read: int = 0


def restore_unit(kind: Callable[[object], Any], number: object) -> Any:
    """Return the number as its unit's type: the inverse of `plain`."""
    return kind(number)


Order = Hello | StepOrder | LogitsOrder
encode = msgspec.msgpack.Encoder(enc_hook=plain).encode


class Pipe:
    """One end of the socket pair; raises EOFError when the other end is closed."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._order_decoder = msgspec.msgpack.Decoder(Order, dec_hook=restore_unit)
        self._done_decoder = msgspec.msgpack.Decoder(StepDone)

    def send(self, message: Order | StepDone) -> None:
        """Send one frame. Raises OSError where the other end is closed."""
        data = encode(message)
        assert len(data) <= MAX_FRAME_BYTES, "a frame this long is refused at the other end"
        self._end.sendall(LENGTH.pack(len(data)) + data)

    def receive_order(self) -> Order:
        """Return the next order of the leader."""
        return self._order_decoder.decode(self._receive())

    def receive_done(self, limit_s: float | None = None) -> StepDone:
        """Return the report of a follower. Raises TimeoutError after `limit_s`."""
        self._end.settimeout(limit_s)
        return self._done_decoder.decode(self._receive())

    def close(self) -> None:
        self._end.close()

    def _receive(self) -> bytes:
        (length,) = LENGTH.unpack(receive(self._end, LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {length} bytes")
        return receive(self._end, length)
