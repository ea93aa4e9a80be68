"""Proposers of draft tokens.

ngram       what followed the end of a sequence where it stood in it before
suffix      the same in past answers, by cache salt
grammar     what a grammar forces
lookahead   what the model said behind draft tokens that were not accepted
draft       what the runtime's drafter said behind the last step: draft model, Medusa, EAGLE
"""

from headway.config.speculation_config import SpeculationConfig
from headway.engine.speculation.proposers.grammar import GrammarProposer
from headway.engine.speculation.proposers.lookahead import Lookahead
from headway.engine.speculation.proposers.ngram import NGramProposer
from headway.engine.speculation.proposers.proposal import Proposer
from headway.engine.speculation.proposers.suffix import SuffixProposer

FREE_PROPOSERS: tuple[type[Proposer], ...] = (
    NGramProposer,
    SuffixProposer,
    GrammarProposer,
    Lookahead,
)
"""Those that take microseconds; the runtime's drafter is asked a step before."""


def make_free_proposers(config: SpeculationConfig) -> list[Proposer]:
    """Return those that the settings name."""
    return [make() for make in FREE_PROPOSERS if make.name in config.sources]
