"""Live page of a gateway at `/`: pools, routes with their evidence, rollouts, drift, spending."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from headway.edge import page

FILES = page.files_of(Path(__file__).parent)
PATHS = frozenset(map(page.address, FILES))


def endpoints() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return path → endpoint of each file of the page."""
    return page.endpoints(Path(__file__).parent)
