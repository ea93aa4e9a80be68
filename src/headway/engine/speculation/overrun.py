"""How much longer steps with guesses take than is foretold.

What a step takes is foretold from its rows, and steps with guesses take more: the drafter's weights
push the model's out of the caches, each kept token is told and listed, and of counts that seem to
pay those are chosen whose price is reckoned too low. Worked example, 32 sequences that copy, a step
of 63 ms:

    with 20 guesses foretold 104 ms, took 109     5% of 104 ms are 5 ms
    20 tokens more are worth 39 ms, 41 foretold   they seemed to cost 2 ms, and cost 7
"""

from headway.telemetry.records import StepRecord

LATELY = 16
"""Steps of each kind over which is averaged."""
AT_FIRST = 1.05
"""Times as long as foretold, before any was seen: 1.02 to 1.08 in the end, on CPUs."""


class Overrun:
    """Learned from steps that are over."""

    def __init__(self) -> None:
        self._plain, self._guessed = 1.0, AT_FIRST
        """Times as long as was foretold, without guesses and with some."""

    @property
    def share(self) -> float:
        """Of what a step with guesses is foretold to take, what it takes besides.

        >>> round(Overrun().share, 2)
        0.05
        """
        return max(self._guessed / self._plain - 1, 0.0)

    def saw(self, record: StepRecord) -> None:
        """A step is over; one that was not foretold tells nothing. What the drafter took in it, and
        choosing, is counted elsewhere."""
        if not record.predicted_s:
            return
        actual_s = record.duration_s + record.gap_s - record.draft_s - record.choose_s
        times = actual_s / record.predicted_s
        if record.num_drafts or record.draft_s:
            self._guessed += (times - self._guessed) / LATELY
        else:
            self._plain += (times - self._plain) / LATELY
