"""How many more blocks the running ones will hold at the most before their answers end.

What runs grows by a token a step and gives back what it holds when it ends, so most blocks are
needed just before somebody ends. Worked example, blocks of one token: a holds 8 and ends after 2
more, b holds 4 and ends after 6:

    after 2 steps    a and b have grown by 2 each      4 more than now
    after 6 steps    a is gone, b has grown by 6       6 - 8: 2 fewer than now
    a newcomer of 3 tokens that ends after 6 more      after 2 steps 3 * 2 = 6, then 2 * 6 - 8 = 4

So beside the 3 that it begins with 6 more have to be free. How long an answer becomes is known
where nothing but `max_tokens` ends it; else it is guessed from answers of its class that have
ended: one of those longer than it is by now, for each sequence at another place in their order, so
that all together are as the answers were (Gong et al. 2025, "Past-Future Scheduler for LLM Serving
under SLA Guarantees"). While few have ended nothing is guessed, as if it ended now.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

from headway.engine.sequence import Sequence

REMEMBERED, LEAST = 256, 4
"""Lengths of a class that are kept, and how many longer ones tell how long one becomes."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples without their whole parts lie evenly between 0 and 1."""


class Lengths:
    """The answers of one class that have ended, in tokens."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """One more; the oldest is forgotten."""
        if len(self._newest) == REMEMBERED:
            self._sorted.remove(self._newest[0])
        self._newest.append(length)
        insort(self._sorted, length)

    def likely(self, now: int, part: float) -> int:
        """What `part` of those longer than `now` do not exceed; `now` where few are longer."""
        at = bisect_right(self._sorted, now)
        count = len(self._sorted) - at
        return self._sorted[at + int(part * count)] if count >= LEAST else now


class Growth:
    """What answers of each class were like, and how long those that run become."""

    def __init__(self) -> None:
        self._lengths: dict[str, Lengths] = {}

    def ended(self, sequence: Sequence) -> None:
        """Learn the length of an answer, where more than `max_tokens` could end it."""
        if sequence.num_generated and not (is_fixed(sequence) or sequence.parcel_id):
            name = sequence.request.terms.service_class
            if name not in self._lengths:
                self._lengths[name] = Lengths()
            self._lengths[name].add(sequence.num_generated)

    def left_of(self, sequence: Sequence) -> int:
        """Tokens that are expected to be computed besides; the last of an answer is not.

        Who goes on in another engine leaves with its first.
        """
        most = max(sequence.max_len - len(sequence.tokens) - 1, 0)
        if sequence.parcel_id:
            return 0
        if is_fixed(sequence):
            return most
        lengths = self._lengths.get(sequence.request.terms.service_class)
        if lengths is None:
            return 0
        now = len(sequence.tokens) - sequence.num_prompt
        part = sequence.sequence_id * GOLDEN % 1
        return min(most, max(lengths.likely(now, part) - now - 1, 0))

    def rows(self, sequence: Sequence, half: int) -> list[tuple[int, int]]:
        """(tokens to come, tokens held) of `sequence` and of siblings that are to start behind its
        prompt, which hold nothing of their own yet.

        The last block is half full in the mean: `half` a block comes free besides.
        """
        held = len(sequence.tokens) - sequence.num_shared + half
        found = [(self.left_of(sequence), held)]
        return found + [(self.left_of(fork), half) for fork in sequence.forks]


class Profile:
    """When rows end, and how many tokens more than now are held just before each end.

    `ends` in order; before the end `i` what goes on holds `_more[i]` more, with a newcomer beside
    it that goes on too `_beside[i]`; up to there at most `_highest[i]`, from there on `_later[i]`.
    """

    def __init__(self, rows: Iterable[tuple[int, int]]) -> None:
        order = sorted(rows)
        self.ends = [left for left, _ in order]
        self._alive, self._freed, freed = len(order), [0], 0
        more: list[int] = []
        highest: list[int] = [0]
        for at, (left, held) in enumerate(order):
            more.append(left * (self._alive - at) - freed)
            highest.append(max(highest[-1], more[-1] + left))
            freed += held
            self._freed.append(freed)
        later = [0]
        for tokens in reversed(more):
            later.append(max(later[-1], tokens))
        self._highest, self._later = highest, later[::-1]

    def most(self, left: int, held: int) -> int:
        """Tokens beyond now, when most are held, with a newcomer of these beside the rows.

        In O(log n) of n rows.
        """
        at = bisect_left(self.ends, left)
        own = left * (self._alive - at + 1) - self._freed[at]
        return max(self._highest[at], own, self._later[at] - held)


def is_fixed(sequence: Sequence) -> bool:
    """Whether its answer is as long as it may be."""
    sampling = sequence.request.sampling
    return not (sequence.stop_ids or sampling.stop or sequence.grammar)
