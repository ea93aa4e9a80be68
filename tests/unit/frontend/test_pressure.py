"""Steps that wait for a stream go together, and show what they would have shown one by one."""

import asyncio
import random

import pytest

from headway.core.request import Request, SamplingParams, SequenceUpdate, TokenLogprobs
from headway.frontend.answer import (
    MAX_BACKLOG_STEPS,
    OutputProcessor,
    SequenceDelta,
    Stream,
    merge_backlog,
)
from headway.frontend.text import Tokenizer
from headway.spec.embedded import model_folder

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は夜 🚀 noon."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_folder(None))


def steps(ids: list[int], index: int = 0, reason: str = "length") -> list[SequenceUpdate]:
    """A token a step; what comes once comes with the first, the end with the last."""
    found = [SequenceUpdate(1, index, [token_id]) for token_id in ids]
    found[0].num_cached_tokens, found[0].first_scheduled_s = 7, 1.5
    found[-1].finish_reason = reason
    return found


def take(
    tokenizer: Tokenizer, updates: list[SequenceUpdate], sizes: list[int], **sampling: object
) -> list[SequenceDelta]:
    """What a stream gives where so many updates wait each time it is asked."""
    request = Request(1, [1], SamplingParams(max_tokens=len(updates), **sampling))  # type: ignore[arg-type]
    stream = Stream(OutputProcessor(request, tokenizer), lambda index: None)

    async def run() -> list[SequenceDelta]:
        deltas, left = [], list(updates)
        for size in sizes + [1] * len(updates):
            for update in left[:size]:
                stream.put(update)
            if left[:size]:
                deltas += await stream.next()
            del left[:size]
        return deltas

    return asyncio.run(run())


def text_of(deltas: list[SequenceDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_text_however_many_wait(tokenizer: Tokenizer, seed: int):
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT)
    sizes = [rng.choice([1, 2, MAX_BACKLOG_STEPS, 9, 40]) for _ in range(rng.randint(0, 12))]
    deltas = take(tokenizer, steps(ids), sizes)
    assert text_of(deltas) == TEXT
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert (deltas[0].num_cached_tokens, deltas[0].first_scheduled_s) == (7, 1.5)
    assert all(delta.first_scheduled_s is None for delta in deltas[1:])


def test_steps_go_together_from_so_many_on(tokenizer: Tokenizer):
    ids = tokenizer.encode(3 * TEXT)[: 3 * MAX_BACKLOG_STEPS]
    waiting = [MAX_BACKLOG_STEPS - 1, MAX_BACKLOG_STEPS, len(ids)]
    counts = [len(delta.token_ids) for delta in take(tokenizer, steps(ids), waiting)]
    assert counts == [1] * (MAX_BACKLOG_STEPS - 1) + [
        MAX_BACKLOG_STEPS,
        len(ids) - 2 * MAX_BACKLOG_STEPS + 1,
    ]


def test_each_sequence_of_a_request_by_itself(tokenizer: Tokenizer):
    """Two of a request, step by step in turn: two deltas, each with its own end."""
    first, second = tokenizer.encode("It is noon in Rome."), tokenizer.encode("No, in Oslo.")
    second += first[len(second) :]
    turns = zip(steps(first), steps(second, 1, "stop"), strict=True)
    updates = [update for turn in turns for update in turn]
    deltas = take(tokenizer, updates, [len(updates)], n=2)
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "length"), (1, "stop")]
    assert text_of(deltas) == "It is noon in Rome."
    assert text_of(deltas, 1).startswith("No, in Oslo.")


def test_the_end_token_of_those_that_go_together_is_hidden(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("It is noon in Rome."), 5]
    updates = steps(ids, reason="stop")
    updates[-1].stop_token_id = 5
    (delta,) = take(tokenizer, updates, [len(ids)], stop_token_ids=[5])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (
        "It is noon in Rome.",
        "stop",
        5,
    )


@pytest.mark.parametrize("sampling", [{"stop": ["in"]}, {"logprobs": 0}], ids=str)
def test_who_asks_of_single_tokens_gets_them(tokenizer: Tokenizer, sampling: dict):
    """A stop string ends with the token that completes it, and log-probabilities are by token."""
    ids = tokenizer.encode("It is noon in Rome.")
    updates = steps(ids)
    for update in updates:
        update.logprobs = [TokenLogprobs(update.token_ids[0], -1.0, 1)]
    deltas = take(tokenizer, updates, [len(ids)], **sampling)
    assert all(len(delta.token_ids) == 1 for delta in deltas)
    assert text_of(deltas) == ("It is noon " if "stop" in sampling else "It is noon in Rome.")


def test_guesses_and_forced_tokens_stay_apart():
    """Their counts belong to their own tokens."""
    updates = steps([1, 2, 3, 4, 5, 6, 7, 8])
    updates[2].num_drafts, updates[4].num_forced = 1, 1
    assert [each.token_ids for each in merge_backlog(updates, 1)] == [
        [1, 2],
        [3],
        [4],
        [5],
        [6, 7, 8],
    ]
    assert updates[0].token_ids == [1], "what arrived is not changed"
