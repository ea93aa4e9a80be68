"""A read of blocks that several threads share: who asked is told once, by the last of them."""

import threading
from collections.abc import Callable

from headway.runtime.kvstore.segment import BlockId

Landed = Callable[[bool], None]
"""What is called, in a reader's thread, when all blocks asked for are there, or will not be."""


class Part:
    """Some blocks of a read, and where their bytes go; the last part to end tells of all."""

    def __init__(self, reading: "Reading", blocks: list[BlockId], into: list[memoryview]) -> None:
        self.reading, self.blocks, self.into = reading, blocks, into


class Reading:
    """A read whose parts end in several threads."""

    def __init__(self, landed: Landed) -> None:
        self._landed, self._mutex = landed, threading.Lock()
        self.num_left, self.has_failed = 0, False

    def ended(self, *, well: bool) -> None:
        """One part is over."""
        with self._mutex:
            self.num_left -= 1
            self.has_failed = self.has_failed or not well
            is_last = not self.num_left
        if is_last:
            self._landed(not self.has_failed)
