"""An upstream that sends raw bytes: a beginning, then the same again and again, up to a limit."""

import contextlib
import socket
import threading
from collections.abc import Iterator

MODELS = b'{"data": [{"id": "tiny", "owned_by": "raw"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class RawUpstream:
    """A server in threads of its own; `num_sent` counts bytes of the answers to POST."""

    def __init__(self, first: bytes, again: bytes = b"", limit: int = 0) -> None:
        self.first, self.again, self.limit = first, again, limit
        self.models = MODELS
        self.num_sent = self.num_asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def accept(self) -> None:
        """Serve connections, each in a thread, until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
            while (head := self._head(connection)).startswith(b"GET"):
                path = head.split(b" ")[1]
                body = self.models if path.endswith(b"/models") else b"{}"
                connection.sendall(HEAD % (len(body), body))
            if head:
                self.num_asked += 1
                self._send(connection, self.first)
                while self.again and self.num_sent < self.limit:
                    self._send(connection, self.again)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.num_sent += len(data)

    def _head(self, connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return b""
            data += more
        return data


@contextlib.contextmanager
def raw_upstream(first: bytes, again: bytes = b"", limit: int = 0) -> Iterator[RawUpstream]:
    """A raw upstream that serves."""
    upstream = RawUpstream(first, again, limit)
    thread = threading.Thread(target=upstream.accept, daemon=True)
    thread.start()
    try:
        yield upstream
    finally:
        upstream.close()
        thread.join()
