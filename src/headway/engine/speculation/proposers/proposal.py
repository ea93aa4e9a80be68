"""Interface of a proposer: it proposes next tokens, and informs about their probability."""

from typing import NamedTuple, Protocol

from headway.core.plan import Sample
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import Drafts, Match

MIXER = 40503
"""Odd number near 2¹⁶ / 1.618: spreads pairs of tokens over a table."""


class Proposal(NamedTuple):
    """Tokens that may come next; `match` as in `Drafts`."""

    token_ids: list[int]
    match: Match


NO_PROPOSAL = Proposal([], 0)


class Proposer(Protocol):
    """Proposes draft tokens; `name` is its source in `/stats` and metrics."""

    name: str

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Return up to `most` tokens that may follow `sequence`."""
        ...

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Learn from a sample of `sequence`, which has its tokens already.

        `drafts` of any proposer were verified, or none.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that ended or was preempted."""
        ...

    def forget_owner(self, owner: bytes) -> None:
        """Stop proposing tokens of `owner` (`Principal.block_owner`), or of names that begin with
        it, to other sequences."""
        ...
