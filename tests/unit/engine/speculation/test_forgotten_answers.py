"""What was said to somebody who wants it forgotten is guessed for nobody, and erased."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cached_world import CachedWorld
from fakes import make_settings
from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample
from headway.core.principal import KEY_BYTES, Principal
from headway.core.request import Request, SamplingParams
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.proposers.lookahead import Lookahead
from headway.engine.speculation.proposers.proposal import NO_PROPOSAL
from headway.engine.speculation.proposers.suffix import (
    BYTES_PER_TOKEN,
    END,
    PastAnswers,
    SuffixProposer,
)

ANNA = Principal("anna", cache_salt="a", cache_owner="anna")
BERT = Principal("bert", cache_salt="b", cache_owner="bert")


def key_of(principal: Principal) -> bytes:
    return principal.block_owner()[:KEY_BYTES]


def sequence_of(principal: Principal, tokens: list[int], sequence_id: int = 1) -> Sequence:
    request = Request(sequence_id, tokens, SamplingParams(temperature=0), principal)
    return Sequence(
        sequence_id, request, 0, num_groups=1, stop_ids=frozenset(), max_len=10**6, seed=0
    )


def answered(source: SuffixProposer, principal: Principal, answer: list[int], **marks) -> None:
    """Somebody asked, and has that answer."""
    sequence = sequence_of(principal, [1, 2])
    sequence.take(Sample(1, answer), 0.0)
    sequence.state = FINISHED
    for name, value in marks.items():
        setattr(sequence, name, value)
    source.forget(sequence)


def guessed(source: SuffixProposer, principal: Principal, tokens: list[int]) -> list[int]:
    return source.propose(sequence_of(principal, tokens), 4).token_ids


def held(past: PastAnswers) -> set[int]:
    return set(past._tokens) - {0, END}


@pytest.mark.parametrize("taken_in", [False, True])
def test_past_answers_of_a_key_are_erased_and_others_stay(taken_in: bool):
    source = SuffixProposer()
    answered(source, ANNA, [11, 12, 13, 14])
    answered(source, ANNA.salted("chat-7"), [21, 22, 23, 24])
    answered(source, BERT, [31, 32, 33, 34])
    if taken_in:
        assert guessed(source, ANNA, [11, 12]) == [13, 14]
    source.forget_owner(key_of(ANNA))
    source.past.check_integrity()
    assert guessed(source, ANNA, [11, 12]) == []
    assert guessed(source, ANNA.salted("chat-7"), [21, 22]) == []
    assert guessed(source, BERT, [31, 32]) == [33, 34]
    assert held(source.past) == {1, 2, 31, 32, 33, 34}


def test_one_conversation_is_forgotten_and_the_rest_of_the_key_stays():
    source = SuffixProposer()
    answered(source, ANNA, [11, 12, 13, 14])
    answered(source, ANNA.salted("chat-7"), [21, 22, 23, 24])
    source.forget_owner(ANNA.salted("chat-7").block_owner())
    assert guessed(source, ANNA.salted("chat-7"), [21, 22]) == []
    assert guessed(source, ANNA, [11, 12]) == [13, 14]


def test_an_answer_that_was_running_then_is_not_kept():
    source = SuffixProposer()
    answered(source, ANNA, [11, 12, 13, 14], is_forgotten=True)
    assert guessed(source, ANNA, [11, 12]) == []


def test_who_shares_his_answers_forgets_his_own_alone():
    """With `--share-prefix-cache` all keys have one salt."""
    anna, bert = (Principal(name, cache_owner=name) for name in ("anna", "bert"))
    source = SuffixProposer()
    answered(source, anna, [11, 12, 13, 14])
    answered(source, bert, [31, 32, 33, 34])
    assert guessed(source, bert, [11, 12]) == [13, 14]
    source.forget_owner(key_of(anna))
    assert guessed(source, bert, [11, 12]) == []
    assert guessed(source, anna, [31, 32]) == [33, 34]


AUTHORS = ["a", "ab", "b"]
DONE = st.tuples(st.sampled_from(AUTHORS), st.lists(st.integers(1, 5), max_size=30), st.booleans())


@given(st.lists(DONE, max_size=40), st.sampled_from([400, 2000, 20_000]))
def test_a_ring_that_answers_leave_and_are_forgotten_in_is_whole(done, max_bytes):
    """In any order, also where it is full; nothing is guessed of who was forgotten since."""
    past = PastAnswers(max_bytes)
    for author, answer, forgets in done:
        if forgets:
            past.forget_owner(author.encode())
            gone = [each for each in AUTHORS if each.startswith(author)]
            for name in gone:
                for first in range(1, 6):
                    for second in range(1, 6):
                        assert past.propose(name, [first, second], 1).match == 0
        else:
            past.add(author, [], answer, author.encode())
        past.check_integrity()
    assert past.size * BYTES_PER_TOKEN <= max_bytes


def test_n_grams_of_all_go_and_who_runs_on_leaves_none():
    """The model says 5 6 behind a wrong guess, before and after Anna's is forgotten."""
    source = Lookahead(1024)
    source.begin([1.0] * 10, 0.0)
    anna = sequence_of(ANNA, [1, 2, 3])

    def say() -> None:
        source.propose(anna, 2)
        anna.take(Sample(1, [4]), 0.0)
        source.observe(anna, Drafts([5, 6], "lookahead", ()), Sample(1, [4], behind=[6, 7]))

    def found(sequence_id: int) -> list[int]:
        return source.propose(sequence_of(ANNA, [9, 8, 5], sequence_id), 2).token_ids

    say()
    assert found(2) == [6, 7]
    source.forget_owner(key_of(ANNA))
    assert found(3) != [6, 7]
    say()
    assert found(4) != [6, 7]
    source.forget_owner(key_of(BERT))
    source.forget(anna)
    assert source.propose(sequence_of(BERT, [9, 8, 5], 5), 0) == NO_PROPOSAL


def test_the_engine_forgets_past_answers_with_the_blocks():
    """The answer is guessed again, after a forgetting it is not."""
    settings = make_settings(num_blocks=(60,), budget=64, prefix_cache="cost")
    speculation = SpeculationConfig(sources=("suffixes",), num_speculative_tokens=4)
    talk = CachedWorld(replace(settings, speculation=speculation))
    past = talk.engine.scheduler.drafts.speculator.proposers[0]
    prompt = list(range(12))
    answer, _ = talk.answer_of(prompt, max_tokens=12, salt="a")
    assert guessed(past, Principal(cache_salt="a"), answer[:4]) == answer[4:8]
    talk.engine.forget(Principal(cache_salt="a").block_owner())
    talk.engine.check_integrity()
    assert guessed(past, Principal(cache_salt="a"), answer[:4]) == []
    assert talk.answer_of(prompt, max_tokens=12, salt="a")[1] == 0
