"""A relay of the gateway's own libraries and not a thought of its own: what a chunk costs at least.

`python benchmarks/bare_relay.py PORT UPSTREAM` hands each request below /v1 to UPSTREAM and its
answer back as it comes; `gateway.py overhead` measures it beside the gateway.
"""

import sys
from typing import Any

import aiohttp
import uvicorn


class BareRelay:
    """One ASGI application before one upstream."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = (await receive()).get("body", b"")
        url = self._upstream + scope["path"].removeprefix("/v1")
        kind = {"content-type": "application/json"}
        async with self._http.request(scope["method"], url, data=body, headers=kind) as answer:
            await send({"type": "http.response.start", "status": answer.status, "headers": []})
            while data := await answer.content.readany():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def main(port: str, upstream: str) -> None:
    """Serve until it is ended."""
    relay = BareRelay(upstream)
    uvicorn.run(
        relay, host="127.0.0.1", port=int(port), loop="uvloop", http="h11", log_level="error"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
