"""The threads that render and tokenize: separate ones for short and long texts, users in turn.

A short text never waits for a long one.
"""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Callable

from starlette.types import Receive

from headway.edge.lanes import LONG_BYTES, BodyPool, FairThreadPool, Result, unless_disconnected

SHORT_THREADS, LONG_THREADS = 3, 2
MAX_LONG_TEXTS_PER_USER = 2
"""Long texts of a user that may wait; beyond them its next body is not read further."""
TRIM_MIN_BYTES, TRIM_DELAY_S = 2**20, 1.0
"""Body size and delay after which free memory goes back to the system. The delay lets bodies in a
row reuse it: mapping new pages takes longer than reading a body."""


class TokenizerPool(BodyPool):
    """The thread pools of a server, for short and long texts, and the turns of reading bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.short = FairThreadPool("short", SHORT_THREADS)
        self.long = FairThreadPool("long", LONG_THREADS, self.turns.go_on)
        self._trims = False

    def _has_room(self, user: str) -> bool:
        return self.long.num_waiting_of(user) < MAX_LONG_TEXTS_PER_USER

    async def run(
        self, user: str, num_bytes: int, receive: Receive, work: Callable[[], Result]
    ) -> Result:
        """Run `work`, which renders and tokenizes a body; RequestError when its client leaves."""
        if num_bytes < LONG_BYTES:
            return await unless_disconnected(self.short.run(user, work), receive)
        if num_bytes >= TRIM_MIN_BYTES:
            work = self._with_trim(work)
        return await unless_disconnected(self.long.run(user, work), receive)

    def _with_trim(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Return `work` followed, after a delay, by a trim of the heap."""
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
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._trims = False
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


def trim_heap() -> None:
    """Return free memory to the system: glibc keeps about 30 times the size of a tokenized text."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
