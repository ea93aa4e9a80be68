"""By priority, then by arrival; a smaller number goes first, as in vLLM.

waiting   priority 0: d     running   priority 0: a    priority 5: c
d lacks a slot or blocks: c is preempted for it, a never is
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence

from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import PrefillTurn, list_prefills
from headway.engine.sequence import Sequence


def priority(sequence: Sequence) -> int:
    """Return the priority of its request; smaller is more urgent."""
    return sequence.request.terms.priority


def rank(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key: priority, then arrival."""
    return priority(sequence), sequence.sequence_id


class Priority(Fcfs):
    """The policy of fixed ranks: it keeps no state of a sequence."""

    reclaims = True

    def select_decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """Return all by rank, without the last where a better priority waits for its slot."""
        rows = sorted(rows, key=rank)
        if rows and waiting and min(map(priority, waiting)) < priority(rows[-1]):
            rows.pop()
        return rows

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Yield running and waiting sequences by rank; each blocks those behind it."""
        for sequence in sorted([*list_prefills(running), *waiting], key=rank):
            yield PrefillTurn(sequence, budget, True)

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return the last rank first."""
        return sorted(running, key=rank, reverse=True)

    def preemptible_for(self, candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return those of a lower priority, the last rank first."""
        return [s for s in self.victims(running) if priority(s) > priority(candidate)]

    def may_reclaim(self, claimant: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Return whether no better priority waits: it would preempt `claimant` at once.

        With both copied to host memory and back, neither would ever compute a token.
        """
        return all(priority(s) >= priority(claimant) for s in waiting)

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Return whether its priority is no better."""
        return priority(sequence) >= priority(claimant)
