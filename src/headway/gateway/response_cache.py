"""Answers that are kept for a time, in a bounded number of bytes."""

from collections import OrderedDict

from headway.core.clock import Clock

MAX_BYTES, MAX_ANSWER, ENTRY_BYTES = 64 * 2**20, 2**20, 512
"""Bytes of all answers, of one, and of what is kept beside each."""


class ResponseCache:
    """Answers by digest, the least recently used one first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._num_bytes = 0

    def find(self, digest: bytes) -> bytes | None:
        """Return the answer, unless its time is over."""
        until_s, data = self._answers.get(digest, (0.0, b""))
        if not data:
            return None
        if self._clock.now_s() >= until_s:
            self._remove(digest)
            return None
        self._answers.move_to_end(digest)
        return data

    def add(self, digest: bytes, data: bytes, seconds: float) -> None:
        """Keep an answer; the least recently used ones make room."""
        if not 0 < len(data) <= MAX_ANSWER:
            return
        self._remove(digest)
        self._answers[digest] = self._clock.now_s() + seconds, data
        self._num_bytes += len(data) + ENTRY_BYTES
        while self._num_bytes > MAX_BYTES:
            self._remove(next(iter(self._answers)))

    def _remove(self, digest: bytes) -> None:
        _, data = self._answers.pop(digest, (0.0, b""))
        self._num_bytes -= len(data) + ENTRY_BYTES if data else 0

    def clear(self) -> None:
        """Forget all answers: another configuration may answer otherwise."""
        self._answers.clear()
        self._num_bytes = 0

    def check_integrity(self) -> None:
        sizes = [len(data) + ENTRY_BYTES for _, data in self._answers.values()]
        assert self._num_bytes == sum(sizes)
        assert self._num_bytes <= MAX_BYTES
