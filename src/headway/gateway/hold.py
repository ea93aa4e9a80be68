"""Hold-back: a stream is published part by part, after a scorer has accepted each part.

    by: sentence   "It rains."  ─► scored ─► published    "We stay at"  waits for its end
    by: tokens     a fixed number of pieces at a time
    by: whole      the answer, after its end

The scorer is an endpoint of the operator: POST {"task", "request", "answer", "piece"} → {"score"};
`answer` is the text so far, `piece` its new part. If the score is below `least`, or later than
`within`, nothing more is published: the stream ends with an error, and an answer of which nothing
was sent is refused with 422. Tool calls and reasoning wait with the text and are not scored.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import RequestError
from headway.gateway.cascade.rows import HoldRow
from headway.gateway.dialects import MALFORMED, Dialect
from headway.gateway.events import EventCutter
from headway.gateway.probe import PROBE_FAILURES, ScorerClient

SENTENCE = re.compile(r"[.!?…。！？][\"'”’)\]]*\s|[。！？\n]")
BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class HoldCounts:
    """Counts of the held answers of one route, and a histogram of the delay of their pieces."""

    row: HoldRow
    answers: int = 0
    stopped: int = 0
    late: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    seconds: float = 0.0

    def published(self, seconds: float) -> None:
        """Count a piece that was published `seconds` after its first byte arrived."""
        self.buckets[sum(seconds > bound for bound in BUCKETS_S)] += 1
        self.seconds += seconds

    @property
    def pieces(self) -> int:
        return sum(self.buckets)

    def below(self, share: float) -> float | None:
        """Return the bucket bound of a quantile of the delays; None above the last bound."""
        remaining = share * self.pieces
        for bound, count in zip(BUCKETS_S, self.buckets, strict=False):
            remaining -= count
            if remaining <= 0:
                return bound if self.pieces else None
        return None

    def snapshot(self, route: str) -> dict[str, Any]:
        """Return the route's part of `/stats`."""
        return {
            "route": route,
            "by": self.row.by,
            "answers": self.answers,
            "pieces": self.pieces,
            "stopped": self.stopped,
            "late": self.late,
            "mean_s": self.seconds / self.pieces if self.pieces else None,
            "p50_s": self.below(0.5),
            "p99_s": self.below(0.99),
        }


class Hold:
    """Hold-back of one answer; `raw` and `task` are of its request."""

    def __init__(
        self,
        counts: HoldCounts,
        scorers: ScorerClient,
        dialect: Dialect,
        raw: dict[str, Any],
        task: str,
    ) -> None:
        self._counts = counts
        self._row = counts.row
        self._scorers = scorers
        self._dialect = dialect
        self._raw = raw
        self._task = task
        self._cutter = EventCutter()
        self._waiting: list[bytes] = []
        self._piece, self._answer = "", ""
        self._num_pieces = 0
        self._since_s: float | None = None
        counts.answers += 1

    async def take(self, data: bytes) -> bytes:
        """Add events and return the bytes that may be published now; raises RequestError."""
        self._add(data)
        return await self._release() if self._is_due() else b""

    async def rest(self, data: bytes) -> bytes:
        """Add the last events and return all bytes that wait; raises RequestError."""
        self._add(data)
        return await self._release()

    async def whole(self, text: str) -> None:
        """Score a whole answer; raises RequestError if it is rejected."""
        self._piece, self._since_s = text, time.monotonic()
        await self._release()

    def _add(self, data: bytes) -> None:
        if not data:
            return
        self._since_s = time.monotonic() if self._since_s is None else self._since_s
        self._waiting.append(data)
        for event in self._cutter.feed(data):
            if event.comment:
                continue
            try:
                text = self._dialect.read(event, None).text
            except MALFORMED:
                continue  # an event that the gateway wrote
            self._piece += text
            self._num_pieces += bool(text)

    def _is_due(self) -> bool:
        """Return whether the waiting part is complete and has to be scored."""
        if self._row.by == "tokens":
            return self._num_pieces >= self._row.size
        return self._row.by == "sentence" and SENTENCE.search(self._piece) is not None

    async def _release(self) -> bytes:
        """Score the new part and return the bytes that waited for it."""
        if self._piece.strip():
            self._answer += self._piece
            await self._score()
        data, self._waiting = b"".join(self._waiting), []
        if self._since_s is not None:
            self._counts.published(time.monotonic() - self._since_s)
        self._piece, self._num_pieces, self._since_s = "", 0, None
        return data

    async def _score(self) -> None:
        """Raise RequestError unless the scorer accepts the text."""
        body = {"task": self._task, "request": self._raw}
        body |= {"answer": self._answer, "piece": self._piece}
        try:
            score = await self._scorers.score(self._row.scorer, body, self._row.within_s)
        except PROBE_FAILURES as error:
            self._counts.late += 1
            if self._row.late == "publish":
                return
            raise held_back_error("it was not scored in time") from error
        if score < self._row.least:
            self._counts.stopped += 1
            raise held_back_error("its score is too low")


def held_back_error(why: str) -> RequestError:
    return RequestError(f"The answer is held back: {why}.", code="held_back", status=422)
