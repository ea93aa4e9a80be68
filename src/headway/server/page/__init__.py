"""The live page of a server at `/`; what it shares with the gateway's lies in `edge/page`."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from headway.edge import page

FILES = page.files_of(Path(__file__).parent)
PATHS = frozenset(map(page.address, FILES))


def endpoints() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return path → handler of the page's files."""
    return page.endpoints(Path(__file__).parent)
