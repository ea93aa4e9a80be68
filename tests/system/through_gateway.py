"""The tests of the server, asked of a gateway before it: a plugin of pytest.

    make through-gateway        runs the files of the doors so

Each server without keys gets a gateway of its own in front; what tells of the server itself
(/stats, /metrics, /ready …) is still asked of it. A server with keys is asked as it is.
"""

from typing import Any

import live_server
from live_gateway import LiveGateway
from live_server import LiveAddress, LiveServer

OF_THE_SERVER = ("/metrics", "/stats", "/ready", "/health", "/version")
KEYS = ("--api-key", "--key-file")

wait_ready, close, get = LiveServer.wait_ready, LiveServer.close, LiveAddress.get


def wait_ready_behind(self: LiveServer, *given: Any, **options: Any) -> LiveServer:
    """Ready, and a gateway before it ready as well: its URL is the server's from now on."""
    wait_ready(self, *given, **options)
    told = " ".join(map(str, self.process.args))
    if not hasattr(self, "gateway") and not any(key in told for key in KEYS):
        self.behind, self.gateway = self.url, LiveGateway(self.url)
        live_server.wait_until(lambda: get(self.gateway, "/ready")[0] == 200)
        self.url = self.gateway.url
    return self


def close_behind(self: LiveServer) -> None:
    """The gateway ends first."""
    if hasattr(self, "gateway"):
        self.url = self.behind
        self.gateway.close()
        del self.gateway
    close(self)


def get_behind(self: LiveAddress, path: str) -> Any:
    """GET, of the server itself where it is about it."""
    if not hasattr(self, "gateway") or not path.startswith(OF_THE_SERVER):
        return get(self, path)
    before, self.url = self.url, self.behind
    try:
        return get(self, path)
    finally:
        self.url = before


LiveServer.wait_ready = wait_ready_behind
LiveServer.close = close_behind
LiveAddress.get = get_behind
