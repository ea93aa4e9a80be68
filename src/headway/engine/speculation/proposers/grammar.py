"""Grammar proposer: the tokens of the only text that a grammar allows."""

from headway.core.plan import Sample
from headway.engine.sequence import Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.proposal import NO_PROPOSAL, Proposal


class GrammarProposer:
    """Proposes the tokens that a grammar forces."""

    name = "forced"

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        if sequence.grammar is None:
            return NO_PROPOSAL
        return Proposal(sequence.grammar.forced()[:most], 0)

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def forget_owner(self, owner: bytes) -> None:
        pass
