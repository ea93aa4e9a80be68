"""Path prefix of a proxy: --root-path /models.

Some proxies remove the prefix before they forward a request, some do not. Both work, because the
prefix is removed here, before middlewares, routes and errors see the path.
"""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.core.errors import UsageError


def check_root_path(root: str) -> str:
    """Return `root` without its last slash; UsageError unless it is a plain path."""
    if root and not (root.startswith("/") and root.isascii() and root.isprintable()):
        raise UsageError(f"--root-path {root!r} is no path.", "Write it as in --root-path /models.")
    if any(mark in root for mark in ("//", "..", "?", "#", "%", " ", '"', "<")):
        raise UsageError(f"--root-path {root!r} is no plain path.", "Write --root-path /models.")
    if root.rstrip("/") == "/v1":
        raise UsageError("--root-path /v1 is a path of our own.", "Write --root-path /models.")
    return root.rstrip("/")


class RootPath:
    """Removes `root` from paths that begin with it; `root` itself redirects to the page.

    With /models: /models/v1/models → /v1/models, /models → /models/, /modelsx stays. The scope has
    the prefix as `root`, for addresses in responses.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root, path = self._root, scope.get("path", "")
        if scope["type"] == "http" and path == root:  # the page's addresses are relative
            await RedirectResponse(root + "/")(scope, receive, send)
            return
        scope = {**scope, "root": root}
        if path.startswith(root + "/"):
            scope["path"] = path[len(root) :]
        await self._app(scope, receive, send)
