"""Token-fair between users: whoever has had least, in tokens by weight, catches up next.

The step's budget goes to the user with the least counter, oldest sequence first; its counter grows
with what it takes, so a step may serve several users. Nobody's budget lies idle: a user alone gets
everything. Worked example, equal weights, a budget of 512:

    heavy  counter 4,000, twenty prompts wait      light  counter 3,900, one prompt of 300
    light takes 300 (4,200), heavy the other 212
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence

from headway.admit.queue import QueueOrder
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import Turn, behind
from headway.engine.policy.users import name
from headway.engine.sequence import Sequence


class Fair(Fcfs):
    """The order of arrival within a user, the counters between users."""

    reclaims = True
    queue_order = QueueOrder.SHARES

    def took(self, sequence: Sequence, num_tokens: int) -> None:
        """Its user pays."""
        self.users.charge(sequence, num_tokens)

    def kept(self, sequence: Sequence, num_drafts: int) -> None:
        """Its user pays for the tokens that came, not for guesses."""
        self.users.charge(sequence, num_drafts)

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """The oldest of the user with the least counter, again and again; each firm."""
        queues: dict[str, deque[Sequence]] = {}
        for sequence in [*behind(running), *waiting]:
            queues.setdefault(name(sequence), deque()).append(sequence)
        while queues:
            user = min(queues, key=lambda user: self.users.had(queues[user][0]))
            queue = queues[user]
            yield Turn(queue.popleft(), budget, True)
            if not queue:
                del queues[user]

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Those of the user who has had most, youngest first."""
        return sorted(running, key=lambda s: (-self.users.had(s), -s.sequence_id))

    def may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        """Anybody."""
        return True
