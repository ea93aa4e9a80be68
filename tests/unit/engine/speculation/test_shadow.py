"""Guesses that nobody verified are scored as verification would have scored them."""

import random

import pytest

from headway.engine.speculation.acceptance import Acceptance, Own
from headway.engine.speculation.lookup import Guess, Lookup
from headway.engine.speculation.shadow import Shadow


class Heard(Acceptance):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, int, int, int]] = []

    def observe(self, source, match, num_guessed, num_kept, own, beside=""):
        self.heard.append((source, match, num_guessed, num_kept))
        super().observe(source, match, num_guessed, num_kept, own, beside)


def answer() -> tuple[list[int], list[int]]:
    """A prompt, and an answer that repeats some of it."""
    rng = random.Random(5)
    prompt = [rng.randrange(40) for _ in range(200)]
    written: list[int] = []
    while len(written) < 150:
        begin = rng.randrange(180)
        written += [*prompt[begin : begin + rng.randint(1, 15)], rng.randrange(40)]
    return prompt, written


def verified(most: int) -> list[tuple[str, int, int, int]]:
    """What verification of every guess tells, one step after the other."""
    prompt, written = answer()
    tokens = list(prompt)
    acceptance, own, at = Heard(), Own(), 0
    while at < len(written):
        guess = Lookup(tokens).guess(most)
        kept = 0
        while guess.token_ids[kept : kept + 1] == written[at + kept : at + kept + 1] != []:
            kept += 1
        if guess.match:
            acceptance.observe("lookup", guess.match, most, kept, own)
        tokens += written[at : at + kept + 1]
        at += kept + 1
    return acceptance.heard


@pytest.mark.parametrize("most", [1, 4])
def test_scores_are_those_of_verification_though_one_token_comes_a_step(most):
    prompt, written = answer()
    tokens = list(prompt)
    acceptance, own, shadow = Heard(), Own(), Shadow("lookup")
    for token in written:
        shadow.settle(tokens, acceptance, own)
        shadow.remember(tokens, Lookup(tokens).guess(most))
        tokens.append(token)
    expected = verified(most)[: len(acceptance.heard)]
    assert len(expected) > 20 and {kept for *_, kept in expected} == {*range(most + 1)}
    assert acceptance.heard == expected


def test_one_guess_at_a_time_until_it_is_decided():
    acceptance, own, shadow = Heard(), Own(), Shadow("suffixes")
    tokens = [1, 2]
    shadow.settle(tokens, acceptance, own)
    shadow.remember(tokens, Guess([3, 4, 5], 2))
    tokens += [3]
    shadow.settle(tokens, acceptance, own)
    assert acceptance.heard == []
    shadow.remember(tokens, Guess([9, 9], 1))
    tokens += [4, 7]
    shadow.settle(tokens, acceptance, own)
    assert acceptance.heard == [("suffixes", 2, 3, 2)]
    shadow.settle(tokens, acceptance, own)
    shadow.remember(tokens, Guess([], 0))
    tokens += [8]
    shadow.settle(tokens, acceptance, own)
    assert len(acceptance.heard) == 1
    shadow.remember(tokens, Guess([5], 1))
    tokens += [5]
    shadow.settle(tokens, acceptance, own)
    assert acceptance.heard[1:] == [("suffixes", 1, 1, 1)]
    shadow.remember(tokens, Guess([6], 1))
    tokens += [6]
    shadow.settle(tokens, acceptance, own)
    assert len(acceptance.heard) == 2, "6 would have come with the verification of 5"
    shadow.remember(tokens, Guess([6], 1))
    tokens += [7]
    shadow.settle(tokens, acceptance, own)
    assert acceptance.heard[2:] == [("suffixes", 1, 1, 0)]


@pytest.mark.parametrize(
    ("came", "heard"),
    [([], []), ([3], [(1, 1)]), ([3, 4], [(2, 2)]), ([3, 4, 5], [(3, 3)]), ([3, 7], [(3, 1)])],
)
def test_what_the_end_of_the_sequence_leaves_open_is_not_held_against_it(came, heard):
    acceptance, own, shadow = Heard(), Own(), Shadow("lookup")
    shadow.remember([1, 2], Guess([3, 4, 5], 2))
    shadow.close([1, 2, *came], acceptance, own)
    assert [(n, kept) for _, _, n, kept in acceptance.heard] == heard
    shadow.close([1, 2, *came, 9], acceptance, own)
    assert len(acceptance.heard) == len(heard)


def test_a_request_that_begins_to_copy_is_seen_though_nothing_is_verified():
    rng = random.Random(3)
    prompt = [rng.randrange(30) for _ in range(300)]
    tokens = list(prompt)
    lookup, acceptance, own, shadow = Lookup(tokens), Acceptance(), Own(), Shadow("lookup")

    def step(token: int) -> float:
        guess = lookup.guess(8)
        shadow.settle(tokens, acceptance, own)
        shadow.remember(tokens, guess)
        tokens.append(token)
        return sum(acceptance.chances("lookup", guess.match, 8, own)) if guess.match else 0.0

    for _ in range(100):
        strange = step(rng.randrange(30))
    assert strange < 0.5
    copied = [step(token) for token in prompt[40:60]]
    assert max(copied[:8]) > 1 and copied[-1] > 4
