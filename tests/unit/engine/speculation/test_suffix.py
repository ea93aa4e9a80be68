"""What followed the same tokens in past answers: of the same salt alone, and in fixed memory."""

import random
import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.speculation.proposers.ngram import MAX_MATCH
from headway.engine.speculation.proposers.proposal import Proposal
from headway.engine.speculation.proposers.suffix import (
    BYTES_PER_TOKEN,
    MAX_ANSWER_TOKENS,
    PROMPT_TAIL,
    PastAnswers,
)

NOTHING = Proposal([], 0)
TOKENS = st.lists(st.integers(0, 4), max_size=20)


def test_what_followed_in_an_answer_of_the_same_salt():
    past = PastAnswers()
    past.add("anna", [10, 11], [1, 2, 3, 4, 5])
    assert past.propose("anna", [7, 1, 2], 8) == Proposal([3, 4, 5], 2)
    assert past.propose("anna", [7, 1, 2], 1) == Proposal([3], 2)
    assert past.propose("anna", [7, 10, 11], 2) == Proposal([1, 2], 2), "the prompt's end counts"
    assert past.propose("bert", [7, 1, 2], 8) == NOTHING
    assert past.propose("", [7, 1, 2], 8) == NOTHING
    assert past.propose("anna", [7, 4, 5], 8) == NOTHING, "nothing came behind its end"
    assert past.propose("anna", [2], 8) == NOTHING
    assert past.propose("anna", [1, 2], 0) == NOTHING


def test_the_longest_match_and_of_equals_the_latest():
    past = PastAnswers()
    past.add("", [], [1, 2, 3, 4, 50, 51])
    past.add("", [], [9, 2, 3, 4, 60, 61])
    past.add("", [], [9, 8, 3, 4, 70, 71])
    assert past.propose("", [1, 2, 3, 4], 1) == Proposal([50], 4)
    assert past.propose("", [2, 3, 4], 1) == Proposal([60], 3)
    assert past.propose("", [3, 4], 1) == Proposal([70], 2)
    past.add("", [], [1, 2, 3, 4, 80, 81])
    assert past.propose("", [0, 1, 2, 3, 4], 1) == Proposal([80], 4)


def test_no_other_salt_is_guessed_though_they_meet_in_a_slot():
    """More salts than slots of the index, and each has an answer to the same question."""
    past = PastAnswers(1024 * BYTES_PER_TOKEN)
    for number in range(200):
        past.add(f"salt {number}", [], [1, 2, 3, 1000 + number])
    for number in range(200):
        assert past.propose(f"salt {number}", [1, 2, 3], 1) in (
            Proposal([1000 + number], 3),
            NOTHING,
        )
        assert past.propose(f"other {number}", [1, 2, 3], 1) == NOTHING
        assert past.propose(f"other {number}", [1, 2], 1) == NOTHING


def test_an_answer_is_never_guessed_into_the_next():
    past = PastAnswers()
    past.add("", [], [1, 2, 3])
    past.add("", [], [4, 5, 6])
    assert past.propose("", [1, 2], 8) == Proposal([3], 2)
    assert past.propose("", [3, 4, 5], 8) == Proposal([6], 2), "the match does not begin before it"


def test_a_long_match_is_counted_up_to_a_limit():
    past = PastAnswers()
    past.add("", [], list(range(100)))
    assert past.propose("", list(range(20)), 2) == Proposal([20, 21], 20)
    assert past.propose("", list(range(90)), 2) == Proposal([90, 91], MAX_MATCH)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), TOKENS, TOKENS), max_size=8),
    TOKENS,
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_a_guess_stood_behind_the_match_in_an_answer_of_the_salt(answers, tokens, most):
    """Also in a ring so small that old answers are overwritten in their middle."""
    past = PastAnswers(64 * BYTES_PER_TOKEN)
    for salt, tail, answer in answers:
        past.add(salt, tail, answer)
        past.check_integrity()
    guess = past.propose("a", tokens, most)
    texts = [[*tail[-PROMPT_TAIL:], *answer] for salt, tail, answer in answers if salt == "a"]
    if not guess.match:
        assert guess == NOTHING
        return
    assert 1 <= len(guess.token_ids) <= most
    found = tokens[len(tokens) - guess.match :] + guess.token_ids
    assert any(text[at : at + len(found)] == found for text in texts for at in range(len(text))), (
        texts,
        found,
    )


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6), TOKENS)
@settings(max_examples=30)
def test_two_tokens_that_stood_in_the_last_answer_are_found(answers, tokens):
    """With room for all, whoever asks with two tokens of it gets a match of at least those."""
    past = PastAnswers()
    for tail, answer in answers:
        past.add("", tail, answer)
    tail, answer = answers[-1]
    text = [*tail[-PROMPT_TAIL:], *answer]
    if answer:
        for at in range(2, len(text)):
            guess = past.propose("", [*tokens, *text[at - 2 : at]], 3)
            assert guess.match >= 2 and guess.token_ids


def num_bytes(past: PastAnswers) -> int:
    return sum(sys.getsizeof(part) for part in vars(past).values() if isinstance(part, array))


@pytest.mark.parametrize("max_bytes", [3000, 100_000, 1_000_000])
def test_memory_is_bounded_and_the_oldest_goes_first(max_bytes):
    past, rng = PastAnswers(max_bytes), random.Random(2)
    assert past.size * BYTES_PER_TOKEN <= max_bytes < 2 * past.size * BYTES_PER_TOKEN
    first = [rng.randrange(50_000) for _ in range(20)]
    past.add("a", [], first)
    assert past.propose("a", first[:5], 1).match == 5
    given_in = 0
    while given_in < 3 * past.size:
        answer = [rng.randrange(50_000) for _ in range(rng.randint(1, 60))]
        past.add(rng.choice("ab"), answer[:3], answer)
        given_in += len(answer)
    past.check_integrity()
    assert past.propose("a", first[:5], 1) == NOTHING
    assert num_bytes(past) <= max_bytes + past.size + 1000, "an array may have room to grow"
    assert past.num_bytes <= max_bytes


def test_an_answer_that_is_repeated_stays():
    past, rng = PastAnswers(50_000), random.Random(3)
    template = [rng.randrange(1000, 2000) for _ in range(30)]
    for _ in range(10 * past.size // 100):
        past.add("a", [], [rng.randrange(1000) for _ in range(70)])
        past.add("a", [], template)
    assert past.propose("a", template[:9], 3) == Proposal(template[9:12], 9)


def test_what_is_longer_than_the_ring_or_the_limit_is_kept_from_its_beginning():
    past = PastAnswers(24_000)
    past.add("", list(range(50_000, 50_100)), list(range(5000)))
    past.check_integrity()
    assert past.propose("", [50_097, 50_098, 50_099], 2) == Proposal([0, 1], 3)
    assert past.propose("", [50_000, 50_001, 50_002], 2) == NOTHING, (
        "of the prompt its end alone is kept"
    )
    past = PastAnswers()
    past.add("", [], list(range(2 * MAX_ANSWER_TOKENS)))
    assert past.propose("", [MAX_ANSWER_TOKENS - 3, MAX_ANSWER_TOKENS - 2], 8).token_ids == [
        MAX_ANSWER_TOKENS - 1
    ]
    assert past.propose("", [MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS + 1], 8) == NOTHING


@pytest.mark.parametrize("answer", [[], [5], [5, 6]])
def test_an_answer_that_is_too_short_takes_no_room(answer):
    past = PastAnswers()
    before = past.num_bytes
    past.add("", [], answer)
    past.check_integrity()
    assert past.num_bytes == before


def test_no_room_at_all():
    past = PastAnswers(0)
    past.add("", [1, 2], [3, 4])
    past.check_integrity()
    assert past.propose("", [1, 2], 3) == NOTHING


def test_one_token_repeated():
    past = PastAnswers()
    for _ in range(50):
        past.add("", [5] * 4, [5] * 200)
    past.check_integrity()
    guess = past.propose("", [5] * 300, 8)
    assert guess.match == MAX_MATCH and set(guess.token_ids) == {5}
