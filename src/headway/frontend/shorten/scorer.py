"""Who says how surprising a text is: the drafting model, in a process of its own.

The process is started by the first text and ends with the server. One text is read at a time, so
that its scores never depend on what runs beside it; those of the last texts are remembered by who
sent them, for a conversation brings its documents again with each turn.
"""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

from headway.core.errors import EngineDownError
from headway.frontend.lines import GoneError, LineProcess

START_S, PATIENCE_S = 300.0, 300.0
"""The longest start of the process, with the weights read, and the longest wait for a text."""
KEPT_TEXTS = 256

log = logging.getLogger(__name__)


class Scorer:
    """The process behind `command`; any thread may ask."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._known: OrderedDict[bytes, list[float]] = OrderedDict()

    def surprisals(self, units: Sequence[str], owner: str = "") -> list[float]:
        """How surprising each unit of a text is, in nats a token.

        EngineDownError where the process cannot say so now.
        """
        key = fingerprint(owner, units)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._ask(list(units))
            self._known.move_to_end(key)
            while len(self._known) > KEPT_TEXTS:
                self._known.popitem(last=False)
            return self._known[key]

    def _ask(self, units: list[str]) -> list[float]:
        try:
            if self._process is None:
                self._process = LineProcess(self._command)
                self._process.ask([], START_S)
            found: list[float] = self._process.ask(units, PATIENCE_S)
        except GoneError as error:
            self._process = None
            log.error("the drafting model that shortens prompts is gone: %s", error)
            raise EngineDownError(
                "The drafting model that says what context.keep may cut has ended; the server's "
                "log says why. Ask again, or leave context out.",
                code="draft_died",
            ) from error
        return found

    def close(self) -> None:
        """End the process; who waits for it is told."""
        process = self._process
        if process is None:
            return
        if not self._lock.acquire(blocking=False):
            process.end()  # who holds the lock closes it
            return
        try:
            process.close()
            self._process = None
        finally:
            self._lock.release()


def fingerprint(*parts: str | Sequence[str]) -> bytes:
    """A key of texts and lists of texts, each told from its neighbours."""
    said = hashlib.blake2b(digest_size=20)
    for part in parts:
        texts = [part] if isinstance(part, str) else part
        for text in (f"{len(texts)}", *texts):
            data = text.encode("utf-8", "surrogatepass")
            said.update(b"%d:" % len(data) + data)
    return said.digest()
