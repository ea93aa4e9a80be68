"""The sockets between the server and its engines: ZeroMQ in a folder that only this user enters."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from headway.core.errors import HeadwayError
from headway.engine import messages


def private_folder() -> Path:
    """A new folder for sockets that only this user may enter (0700)."""
    try:
        return Path(tempfile.mkdtemp(prefix="headway-"))
    except OSError as error:
        raise HeadwayError(
            f"No folder for the engine's sockets can be made: {error.strerror}.",
            "Make room, or set TMPDIR to a folder that can be written.",
        ) from error


def bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, path: Path, reader: Callable[[], None]
) -> zmq.Socket[bytes]:
    """A socket at `path`; `reader` is called in the event loop when something may have come."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
    socket.bind(f"ipc://{path}")
    asyncio.get_running_loop().add_reader(socket.FD, reader)
    return socket


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. ZeroMQ's own poll costs ten times as much."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
