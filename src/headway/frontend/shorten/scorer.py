"""Surprisal of texts by the draft model, in a process of its own.

The first text starts the process; it ends with the server. One text is scored at a time, so that
scores do not depend on other load. The scores of the last texts are cached by owner, because a
conversation sends its documents again with each turn.
"""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

from headway.core.errors import EngineDownError
from headway.frontend.lines import GoneError, LineProcess

START_TIMEOUT_S, TEXT_TIMEOUT_S = 300.0, 300.0
"""Upper bounds of the start of the process, reading weights included, and of scoring a text."""
MAX_CACHED_TEXTS = 256

log = logging.getLogger(__name__)


class Scorer:
    """Client of the process started by `command`; thread-safe."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._known: OrderedDict[bytes, list[float]] = OrderedDict()

    def surprisals(self, units: Sequence[str], owner: str = "") -> list[float]:
        """Return the surprisal of each unit of a text, in nats per token.

        Raises EngineDownError if the process has ended.
        """
        key = fingerprint(owner, units)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._ask(list(units))
            self._known.move_to_end(key)
            while len(self._known) > MAX_CACHED_TEXTS:
                self._known.popitem(last=False)
            return self._known[key]

    def _ask(self, units: list[str]) -> list[float]:
        try:
            if self._process is None:
                self._process = LineProcess(self._command)
                self._process.ask([], START_TIMEOUT_S)
            surprisals: list[float] = self._process.ask(units, TEXT_TIMEOUT_S)
        except GoneError as error:
            self._process = None
            log.error("the drafting model that shortens prompts is gone: %s", error)
            raise EngineDownError(
                "The drafting model that says what context.keep may cut has ended; the server's "
                "log says why. Ask again, or leave context out.",
                code="draft_died",
            ) from error
        return surprisals

    def close(self) -> None:
        """End the process; a pending call raises EngineDownError."""
        process = self._process
        if process is None:
            return
        if not self._lock.acquire(blocking=False):
            process.end()  # the holder of the lock closes it
            return
        try:
            process.close()
            self._process = None
        finally:
            self._lock.release()


def fingerprint(*parts: str | Sequence[str]) -> bytes:
    """Return a hash of texts and lists of texts; lengths are included, so it is unambiguous."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        texts = [part] if isinstance(part, str) else part
        for text in (f"{len(texts)}", *texts):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(data) + data)
    return digest.digest()
