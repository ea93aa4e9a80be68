"""Proposals are scored by the tokens that came, whether or not a step verified them."""

import random

import pytest

from headway.engine.speculation.acceptance import Acceptance, PendingProposal, SequenceOdds
from headway.engine.speculation.proposers.ngram import NGramIndex
from headway.engine.speculation.proposers.proposal import Proposal


class Heard(Acceptance):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, int]] = []

    def observe(self, source, match, num_drafts, num_accepted, odds, context=""):
        self.heard.append((num_drafts, num_accepted))
        super().observe(source, match, num_drafts, num_accepted, odds, context)


@pytest.mark.parametrize(
    ("came", "heard"),
    [
        *(([], (0, 0)), ([3], (1, 1)), ([3, 4], (2, 2)), ([3, 4, 5], (3, 3))),
        *(([3, 7], (2, 1)), ([7], (1, 0)), ([7, 4, 5, 6], (3, 0)), ([3, 4, 5, 9, 9], (3, 3))),
    ],
)
def test_a_proposal_is_scored_as_far_as_the_tokens_tell(came, heard):
    acceptance, odds = Heard(), SequenceOdds()
    pending = PendingProposal(2, Proposal([3, 4, 5], 2), "")
    acceptance.score("lookup", pending, [1, 2, *came], odds)
    assert acceptance.heard == [heard]


def test_of_what_did_not_come_yet_nothing_is_learned():
    acceptance, odds = Acceptance(), SequenceOdds()
    before = acceptance.probabilities("lookup", 2, 3, odds)
    pending = PendingProposal(2, Proposal([3, 4, 5], 2), "")
    acceptance.score("lookup", pending, [1, 2], odds)
    assert acceptance.probabilities("lookup", 2, 3, odds) == before


def answer() -> tuple[list[int], list[int]]:
    """A prompt, and an answer that repeats some of it."""
    rng = random.Random(5)
    prompt = [rng.randrange(40) for _ in range(200)]
    written: list[int] = []
    while len(written) < 600:
        begin = rng.randrange(180)
        written += [*prompt[begin : begin + rng.randint(1, 15)], rng.randrange(40)]
    return prompt, written


def learned(*, verifies: bool) -> Acceptance:
    """After an answer of which each proposal is verified, or none: one token comes a step."""
    (prompt, written), acceptance = answer(), Acceptance()
    tokens, at = list(prompt), 0
    index, odds = NGramIndex(tokens), SequenceOdds()
    while at < len(written):
        proposal = index.propose(4)
        pending = PendingProposal(len(tokens), proposal, "")
        count = 1
        while verifies and proposal.token_ids[:count] == written[at : at + count] and count < 5:
            count += 1
        tokens += written[at : at + count]
        at += count
        acceptance.score("lookup", pending, tokens, odds)
    return acceptance


def test_what_nobody_verified_teaches_what_verification_does():
    verified, unverified = learned(verifies=True), learned(verifies=False)
    for match in range(1, 9):
        rates = [each.rates("lookup", match)[match - 1] for each in (verified, unverified)]
        assert rates[0] == pytest.approx(rates[1], abs=0.2)


def test_a_request_that_begins_to_copy_is_seen_though_nothing_is_verified():
    rng = random.Random(3)
    prompt = [rng.randrange(30) for _ in range(300)]
    tokens = list(prompt)
    index, acceptance, odds = NGramIndex(tokens), Acceptance(), SequenceOdds()

    def step(token: int) -> float:
        proposal = index.propose(8)
        tokens.append(token)
        pending = PendingProposal(len(tokens) - 1, proposal, "")
        expected = sum(acceptance.probabilities("lookup", proposal.match, 8, odds))
        acceptance.score("lookup", pending, tokens, odds)
        return expected if proposal.match else 0.0

    for _ in range(100):
        strange = step(rng.randrange(30))
    assert strange < 0.5
    copied = [step(token) for token in prompt[40:60]]
    assert max(copied[:8]) > 1 and copied[-1] > 4
