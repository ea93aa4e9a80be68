"""Predicted growth: how many more blocks running sequences will hold at their peak.

A running sequence grows by a token a step and releases its blocks when it ends, so the peak is just
before an end. Worked example, blocks of one token: a holds 8 and ends after 2 more, b holds 4 and
ends after 6:

    after 2 steps    a and b have grown by 2 each      4 more than now
    after 6 steps    a has ended, b has grown by 6     6 - 8: 2 fewer than now
    a new one of 3 tokens that ends after 6 more       after 2 steps 3 * 2 = 6, then 2 * 6 - 8 = 4

So 6 more than its 3 tokens have to be free. The length of an answer is known where nothing but
`max_tokens` ends it. Else it is predicted from ended answers of its class: a quantile of those
longer than it is now, another one for each sequence, so that all together are distributed as the
ended ones (Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees"). While
few have ended it is predicted to end now.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

from headway.engine.sequence import Sequence

MAX_LENGTHS, MIN_LONGER = 256, 4
"""Lengths kept of a class, and how many longer ones a prediction needs."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly over 0 to 1."""


class AnswerLengths:
    """Lengths in tokens of the newest ended answers of one class."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Add a length and drop the oldest."""
        if len(self._newest) == MAX_LENGTHS:
            self._sorted.remove(self._newest[0])
        self._newest.append(length)
        insort(self._sorted, length)

    def quantile(self, now: int, part: float) -> int:
        """Return the quantile `part` of lengths above `now`; `now` where few are longer."""
        at = bisect_right(self._sorted, now)
        count = len(self._sorted) - at
        return self._sorted[at + int(part * count)] if count >= MIN_LONGER else now


class Growth:
    """Ended answers by class, and the predicted length of running ones."""

    def __init__(self) -> None:
        self._lengths: dict[str, AnswerLengths] = {}

    def observe(self, sequence: Sequence) -> None:
        """Learn the length of an answer, where more than `max_tokens` could end it."""
        if sequence.num_generated and not (has_fixed_length(sequence) or sequence.parcel_id):
            name = sequence.request.terms.service_class
            if name not in self._lengths:
                self._lengths[name] = AnswerLengths()
            self._lengths[name].add(sequence.num_generated)

    def predict_remaining(self, sequence: Sequence) -> int:
        """Return how many more tokens are predicted to be computed; the last of an answer is not.

        A sequence that is handed over to another engine ends with its first.
        """
        most = max(sequence.max_len - len(sequence.tokens) - 1, 0)
        if sequence.parcel_id:
            return 0
        if has_fixed_length(sequence):
            return most
        lengths = self._lengths.get(sequence.request.terms.service_class)
        if lengths is None:
            return 0
        now = len(sequence.tokens) - sequence.num_prompt
        part = sequence.sequence_id * GOLDEN_RATIO % 1
        return min(most, max(lengths.quantile(now, part) - now - 1, 0))

    def rows(self, sequence: Sequence, half: int) -> list[tuple[int, int]]:
        """Return (tokens to come, tokens held) of `sequence` and of its forks, which hold no
        tokens of their own yet.

        The last block is half full in the mean, so an end frees `half` a block more.
        """
        held = len(sequence.tokens) - sequence.num_shared + half
        pairs = [(self.predict_remaining(sequence), held)]
        return pairs + [(self.predict_remaining(fork), half) for fork in sequence.forks]


class Profile:
    """When rows end, and how many tokens more than now are held just before each end.

    `ends` are the tokens to come of each row, in order. Before end `i` at most `_highest[i]` tokens
    more are held up to there, with a new row; from there on `_later[i]`, without.
    """

    def __init__(self, rows: Iterable[tuple[int, int]]) -> None:
        order = sorted(rows)
        self.ends = [remaining for remaining, _ in order]
        self._alive, self._freed, freed = len(order), [0], 0
        more: list[int] = []
        highest: list[int] = [0]
        for at, (remaining, held) in enumerate(order):
            more.append(remaining * (self._alive - at) - freed)
            highest.append(max(highest[-1], more[-1] + remaining))
            freed += held
            self._freed.append(freed)
        later = [0]
        for tokens in reversed(more):
            later.append(max(later[-1], tokens))
        self._highest, self._later = highest, later[::-1]

    def peak(self, remaining: int, held: int) -> int:
        """Return the tokens beyond now at the peak, with a new row that holds `held` tokens and has
        `remaining` to come; O(log n) for n rows.
        """
        at = bisect_left(self.ends, remaining)
        own = remaining * (self._alive - at + 1) - self._freed[at]
        return max(self._highest[at], own, self._later[at] - held)


def has_fixed_length(sequence: Sequence) -> bool:
    """Return whether nothing but its maximal length ends the answer."""
    sampling = sequence.request.sampling
    return not (sequence.stop_ids or sampling.stop or sequence.grammar)
