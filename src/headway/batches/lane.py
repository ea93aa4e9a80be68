"""How many lines of batches run at once: many while nobody else asks, one beside others.

    lines in flight   others in flight   may another start?
    0 … limit - 1     0                  yes
    0                 1 or more          yes: a batch never starves
    1 or more         1 or more          no: those already running end, none follows

A request counts for a second longer than it runs, so that a batch does not fill every pause of a
conversation. The engine knows too that these lines are of an idle class; the lane keeps them out of
its rows and its memory.
"""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

BESIDE_OTHERS = 1
REMEMBERED_S = 1.0


class Lane:
    """Counts both kinds; one dispatcher waits in `enter` or `empty`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0
        self.others = 0
        self._changed = asyncio.Event()

    @property
    def free(self) -> bool:
        """Whether a line may start now."""
        return self.busy < (BESIDE_OTHERS if self.others else self.limit)

    async def enter(self) -> None:
        """Wait for a place and take it."""
        while not self.free:
            self._changed.clear()
            await self._changed.wait()
        self.busy += 1

    async def empty(self, but: int) -> None:
        """Wait until at most `but` places are taken."""
        while self.busy > but:
            self._changed.clear()
            await self._changed.wait()

    def leave(self) -> None:
        """Give the place back."""
        assert self.busy > 0
        self.busy -= 1
        self.tell()

    def tell(self) -> None:
        """One of the counts has gone down."""
        self._changed.set()

    def forget(self) -> None:
        """One of the others was long enough ago."""
        self.others -= 1
        self.tell()

    def beside(self, app: ASGIApp) -> ASGIApp:
        """`app`, its requests counted as others while they run."""
        return Beside(self, app)


class Beside:
    """An endpoint whose requests go before the lines of batches."""

    def __init__(self, lane: Lane, app: ASGIApp) -> None:
        self._lane = lane
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._lane.others += 1
        try:
            await self._app(scope, receive, send)
        finally:
            asyncio.get_running_loop().call_later(REMEMBERED_S, self._lane.forget)
