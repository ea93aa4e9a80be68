"""Reading a known number of bytes from a connection."""

import socket


def receive_into(connection: socket.socket, data: memoryview) -> None:
    """Fill `data`. Raises OSError, a ConnectionResetError where the connection ends before."""
    while data:
        count = connection.recv_into(data)
        if not count:
            raise ConnectionResetError("the other end is closed")
        data = data[count:]


def receive(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes. Raises as `receive_into`."""
    data = bytearray(count)
    receive_into(connection, memoryview(data))
    return bytes(data)
