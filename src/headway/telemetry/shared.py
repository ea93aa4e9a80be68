"""Where the last prompts stop sharing their prefix, for the live view: numbers, never text.

The server remembers the beginnings of a few prompts; `refresh` compares them with `prefixes` when
`/stats` is read, away from the event loop and at most for a small share of the time.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from headway.core.clock import Clock
from headway.telemetry.prefixes import Pieces, find_sharing

KEPT_PROMPTS, KEPT_TOKENS = 32, 2048
MOST_SHOWN = 5
WORK_SHARE = 0.02
"""Comparing takes at most this share of the time."""


class PrefixSharing(msgspec.Struct, kw_only=True):
    """Some of the last 32 prompts that begin alike, and where they part. No text of theirs.

    `looks_like` names what stands there (a date, a UUID, …), `alike_after` the tokens behind it
    that are alike again and that a cache cannot reuse. `text` and `outliers` are sentences.
    """

    requests: int
    shared_tokens: int
    median_length: float
    looks_like: str
    alike_after: int
    text: str
    outliers: list[str]


class RecentPrompts:
    """The beginnings of the last prompts, and the prefixes that they share."""

    def __init__(self, clock: Clock) -> None:
        self.found: list[PrefixSharing] = []
        self._clock = clock
        self._prompts: deque[list[int]] = deque(maxlen=KEPT_PROMPTS)
        self._fresh_until_s = -float("inf")
        self._num_seen = self._num_compared = 0

    def remember(self, prompt: list[int]) -> None:
        """Keep the beginning of a prompt, in the place of the oldest."""
        self._prompts.append(prompt[:KEPT_TOKENS])
        self._num_seen += 1

    @property
    def due(self) -> bool:
        """Whether there are new prompts and it is time to compare again."""
        return self._num_seen > self._num_compared and self._clock.now_s() >= self._fresh_until_s

    def refresh(self, decode: Callable[[list[int]], str | None] | None) -> None:
        """Compare the prompts; `decode` lets a difference be given a kind. Any thread may call."""
        started_s = self._clock.now_s()
        self._num_compared = self._num_seen

        def as_text(ids: Pieces) -> str:
            return (decode and decode([int(i) for i in ids])) or ""

        groups = find_sharing(list(self._prompts), decode=as_text if decode else None)
        self.found = [
            PrefixSharing(
                requests=group.requests,
                shared_tokens=group.shared,
                median_length=group.median_length,
                looks_like=group.looks_like,
                alike_after=group.alike_after,
                text=group.said,
                outliers=[parting.said for parting in group.outliers],
            )
            for group in groups[:MOST_SHOWN]
        ]
        spent_s = self._clock.now_s() - started_s
        self._fresh_until_s = started_s + spent_s / WORK_SHARE
