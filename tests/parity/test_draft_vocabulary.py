"""A drafter guesses among a list of tokens: the frequent ones, and those that came lately."""

import random
from dataclasses import replace

import pytest
import torch

from drive import engine_for, finish
from headway.config.drafter import choose_draft_vocabulary, num_learned
from headway.config.options import EngineOptions
from headway.core.errors import UsageError
from headway.core.request import Request, SamplingParams
from headway.planning import plan_settings
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from parity.drafting import Proposals, some_requests

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 1_024
FIRST = SIZE - num_learned(SIZE)
SMALL = 256
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Torch's fp32 sums are in another order in another shape."""


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kernels": "torch"}],
    ids=["native", "int8", "int4", "torch"],
)
def test_its_logits_are_those_of_the_whole_matrix(options: dict[str, object]):
    """Of the first tokens and, after any that came, of the learned ones."""
    engine = engine_for(model_folder(None), max_model_len=64, **options)
    forward = engine.executor.target  # type: ignore[attr-defined]
    listed = DraftVocabulary(forward, SIZE)
    rng = random.Random(2)
    hidden_RH = torch.randn(3, forward.spec.hidden_size).to(forward.dtype)
    exact = engine.executor.kernels.library is not None  # type: ignore[attr-defined]
    for _ in range(4):
        came = [rng.randrange(4096) for _ in range(200)]
        listed.add(came)
        listed.refresh()
        token_ids = listed.token_ids(list(range(SIZE)))
        assert token_ids[:FIRST] == list(range(FIRST)) and len(set(token_ids)) == SIZE
        assert set(came[-60:]) <= set(token_ids)
        whole_RV, found_RL = forward.logits(hidden_RH).clone(), listed.logits(hidden_RH)
        wanted_RL = whole_RV[:, token_ids]
        normed = DraftVocabulary(forward, SIZE, normed=True)
        normed.add(listed.tokens.learned)
        normed.refresh()
        of_normed_RV = forward.model.logits_of(hidden_RH)[:, normed.token_ids(list(range(SIZE)))]
        assert torch.allclose(normed.logits(hidden_RH), of_normed_RV, **CLOSE)
        assert (
            torch.equal(found_RL, wanted_RL)
            if exact
            else torch.allclose(found_RL, wanted_RL, **CLOSE)
        )
        spread_RV = listed.scatter(found_RL, 4100)
        assert torch.equal(spread_RV[:, token_ids], found_RL)
        assert int(spread_RV.isfinite().sum()) == 3 * SIZE


def test_the_token_that_came_longest_ago_goes():
    engine = engine_for(model_folder(None), max_model_len=64)
    listed = DraftVocabulary(engine.executor.target, SIZE)  # type: ignore[attr-defined]
    count = SIZE - FIRST
    listed.add([2000, 5, -7, 4095, 99_999])
    listed.add(range(3000, 3000 + count - 2))
    listed.add([2000, 2500])
    learned = set(listed.token_ids(list(range(FIRST, SIZE))))
    assert learned == {2000, 2500, *range(3000, 3000 + count - 2)}


@pytest.mark.parametrize(
    "options",
    [
        {"draft_model": "headway-draft", "speculative_method": "draft"},
        {"draft_model": "headway-draft", "speculative_method": "draft", "quantization": "int4"},
        {"speculative_method": "medusa"},
        {"speculative_method": "medusa", "kernels": "torch", "dtype": "float32"},
    ],
    ids=["draft", "int4", "medusa", "torch"],
)
def test_the_tokens_are_the_same(options: dict[str, object]):
    """Also where parameters name tokens that are not in the list; some guesses are learned ones."""
    requests = some_requests(random.Random(8), 10)
    edits = {"repetition_penalty": 1.2, "logit_bias": {3900: 3.0, 7: -2.0}}
    requests += [
        Request(
            100 + number,
            [5, 3901, 3900, 8],
            SamplingParams(temperature=number % 2, max_tokens=12, ignore_eos=True, **edits),
        )
        for number in range(4)
    ]
    engine = engine_for(model_folder(None), max_model_len=256, draft_vocab_size=SMALL, **options)
    proposals = engine.scheduler.drafts.speculator = Proposals()
    answers = finish(engine, requests)
    alone = {k: v for k, v in options.items() if k in ("quantization", "kernels", "dtype")}
    plain = finish(engine_for(model_folder(None), max_model_len=256, **alone), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in plain.items()
    }
    guessed = [token_id for _, guesses in proposals.told for token_id in guesses]
    assert proposals.num_kept and len(guessed) > 100
    assert any(token_id >= SMALL for token_id in guessed), "none was learned"
    came = {t for r in requests for t in r.prompt_token_ids}
    came |= {t for a in answers.values() for t in a.token_ids}
    assert {t for t in guessed if t >= SMALL} <= came


def test_how_many_tokens_are_listed():
    spec = read_model_spec(model_folder(None))
    for size, listed in ((151_936, 32_768), (49_152, 16_384), (32_000, 10_624), (4_096, 0)):
        assert choose_draft_vocabulary(None, spec, size)[0] == listed
    assert choose_draft_vocabulary(0, spec, 151_936)[0] == 0
    assert choose_draft_vocabulary(8_192, spec, 4_096)[0] == 0
    untied = replace(spec, tied=False)
    assert choose_draft_vocabulary(None, untied, 151_936)[0] == 0
    for given, model, own, words in (
        (1_024, untied, False, "not the embedding"),
        (1_024, spec, True, "matrices of their own"),
        (1_000, spec, False, "not a multiple of 64"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_draft_vocabulary(given, model, 4_096, own_output=own)


def test_it_is_an_option():
    def planned(**options: object):
        return plan_settings(model_folder(None), EngineOptions(device="cpu", **options))[1]

    found = planned(speculative_method="draft", draft_model="headway-draft", draft_vocab_size=SIZE)
    assert found.speculation.draft_vocab_size == SIZE
    whole = planned(speculative_method="draft", draft_model="headway-draft").speculation
    assert whole.draft_vocab_size == 0 and found.speculation.draft_share < whole.draft_share
    with pytest.raises(UsageError, match="no model or head drafts"):
        planned(speculative_method="ngram", draft_vocab_size=SIZE)
