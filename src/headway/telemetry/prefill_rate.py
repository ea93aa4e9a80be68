"""What a token of a prompt takes to compute, measured: the price of what a cache saves.

Only steps that are mostly prompts count, each token of them alike: 0.5 s for 480 prompt tokens and
20 decodes is 1 ms a token. A step of decodes with a few prompt tokens behind a hit would say little
of a whole prompt.
"""

from headway.core.records import StepRecord

MOSTLY = 0.5
"""The least share of prompt tokens in a step that counts."""


class PrefillRate:
    """Seconds a prompt token, over all steps so far."""

    __slots__ = ("num_tokens", "seconds")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0

    def take(self, record: StepRecord) -> None:
        """One step more."""
        if record.num_prefill_tokens > MOSTLY * record.num_tokens:
            self.num_tokens += record.num_tokens
            self.seconds += record.duration_s

    @property
    def token_s(self) -> float:
        """0 before the first prompt."""
        return self.seconds / self.num_tokens if self.num_tokens else 0.0
