"""Tokens served to each user: virtual token counters (Sheng et al. 2024, Fairness in Serving LLMs).

A user's counter grows by the tokens computed for it, divided by its weight; a generated token
counts as `OUTPUT_TOKEN_COST` prompt tokens. The lowest counter goes first. A returning user starts
at the lowest counter of those present, less a `credit`: absence earns that much and no more. When
the last user leaves all counters are cleared.

    heavy  counter 90,000, always present; light sends a request now and then
    light  returns with 1,200 → max(1,200, 90,000 − 8,192) = 81,808: ahead by the credit
"""

from math import isclose

from headway.engine.sequence import Sequence

PROMPT_TOKEN_COST, OUTPUT_TOKEN_COST = 1.0, 2.0


class Users:
    """Counters of users; a user is present with a sequence waiting or running.

    `credit` is in prompt tokens; 0 is the paper's rule.
    """

    __slots__ = (
        *("_counters", "_num_present", "_present", "_weight_present", "_weights", "credit"),
    )

    def __init__(self, credit: float = 0.0) -> None:
        self.credit = credit
        self._counters: dict[str, float] = {}
        self._present: dict[str, set[int]] = {}
        self._weights: dict[str, float] = {}
        self._num_present, self._weight_present = 0, 0.0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to its user, and the forks that wait for its prompt."""
        user, weight = user_of(sequence), sequence.request.terms.weight
        if user not in self._present:
            level = self.min_counter - self.credit if self._present else 0.0
            self._counters[user] = max(self._counters.get(user, 0.0), level)
            self._weight_present += weight
        else:
            self._weight_present += weight - self._weights[user]
        self._weights[user] = weight
        here = self._present.setdefault(user, set())
        for one in (sequence, *sequence.forks):
            self._num_present += one.sequence_id not in here
            here.add(one.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its user; one that was never added changes nothing."""
        user = user_of(sequence)
        here = self._present.get(user, set())
        if sequence.sequence_id not in here:
            return
        here.remove(sequence.sequence_id)
        self._num_present -= 1
        if not here:
            del self._present[user]
            self._weight_present -= self._weights[user]
        if not self._present:
            self._counters.clear()
            self._weight_present = 0.0

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge its user for `num_tokens` of `sequence`; generated tokens cost more."""
        cost = PROMPT_TOKEN_COST if sequence.computed < sequence.num_prompt else OUTPUT_TOKEN_COST
        user = user_of(sequence)
        self._counters[user] += num_tokens * cost / self._weights[user]

    def counter(self, sequence: Sequence) -> float:
        """Return the counter of its user."""
        return self._counters[user_of(sequence)]

    def crowding_factor(self, sequence: Sequence) -> float:
        """Return how many times as many sequences by weight its user has as others; at least 1.

        Ten users of one weight, nine with two each and one with 90: 90 / 2 = 45 times.
        """
        user = user_of(sequence)
        own, weight = len(self._present.get(user, ())), self._weights[user]
        others = self._num_present - own
        if not own or not others:
            return 1.0
        return max(1.0, own / weight * (self._weight_present - weight) / others)

    @property
    def num_present(self) -> int:
        """Return number of users with a sequence waiting or running."""
        return len(self._present)

    def weight(self, user: str) -> float:
        """Return the weight of the user's newest sequence."""
        return self._weights[user]

    def share(self, user: str) -> float:
        """Return the user's share of the engine, by weight among the users present."""
        return self._weights[user] / self._weight_present

    @property
    def min_counter(self) -> float:
        """Lowest counter of the users present; 0 without any."""
        return min((self._counters[user] for user in self._present), default=0.0)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that exactly the users of `sequences` are present."""
        here: dict[str, set[int]] = {}
        for sequence in sequences:
            here.setdefault(user_of(sequence), set()).add(sequence.sequence_id)
        assert here == self._present, "the users present differ from those of the sequences"
        assert self._num_present == sum(map(len, here.values()))
        weight = sum(self._weights[user] for user in here)
        assert isclose(self._weight_present, weight, abs_tol=1e-6)


def user_of(sequence: Sequence) -> str:
    """Return the user of `sequence`: the name of its key."""
    return sequence.request.principal.name
