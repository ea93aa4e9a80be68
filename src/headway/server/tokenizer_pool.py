"""The threads that render and tokenize: short texts apart from long ones, users in turn.

Short texts have threads of their own, so that they never wait for a long one.
"""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Callable

from starlette.types import Receive

from headway.edge.lanes import LONG_BYTES, BodyPool, FairThreadPool, Result, unless_gone

SHORT_THREADS, LONG_THREADS = 3, 2
AHEAD = 2
"""So many texts of a user may wait for the long threads; then his next body is not read on."""
TRIM_BYTES, TRIM_S = 2**20, 1.0
"""So long after the work for a body of this size free memory goes back to the system: bodies in a
row use it again, and the pages of a new one take longer to come than its bytes to be read."""


class TokenizerPool(BodyPool):
    """The lanes of a server: bodies parsed, short texts, long ones; and who reads a long body."""

    def __init__(self) -> None:
        super().__init__()
        self.short = FairThreadPool("short", SHORT_THREADS)
        self.long = FairThreadPool("long", LONG_THREADS, self.turns.go_on)
        self._trims = False

    def _has_room(self, user: str) -> bool:
        return self.long.num_waiting_of(user) < AHEAD

    async def run(
        self, user: str, num_bytes: int, receive: Receive, work: Callable[[], Result]
    ) -> Result:
        """Run what renders and tokenizes a body; RequestError when its client leaves."""
        if num_bytes < LONG_BYTES:
            return await unless_gone(self.short.run(user, work), receive)
        done = self._trimmed(work) if num_bytes >= TRIM_BYTES else work
        return await unless_gone(self.long.run(user, done), receive)

    def _trimmed(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """`work`, and soon after it what has been freed is handed back to the system."""
        loop = asyncio.get_running_loop()

        def both() -> Result:
            try:
                return work()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._trim_soon)

        return both

    def _trim_soon(self) -> None:
        if not self._trims:
            self._trims = True
            asyncio.get_running_loop().call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        self._trims = False
        asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> None:
    """Hand free memory back: glibc keeps some 30 times a text that was tokenized whole."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
