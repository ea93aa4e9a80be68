"""The TLS handshake of a connection that counts from its first byte on.

A server of asyncio's that is given a context tells its protocol of a connection once the handshake
is over, and waits a minute for it: a client that connects and sends nothing would be held to no
limit, and could take every file descriptor.
"""

import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

try:
    from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]
except ImportError:  # where there is no uvloop
    from asyncio.sslproto import SSLProtocol

HANDSHAKE_S = 10.0


class Handshake(SSLProtocol):  # type: ignore[misc]
    """TLS around one connection; `enter` is asked with its address whether there is room for it,
    `leave` is called with the address when it is lost."""

    def __init__(
        self,
        loop: Any,
        connection: Any,
        context: ssl.SSLContext,
        enter: Callable[[str], bool],
        leave: Callable[[str], None],
    ) -> None:
        super().__init__(
            loop, connection, context, None, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
        )
        self._enter, self._leave, self._address = enter, leave, ""

    def connection_made(self, transport: Any) -> None:
        """Begin, or end at once where there are too many."""
        client = get_remote_addr(transport)
        self._address = client[0] if client else ""
        if self._enter(self._address):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave(self._address)
