"""How much each user has had: virtual token counters (Sheng et al. 2024, Fairness in Serving LLMs).

A user's counter grows by what is computed for it, divided by its weight; a generated token costs
`OUTPUT_PRICE` prompt tokens. Who has had least goes first. A user who was away comes back at the
level of the least of those present, less a `credit`: absence earns that much and no more. When
nobody is left everybody has had what they wanted, and all begin anew.

    heavy  has had 90,000, always present; light asks now and then
    light  comes with 1,200 of its own → max(1,200, 90,000 − 8,192) = 81,808: ahead by the credit
"""

from math import isclose

from headway.engine.sequence import Sequence

PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0


class Users:
    """Counters of the users present, those with a sequence waiting or running, and of others.

    `credit` in tokens of a prompt; 0 is the paper's rule.
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

    def arrived(self, sequence: Sequence) -> None:
        """One more sequence of its user is here, and those that wait for its prompt."""
        user, weight = name(sequence), sequence.request.terms.weight
        if user not in self._present:
            level = self.least - self.credit if self._present else 0.0
            self._counters[user] = max(self._counters.get(user, 0.0), level)
            self._weight_present += weight
        else:
            self._weight_present += weight - self._weights[user]
        self._weights[user] = weight
        here = self._present.setdefault(user, set())
        for one in (sequence, *sequence.forks):
            self._num_present += one.sequence_id not in here
            here.add(one.sequence_id)

    def left(self, sequence: Sequence) -> None:
        """One of its sequences is over, if it ever came."""
        user = name(sequence)
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
        """`num_tokens` of `sequence` are computed for its user: more for those after the prompt."""
        price = PROMPT_PRICE if sequence.computed < sequence.num_prompt else OUTPUT_PRICE
        user = name(sequence)
        self._counters[user] += num_tokens * price / self._weights[user]

    def had(self, sequence: Sequence) -> float:
        """The counter of its user."""
        return self._counters[name(sequence)]

    def crowding(self, sequence: Sequence) -> float:
        """How many times as many sequences as the others, by weight, its user has; at least 1.

        Ten users of one weight, nine with two each and one with 90: 90 / 2 = 45 times.
        """
        user = name(sequence)
        own, weight = len(self._present.get(user, ())), self._weights[user]
        others = self._num_present - own
        if not own or not others:
            return 1.0
        return max(1.0, own / weight * (self._weight_present - weight) / others)

    @property
    def num_present(self) -> int:
        """Users who have a sequence here."""
        return len(self._present)

    def weight(self, user: str) -> float:
        """The weight that its last sequence came with."""
        return self._weights[user]

    def share(self, user: str) -> float:
        """Its part of the engine, by weight among the users present."""
        return self._weights[user] / self._weight_present

    @property
    def least(self) -> float:
        """The least counter of those present; 0 when nobody is."""
        return min((self._counters[user] for user in self._present), default=0.0)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that exactly the users of `sequences` are present."""
        here: dict[str, set[int]] = {}
        for sequence in sequences:
            here.setdefault(name(sequence), set()).add(sequence.sequence_id)
        assert here == self._present, "the users present differ from those of the sequences"
        assert self._num_present == sum(map(len, here.values()))
        weight = sum(self._weights[user] for user in here)
        assert isclose(self._weight_present, weight, abs_tol=1e-6)


def name(sequence: Sequence) -> str:
    """Whose sequence it is: the name of the key."""
    return sequence.request.principal.name
