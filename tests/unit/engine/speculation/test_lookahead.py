"""N-grams that a model said behind wrong guesses: found again, never by others, in fixed memory."""

import random
import sys
from array import array

from hypothesis import given
from hypothesis import strategies as st

from guessing import ask
from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.engine.sequence import Sequence
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.lookahead import (
    BYTES_PER_ENTRY,
    FILL,
    NO_TOKEN,
    POOL_MATCH,
    WINDOW,
    Lookahead,
    NGramPool,
)
from headway.perf.model import Prior, StepModel, work_of

ADDED = st.tuples(
    st.integers(0, 3), st.integers(-1, 5), st.integers(0, 5), st.integers(0, 5), st.booleans()
)


def sequence_of(tokens: list[int], sequence_id: int = 1, salt: str = "") -> Sequence:
    """One that may grow for ever."""
    request = Request(sequence_id, list(tokens), SamplingParams(temperature=0))
    request.principal = Principal(cache_salt=salt)
    return Sequence(
        sequence_id, request, 0, num_groups=1, stop_ids=frozenset(), max_len=10**6, seed=0
    )


def step(source: Lookahead, sequence: Sequence, model, most: int) -> int:
    """Proposal, verify with `model` (tokens → the next) and tell; how many guesses were kept."""
    guess = source.propose(sequence, most)
    sampled = [model(sequence.tokens + guess.token_ids[:at]) for at in range(most + 1)]
    kept = next((at for at in range(most) if guess.token_ids[at] != sampled[at]), most)
    sample = Sample(sequence.sequence_id, sampled[: kept + 1], behind=sampled[kept + 1 :])
    sequence.take(sample, 0.0)
    source.observe(sequence, Drafts(guess.token_ids, source.name, guess.match), sample)
    return kept


@given(st.lists(ADDED, max_size=200), st.sampled_from([1, 4, 64, 1024]))
def test_what_is_found_was_added_last_behind_the_same_tokens_of_the_owner(added, size):
    pool, last = NGramPool(size), {}
    for owner, before, token, following, said in added:
        pool.add(owner, before, token, following, said)
        last[owner, before, token] = last[owner, NO_TOKEN, token] = following
    lost = 0
    for owner, before, token in last:
        kind, following = pool.best(owner, 10**12, before, token)
        lost += kind == FILL
        at = before if kind >= POOL_MATCH + 2 else NO_TOKEN
        assert kind == FILL or following == last[owner, at, token]
    assert size < 1024 or lost <= len(last) // 4, "with room for all, few meet in a slot"
    assert pool.best(10**12, 10**13, 1, 1) == (FILL, 0)
    assert pool.num_bytes == BYTES_PER_ENTRY * size


@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=40),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_any_guesses_any_answers_in_the_same_bytes(prompt, most, rng):
    """Whatever the model says, and whoever guessed, as many guesses as are asked, with kinds."""
    source, sequence = Lookahead(256), sequence_of(prompt)
    held = sum(sys.getsizeof(part) for part in vars(source.pool).values())
    for _ in range(30):
        guess = source.propose(sequence, most)
        assert len(guess.token_ids) == most == len(guess.match)
        assert all(0 <= kind < 10 for kind in guess.match)
        drafts = Drafts(guess.token_ids[: rng.randint(0, most)], rng.choice(["lookahead", "draft"]))
        kept = rng.randint(0, len(drafts.token_ids))
        behind = [rng.randrange(300_000) for _ in drafts.token_ids[kept:]][: rng.randint(0, 12)]
        sample = Sample(1, [*drafts.token_ids[:kept], rng.randrange(300_000)], behind=behind)
        sequence.take(sample, 0.0)
        source.observe(sequence, drafts, sample)
        assert 0 < source.expected_tokens < 0.5 * most
    assert sum(sys.getsizeof(part) for part in vars(source.pool).values()) == held
    source.forget(sequence)
    assert not source._by_id


def test_one_token_repeated_a_hundred_thousand_times():
    source, sequence = Lookahead(), sequence_of([7] * 100_000)
    for _ in range(20):
        guess = source.propose(sequence, 8)
    assert guess.token_ids == [7] * 8
    arrays = [part for part in vars(source.pool).values() if isinstance(part, array)]
    assert sum(sys.getsizeof(part) for part in arrays) < source.pool.num_bytes + 1000 < 7 << 20


def test_what_is_known_from_the_text_is_not_what_the_model_said():
    """What it said anew is: another token, or behind tokens of which nothing was known."""
    pool = NGramPool(1024)
    pool.add(1, 5, 6, 7, False)
    pool.add(1, 5, 6, 7, True)
    assert pool.best(1, 0, 5, 6) == (POOL_MATCH + 2, 7)
    pool.add(1, 4, 6, 7, True)
    assert pool.best(1, 0, 4, 6) == (POOL_MATCH + 3, 7) and pool.best(1, 0, 9, 6) == (POOL_MATCH, 7)
    pool.add(1, 5, 6, 8, True)
    assert pool.best(1, 0, 5, 6) == (POOL_MATCH + 3, 8)


def test_what_was_said_behind_a_wrong_guess_is_guessed_when_it_comes_to_that():
    source, sequence = Lookahead(), sequence_of([1, 2, 3])
    guess = source.propose(sequence, 3)
    assert guess.match[0] == FILL, "nothing is known yet"
    drafts = Drafts([40, 50, 60], source.name, guess.match)
    sample = Sample(1, [4], behind=[51, 61, 71])
    sequence.take(sample, 0.0)
    source.observe(sequence, drafts, sample)
    guess = source.propose(sequence, 4)
    assert guess.token_ids[:3] == [51, 61, 71] and guess.match[:3] == (WINDOW,) * 3
    sequence.tokens.append(40)
    guess = source.propose(sequence, 2)
    assert guess.token_ids == [51, 71] and guess.match == (POOL_MATCH + 1, WINDOW), "it moves on"
    sequence.tokens.append(50)
    guess = source.propose(sequence, 2)
    assert (guess.token_ids[0], guess.match[0]) == (61, POOL_MATCH + 3), "behind 40 50 it said 61"
    sequence.tokens += [8, 60]
    guess = source.propose(sequence, 2)
    assert (guess.token_ids[0], guess.match[0]) == (71, POOL_MATCH + 1), "behind 60 alone"


def test_what_stands_in_the_prompt_and_what_came_since():
    source, sequence = Lookahead(), sequence_of([1, 2, 3, 4, 9, 1, 2])
    guess = source.propose(sequence, 3)
    assert guess.token_ids == [3, 4, 9] and guess.match == (POOL_MATCH + 2,) * 3
    sequence.tokens += [5, 6, 1, 2]
    assert source.propose(sequence, 2).token_ids == [5, 6], "the latest counts"


def test_of_the_same_user_what_was_said_and_of_no_other():
    """A prompt is its sequence's own; an answer, and what was said ahead, the user's."""
    source = Lookahead()
    first = sequence_of([1, 2, 3], 1, "anna")
    source.propose(first, 2)
    sample = Sample(1, [4], behind=[21])
    first.take(sample, 0.0)
    source.observe(first, Drafts([20], source.name), sample)
    source.propose(first, 2)
    source.forget(first)
    same = source.propose(sequence_of([9, 3], 2, "anna"), 1)
    assert same.token_ids == [4] and same.match == (POOL_MATCH + 4,)
    assert source.propose(sequence_of([3, 20], 3, "anna"), 1).match == (POOL_MATCH + 7,)
    assert source.propose(sequence_of([1, 2], 4, "anna"), 1).match == (FILL,), "that was a prompt"
    for salt in ("bert", ""):
        assert source.propose(sequence_of([9, 3], 5, salt), 1).match == (FILL,)
        assert source.propose(sequence_of([3, 20], 6, salt), 1).match == (FILL,)


def test_a_model_of_two_tokens_is_known_before_it_has_said_a_thing_twice():
    """A walk through 60 pairs: with windows it takes fewer steps than tokens though none recurs."""
    rng = random.Random(4)
    after = {(a, b): rng.randrange(8) for a in range(8) for b in range(8)}
    with_windows = tokens = 0
    for number in range(20):
        source = Lookahead()
        sequence = sequence_of([rng.randrange(8) for _ in range(8)], number)
        seen = set()
        while (pair := tuple(sequence.tokens[-2:])) not in seen:
            seen.add(pair)
            kept = step(source, sequence, lambda known: after[known[-2], known[-1]], 4)
            with_windows += 1
            tokens += 1 + kept
    assert tokens > 1.2 * with_windows


def test_rows_are_worth_what_they_leave():
    """Where what is said ahead comes later it rises; where it never does it falls."""
    rng = random.Random(3)
    after = {(a, b): rng.randrange(40) for a in range(40) for b in range(40)}
    useful, useless = Lookahead(), Lookahead()
    before = useful.expected_tokens
    for number in range(30):
        one, other = sequence_of([1, 2, 3], number), sequence_of([1, 2, 3], number)
        for _ in range(40):
            step(useful, one, lambda known: after[known[-2], known[-1]], 4)
            step(useless, other, lambda known: rng.randrange(10**6), 4)
    assert useful.expected_tokens > before > 5 * useless.expected_tokens > 0


def test_no_more_is_looked_for_than_may_pay():
    """Rows that cost a share of a token: guesses that are likely ride, windows do not."""
    source, sequence = Lookahead(), sequence_of([1, 2, 3, 4, 1, 2])
    shares = [0.03, 0.2, *[0.5] * 8]

    def kinds(least: float) -> tuple[int, ...]:
        source.begin(shares, least)
        return source.propose(sequence, 8).match

    assert len(kinds(0.0)) == 8
    assert kinds(0.3) == (POOL_MATCH + 2,) * 4, "0.5 0.25 0.125 0.06, half of what pays is slack"
    assert kinds(1.5) == (POOL_MATCH + 2,), "one is scored at any rate"
    sequence.tokens.append(50)
    assert kinds(0.0)[0] == FILL and kinds(1.5) == 0, "nothing is known behind 50"


def num_riding(row_s: float, model) -> float:
    """Guesses a step, of a sequence of 300 tokens, where a step takes 10 ms and so much a row."""
    cost = StepModel(Prior(weights_s=0.01, token_s=row_s, sampled_s=row_s))
    speculation = AdaptiveSpeculator(SpeculationConfig(sources=("lookahead",)), cost)
    sequence, counts = sequence_of([1, 2, 3]), []
    while len(sequence.tokens) < 300:
        sequence.computed = len(sequence.tokens) - 1
        found = ask(speculation, [sequence], work_of([sequence.computed], (0,)), 512, float("inf"))
        drafts = found.get(1, Drafts([]))
        guessed = drafts.token_ids
        counts.append(len(guessed))
        sampled = [model(sequence.tokens + guessed[:at]) for at in range(len(guessed) + 1)]
        kept = next((at for at, one in enumerate(guessed) if one != sampled[at]), len(guessed))
        sample = Sample(1, sampled[: kept + 1], behind=sampled[kept + 1 :])
        sequence.take(sample, 0.0)
        speculation.observe(sequence, drafts, sample)
    return sum(counts) / len(counts)


def test_windows_ride_where_rows_cost_little_and_what_is_said_ahead_comes():
    rng = random.Random(1)
    after = [rng.randrange(2000) for _ in range(2000)]
    assert num_riding(1e-6, lambda known: after[known[-1]]) > 5
    strange = num_riding(3e-3, lambda known: rng.randrange(10**6))
    assert 0 < strange < 0.2, "and but for a try now and then, not where it never comes"
