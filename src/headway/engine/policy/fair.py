"""Token-fair between users: the user with the fewest tokens by weight is served next.

The step's budget goes to the user with the lowest counter, oldest sequence first; the counter grows
with the tokens taken, so a step may serve several users. A user alone gets the whole budget.
Worked example, equal weights, a budget of 512:

    heavy  counter 4,000, twenty prompts wait      light  counter 3,900, one prompt of 300
    light takes 300 (4,200), heavy the other 212
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence

from headway.admit.queue import QueueOrder
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import PrefillTurn, list_prefills
from headway.engine.policy.users import user_of
from headway.engine.sequence import Sequence


class Fair(Fcfs):
    """The policy of counters between users, and of arrival order within a user."""

    reclaims = True
    queue_order = QueueOrder.SHARES

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge its user."""
        self.users.charge(sequence, num_tokens)

    def on_drafts_accepted(self, sequence: Sequence, num_drafts: int) -> None:
        """Charge its user for accepted draft tokens; rejected ones are free."""
        self.users.charge(sequence, num_drafts)

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Yield the oldest sequence of the user with the lowest counter, again and again."""
        queues: dict[str, deque[Sequence]] = {}
        for sequence in [*list_prefills(running), *waiting]:
            queues.setdefault(user_of(sequence), deque()).append(sequence)
        while queues:
            user = min(queues, key=lambda user: self.users.counter(queues[user][0]))
            queue = queues[user]
            yield PrefillTurn(queue.popleft(), budget, True)
            if not queue:
                del queues[user]

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return those of the user with the highest counter first, youngest first."""
        return sorted(running, key=lambda s: (-self.users.counter(s), -s.sequence_id))

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Return True."""
        return True
