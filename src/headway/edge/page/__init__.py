"""Files of a live page: hand-written HTML, CSS and ES modules, served unchanged.

They are public, because they contain no data of a server; the page requests its data with the
reader's key. Server and gateway have a page each; shared files are here. `HEADERS` forbids the
browser everything that no page uses: inline scripts, other origins, frames, HTML from strings.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """File in memory; `tag` is its ETag."""

    content: bytes
    media_type: str
    tag: str

    async def __call__(self, request: Request) -> Response:
        headers = HEADERS | {"etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read(file: Path) -> PageFile:
    """Read a file of the page, with its digest as the tag."""
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return PageFile(content=content, media_type=TYPES[file.suffix], tag=tag)


def address(file: Path) -> str:
    """Return the URL of a file: index.html is `/`, charts.js is `/page/charts.js`."""
    return "/" if file.name == "index.html" else f"/page/{file.name}"


def files_of(folder: Path) -> list[Path]:
    """Return the files of one page: its own and the shared ones."""
    return sorted(file for at in (FOLDER, folder) for file in at.iterdir() if file.suffix in TYPES)


def endpoints(folder: Path) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return path → endpoint of each file."""
    return {address(file): read(file).__call__ for file in files_of(folder)}
