"""Tokens that come several at a time, as guesses bring them, are shown as one after another."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import Request, SamplingParams, SequenceUpdate, TokenLogprobs
from headway.frontend.answer import OutputProcessor, SequenceDelta
from headway.frontend.text import OutputParserSpec, Tokenizer
from headway.frontend.text.output_parser import ReasoningMarkers
from headway.frontend.text.tools import BY_NAME
from headway.spec.embedded import model_folder

TEXT = "It is noon in Rome. It is noon in Oslo."
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call> and more'
THOUGHT = "<think>\nWhere is Rome?\n</think>\n\nIn Italy, of course."
SPECS = {
    "text": None,
    "call": OutputParserSpec(
        format=BY_NAME["hermes"], offered=frozenset({"get_time"}), single=True
    ),
    "thought": OutputParserSpec(reasoning=ReasoningMarkers("<think>", "</think>")),
}
TEXTS = {"text": TEXT, "call": CALL, "thought": THOUGHT}
cuts = st.lists(st.integers(1, 80), max_size=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_folder(None))


def updates(ids: list[int], at: list[int]) -> list[SequenceUpdate]:
    """The tokens in updates that begin at `at`; the first and the last say what comes once."""
    borders = sorted({each for each in at if each < len(ids)} | {0, len(ids)})
    found = []
    for begin, end in pairwise(borders):
        logprobs = [TokenLogprobs(t, -0.1 * n, 1) for n, t in enumerate(ids[begin:end], begin)]
        found.append(SequenceUpdate(1, 0, ids[begin:end], logprobs=logprobs))
        found[-1].num_drafts, found[-1].num_kept_drafts = end - begin, end - begin - 1
    found[0].num_cached_tokens, found[0].first_scheduled_s = 7, 1.5
    found[-1].finish_reason = "length"
    return found


def shown(
    tokenizer: Tokenizer, spec: OutputParserSpec | None, at: list[int], text: str, **sampling: Any
) -> list[SequenceDelta]:
    """What a user sees of `text` where it comes in pieces that begin at `at`."""
    ids = tokenizer.encode(text)
    request = Request(1, [1], SamplingParams(max_tokens=len(ids), **sampling))
    answer = OutputProcessor(request, tokenizer, spec)
    return [delta for each in updates(ids, at) for delta, _ in answer.push_all(each)]


def told(deltas: list[SequenceDelta]) -> list[Any]:
    """What of it must not depend on the pieces: each token with its part, and the end."""
    tokens = [
        (token_id, entry.logprob)
        for delta in deltas
        for token_id, entry in zip(delta.token_ids, delta.logprobs or [], strict=True)
    ]
    last = deltas[-1]
    cached = sum(delta.num_cached_tokens for delta in deltas)
    return [
        "".join(delta.text for delta in deltas),
        tokens,
        [type(part).__name__ for delta in deltas for part in delta.parts or ()],
        (last.finish_reason, last.stop_reason, cached),
    ]


@given(cuts, st.sampled_from(["noon in", "Oslo", ". It", "never"]), st.booleans())
def test_a_stop_string_ends_a_burst(
    tokenizer: Tokenizer, at: list[int], stop: str, include: bool
) -> None:
    """What was guessed behind it is neither counted nor shown."""
    how = {"stop": [stop], "include_stop_str_in_output": include, "logprobs": 0}
    one_by_one = list(range(99))
    found = told(shown(tokenizer, None, at, TEXT, **how))
    assert found == told(shown(tokenizer, None, one_by_one, TEXT, **how))
    assert (found[-1][1] == stop) == (stop != "never")


@pytest.mark.parametrize("kind", ["call", "thought"])
@given(cuts)
def test_parts_of_a_burst_are_told_apart_by_token(
    tokenizer: Tokenizer, kind: str, at: list[int]
) -> None:
    """A call that ends inside a burst ends the answer; thoughts and text have their own tokens."""
    one_by_one = shown(tokenizer, SPECS[kind], list(range(99)), TEXTS[kind], logprobs=0)
    found = shown(tokenizer, SPECS[kind], at, TEXTS[kind], logprobs=0)
    assert told(found) == told(one_by_one)
    assert [d.token_ids for d in found] == [d.token_ids for d in one_by_one]
    assert (found[-1].finish_reason == "tool_calls") == (kind == "call")


@given(cuts)
def test_plain_text_takes_a_burst_whole(tokenizer: Tokenizer, at: list[int]) -> None:
    """One chunk for what came in one step."""
    found = shown(tokenizer, None, at, TEXT)
    ids = tokenizer.encode(TEXT)
    assert [d.token_ids for d in found] == [each.token_ids for each in updates(ids, at)]
    assert "".join(delta.text for delta in found) == TEXT


@given(cuts)
def test_guesses_are_told_as_far_as_their_tokens_are(tokenizer: Tokenizer, at: list[int]) -> None:
    """Of a burst that a stop string cuts, what was kept behind it does not count as kept."""
    for how in ({}, {"stop": ["Oslo"]}, {"stop": ["noon"]}):
        deltas = shown(tokenizer, None, at, TEXT, **how)
        kept = sum(delta.num_kept_drafts for delta in deltas)
        assert kept <= sum(delta.num_drafts for delta in deltas)
        assert kept <= sum(len(delta.token_ids) for delta in deltas)
