"""The chances of guesses: ordered by length and depth, learned from all and from one request."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.speculation.acceptance import (
    DRAFT_PRIOR,
    LENGTHS,
    MATCH_PRIOR,
    Acceptance,
    SequenceOdds,
)

OBSERVED = st.lists(
    st.tuples(st.sampled_from(["lookup", "draft"]), st.integers(0, 40), st.integers(0, 9)),
    max_size=60,
)


def learned(observed: list[tuple[str, int, int]], own: SequenceOdds) -> Acceptance:
    acceptance = Acceptance()
    for source, match, num_kept in observed:
        acceptance.observe(source, match, max(num_kept, 5), num_kept, own)
    return acceptance


def feed(
    acceptance: Acceptance, share: float, times: int, own: SequenceOdds | None, seed: int = 1
) -> None:
    """`times` verifications of 8 guesses, each of them kept with that share."""
    rng = random.Random(seed)
    for _ in range(times):
        kept = next((at for at in range(8) if rng.random() >= share), 8)
        acceptance.probabilities("lookup", 4, 8, own or SequenceOdds())
        acceptance.observe("lookup", 4, 8, kept, own or SequenceOdds())


def test_before_anything_was_seen_they_are_the_priors():
    acceptance = Acceptance()
    for length, share in zip(LENGTHS, MATCH_PRIOR, strict=True):
        assert acceptance.probabilities("lookup", length, 1, SequenceOdds()) == pytest.approx(
            [share]
        )
    both = acceptance.probabilities("draft", 0, 2, SequenceOdds())
    assert both == pytest.approx([DRAFT_PRIOR, DRAFT_PRIOR**2])
    assert acceptance.probabilities("lookup", 3, 0, SequenceOdds()) == []


@given(OBSERVED, st.booleans())
def test_longer_is_never_lower_and_a_guess_is_never_likelier_than_the_one_before(observed, has_own):
    own = SequenceOdds()
    acceptance = learned(observed, own)
    asking = own if has_own else SequenceOdds()
    by_length = [acceptance.probabilities("lookup", match, 8, asking) for match in range(1, 45)]
    for chances in [*by_length, acceptance.probabilities("draft", 0, 20, asking)]:
        assert all(0 < chance < 1 for chance in chances)
        assert all(deeper < chance for chance, deeper in pairwise(chances))
    for shorter, longer in pairwise(by_length):
        assert all(low <= high + 1e-12 for low, high in zip(shorter, longer, strict=True))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_share_that_is_kept_is_learned_for_new_requests(share):
    acceptance = Acceptance()
    feed(acceptance, share, 400, None)
    first, second = acceptance.probabilities("lookup", 4, 2, SequenceOdds())
    assert first == pytest.approx(share, abs=0.15)
    assert second == pytest.approx(share**2, abs=0.2)


def test_each_source_has_its_own():
    acceptance = Acceptance()
    before = acceptance.probabilities("suffixes", 4, 3, SequenceOdds())
    drafted = acceptance.probabilities("lookup", 0, 3, SequenceOdds())
    feed(acceptance, 0.0, 50, None)
    assert acceptance.probabilities("lookup", 4, 1, SequenceOdds())[0] < 0.2
    assert acceptance.probabilities("suffixes", 4, 3, SequenceOdds()) == before
    assert acceptance.probabilities("lookup", 0, 3, SequenceOdds()) == drafted


def test_a_guess_kept_tells_of_longer_matches():
    """Behind 1 token, with 3 guesses kept and the next lost, lengths 1 to 4 have been seen."""
    acceptance = Acceptance()
    fresh = [
        acceptance.probabilities("lookup", match, 1, SequenceOdds())[0] for match in (1, 2, 3, 4, 5)
    ]
    for _ in range(5):
        acceptance.observe("lookup", 1, 8, 3, SequenceOdds())
    now = [
        acceptance.probabilities("lookup", match, 1, SequenceOdds())[0] for match in (1, 2, 3, 5)
    ]
    assert now[0] > fresh[0] and now[1] > fresh[1] and now[2] > fresh[2]
    assert now[3] >= now[2]
    along = acceptance.probabilities("lookup", 1, 3, SequenceOdds())
    assert along == pytest.approx([now[0], now[0] * now[1], now[0] * now[1] * now[2]])


def test_depths_that_nobody_saw_do_not_make_the_first_guess_look_better():
    """One guess at a time is asked, and one in six is kept: so the first is, and the second."""
    acceptance = Acceptance()
    for number in range(60):
        acceptance.observe("draft", 0, 1, int(number % 6 == 0), SequenceOdds())
    first, second = acceptance.probabilities("draft", 0, 2, SequenceOdds())
    assert 0.12 < first < 0.22 and second < 0.3 * first


def test_a_depth_that_was_seen_often_has_a_share_of_its_own():
    """Most first guesses are wrong, and behind a right one all are right."""
    acceptance = Acceptance()
    for number in range(200):
        acceptance.observe("draft", 0, 4, 4 * (number % 3 == 0), SequenceOdds())
    first, second = acceptance.probabilities("draft", 0, 2, SequenceOdds())
    assert first == pytest.approx(1 / 3, abs=0.06) and second > 0.9 * first


def test_nothing_is_learned_behind_the_first_wrong_guess_or_from_none():
    acceptance = Acceptance()
    acceptance.observe("lookup", 1, 8, 0, SequenceOdds())
    assert acceptance.probabilities("lookup", 2, 1, SequenceOdds()) == Acceptance().probabilities(
        "lookup", 2, 1, SequenceOdds()
    )
    own = SequenceOdds()
    acceptance.observe("lookup", 2, 0, 0, own)
    assert own.factor("lookup") == 1
    assert acceptance.probabilities("lookup", 2, 1, SequenceOdds()) == Acceptance().probabilities(
        "lookup", 2, 1, SequenceOdds()
    )


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.95), (0.95, 0.05)])
def test_a_request_that_changes_is_followed_within_20_steps(before, after):
    """A request that begins to copy, or ends: the chance of its next guess."""
    acceptance, own = Acceptance(), SequenceOdds()
    feed(acceptance, before, 100, own)
    assert abs(acceptance.probabilities("lookup", 4, 1, own)[0] - before) < 0.15
    feed(acceptance, after, 20, own, seed=2)
    now = acceptance.probabilities("lookup", 4, 1, own)[0]
    assert abs(now - after) < abs(now - before)


def test_one_request_is_told_from_the_others():
    """Among requests that keep nothing, one that copies: five steps show it."""
    acceptance = Acceptance()
    copier, other = SequenceOdds(), SequenceOdds()
    for _ in range(40):
        acceptance.observe("lookup", 4, 8, 0, other)
    fresh = acceptance.probabilities("lookup", 4, 1, SequenceOdds())[0]
    for _ in range(5):
        acceptance.observe("lookup", 4, 8, 8, copier)
        for _ in range(7):
            acceptance.observe("lookup", 4, 8, 0, other)
    assert acceptance.probabilities("lookup", 4, 1, copier)[0] > 0.5
    assert acceptance.probabilities("lookup", 4, 1, other)[0] < 0.15
    assert acceptance.probabilities("lookup", 4, 1, SequenceOdds())[0] < fresh + 0.3


@pytest.mark.parametrize("num_kept", [0, 8])
def test_no_share_becomes_certain(num_kept):
    acceptance, own = Acceptance(), SequenceOdds()
    for _ in range(3000):
        acceptance.observe("lookup", 4, 8, num_kept, own)
    for asking in (own, SequenceOdds()):
        assert 0.0001 < acceptance.probabilities("lookup", 4, 1, asking)[0] < 0.9999


@given(OBSERVED)
def test_what_is_as_expected_moves_no_request(observed):
    own = SequenceOdds()
    for source, kept, lost in observed:
        own.observe(source, kept, kept, lost, lost)
    assert own.factor("lookup") == pytest.approx(1)
    own.observe("lookup", 3, 1, 0, 2)
    assert own.factor("lookup") > 1 and own.factor("suffixes") == 1
