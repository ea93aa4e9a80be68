"""What followed the end of a sequence before: the longest match, the latest, in bounded memory."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.speculation.proposers.ngram import (
    CANDIDATES,
    MAX_MATCH,
    MAX_NEW_TOKENS,
    SEARCHED_MATCH,
    NGramIndex,
)
from headway.engine.speculation.proposers.proposal import Proposal


def places(tokens: list[int], match: int) -> list[int]:
    """Where the last `match` tokens stood before, told by the place behind them."""
    end = tokens[len(tokens) - match :]
    return [at for at in range(match, len(tokens)) if tokens[at - match : at] == end]


def longest(tokens: list[int]) -> int:
    """The longest of up to `SEARCHED_MATCH` last tokens that stood before."""
    lengths = range(1, min(SEARCHED_MATCH, len(tokens) - 1) + 1)
    return max((match for match in lengths if places(tokens, match)), default=0)


def follows(tokens: list[int], place: int, most: int) -> list[int]:
    """What stands at `place`, and behind the end what is guessed there."""
    grown = list(tokens)
    for offset in range(most):
        grown.append(grown[place + offset])
    return grown[len(tokens) :]


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([], Proposal([], 0)),
        ([3], Proposal([], 0)),
        ([3, 4], Proposal([], 0)),
        ([3, 4, 3], Proposal([4, 3, 4], 1)),
        ([3, 3], Proposal([3, 3, 3], 1)),
        ([1, 2, 3, 9, 2, 8, 1, 2], Proposal([3, 9, 2], 2)),
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], Proposal([5, 6, 1], 2)),
        ([9, 1, 2, 3, 4, 8, 1, 2, 5, 6, 9, 1, 2], Proposal([3, 4, 8], 3)),
    ],
)
def test_the_longest_match_and_of_equals_the_latest(tokens, guess):
    assert NGramIndex(tokens).propose(3) == guess


def test_nothing_is_guessed_where_nothing_is_asked():
    assert NGramIndex([3, 4, 3]).propose(0) == Proposal([], 0)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_a_guess_is_what_followed_the_same_tokens(tokens, most):
    guess = NGramIndex(tokens).propose(most)
    assert bool(guess.match) == bool(longest(tokens))
    if guess.match:
        assert len(guess.token_ids) == most
        found = places(tokens, guess.match)
        assert guess.token_ids in [follows(tokens, place, most) for place in found]


@given(st.data(), st.integers(3, 50))
def test_finds_the_longest_where_the_pair_stood_seldom(data, width):
    """With no more places than are compared, the match is the longest, and of those the latest."""
    tokens = data.draw(st.lists(st.integers(0, width), max_size=40))
    guess = NGramIndex(tokens).propose(1)
    if len(tokens) > 1 and len(places(tokens, 2)) <= CANDIDATES:
        assert min(guess.match, SEARCHED_MATCH) == longest(tokens)
        if 0 < guess.match < SEARCHED_MATCH:
            assert guess.token_ids == follows(tokens, places(tokens, guess.match)[-1], 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.randoms(use_true_random=False))
def test_chunk_by_chunk_is_as_all_at_once(tokens, rng):
    """However the tokens come, in a search the guess is that of a fresh index."""
    known: list[int] = []
    grown = NGramIndex(known)
    while len(known) < len(tokens):
        known += tokens[len(known) : len(known) + rng.randint(1, 9)]
        guess, fresh = grown.propose(4), NGramIndex(list(known)).propose(4)
        grown.check_integrity()
        assert bool(guess.match) == bool(fresh.match)
        if guess.match < SEARCHED_MATCH:
            assert guess == fresh


def test_a_copy_is_followed_and_its_length_told():
    """A long match that goes on is kept, though a later place has its last tokens as well."""
    phrase = list(range(8))
    tokens = [50, *phrase, 60, 61, 62, 51, *phrase, 70, 71, 72, 99, 50]
    lookup = NGramIndex(tokens)
    assert lookup.propose(8) == Proposal(phrase, 1)
    matches = []
    for token in phrase[:-1]:
        tokens.append(token)
        matches.append(lookup.propose(2).match)
    assert matches == [2, 3, 4, 5, 6, 7, 8]
    tokens.append(phrase[-1])
    assert lookup.propose(2) == Proposal([60, 61], 9)
    assert NGramIndex(list(tokens)).propose(2) == Proposal([70, 71], 8), (
        "a search takes the latest of 8"
    )


def test_a_copy_that_ends_is_left():
    text = list(range(20))
    tokens = [*text, *text[:12]]
    lookup = NGramIndex(tokens)
    assert lookup.propose(3) == Proposal([12, 13, 14], 12)
    tokens += [12, 13, 3, 4]
    assert lookup.propose(3) == Proposal([5, 6, 7], 2)
    tokens += [1000]
    assert lookup.propose(3) == Proposal([], 0)


def bytes_of(lookup: NGramIndex) -> int:
    return sum(sys.getsizeof(getattr(lookup, name)) for name in ("_pairs", "_latest", "_previous"))


@pytest.mark.parametrize("kind", ["one token", "all different", "words", "a period"])
def test_memory_is_bounded_whatever_the_tokens(kind):
    """A prompt of 100,000 tokens, and then an answer."""
    size, rng = 100_000, random.Random(1)
    tokens = {
        "one token": [5] * size,
        "all different": list(range(size)),
        "words": [min(int(rng.paretovariate(0.7)), 60_000) for _ in range(size)],
        "a period": [place % 37 for place in range(size)],
    }[kind]
    lookup = NGramIndex(tokens)
    for _ in range(-(-size // MAX_NEW_TOKENS) + 1):
        lookup.propose(8)
    lookup.check_integrity()
    for _ in range(100):
        guess = lookup.propose(8)
        tokens.append(guess.token_ids[0] if guess.match else tokens[1000])
    lookup.check_integrity()
    assert bytes_of(lookup) <= 21 * len(tokens) + 1000
    if kind in ("one token", "a period"):
        assert lookup.propose(8).match == MAX_MATCH


def test_one_call_takes_in_a_bounded_chunk():
    """A guess finds what is indexed so far; the rest follows call by call."""
    tokens = [*range(3 * MAX_NEW_TOKENS), 5, 6]
    lookup = NGramIndex(tokens)
    assert lookup.propose(2) == Proposal([7, 8], 2)
    late = [*range(3 * MAX_NEW_TOKENS), 3 * MAX_NEW_TOKENS - 9, 3 * MAX_NEW_TOKENS - 8]
    lookup = NGramIndex(late)
    assert [lookup.propose(1).match for _ in range(3)] == [0, 0, 2]


def test_an_answer_that_outgrows_the_table_is_indexed_anew():
    tokens: list[int] = []
    lookup = NGramIndex(tokens)
    for number in range(5000):
        tokens.append(number)
        lookup.propose(1)
    for _ in range(3):
        lookup.propose(1)
        lookup.check_integrity()
    tokens += [2000, 2001, 2002]
    assert lookup.propose(2) == Proposal([2003, 2004], 3)
    assert bytes_of(lookup) <= 21 * len(tokens) + 1000
