"""By priority, then by arrival; a smaller number goes first, as in vLLM.

waiting   priority 0: d     running   priority 0: a    priority 5: c
d lacks a row or blocks: c goes back to the queue for it, a never does
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence

from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import Turn, behind
from headway.engine.sequence import Sequence


def priority(sequence: Sequence) -> int:
    """The request's own; smaller is more urgent."""
    return sequence.request.terms.priority


def rank(sequence: Sequence) -> tuple[int, int]:
    """What is smaller goes first: the request's priority, then who came first."""
    return priority(sequence), sequence.sequence_id


class Priority(Fcfs):
    """Nothing is remembered: the rank of a sequence does not change."""

    reclaims = True

    def decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """All by rank, but the last where one of a better priority waits: it may need the place."""
        rows = sorted(rows, key=rank)
        if rows and waiting and min(map(priority, waiting)) < priority(rows[-1]):
            rows.pop()
        return rows

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """Whoever is behind, running or waiting, by rank."""
        for sequence in sorted([*behind(running), *waiting], key=rank):
            yield Turn(sequence, budget, True)

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """The last rank first."""
        return sorted(running, key=rank, reverse=True)

    def weaker(self, newcomer: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of a lower priority, the last rank first; its own priority keeps its place."""
        return [s for s in self.victims(running) if priority(s) > priority(newcomer)]

    def may_take(self, taker: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Where nobody of a better priority waits: that one would take the place back at once.

        And where both are copied to host memory and back, neither would ever compute a token.
        """
        return all(priority(s) >= priority(taker) for s in waiting)

    def may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        """Anybody whose priority is no better."""
        return priority(sequence) >= priority(taker)
