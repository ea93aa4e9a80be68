"""The drafting model guesses what it would say itself, wherever its keys and values come from."""

import random

import pytest

from drive import engine_for, finish
from headway.core.embedded import model_folder
from headway.core.errors import UsageError
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from parity.drafting import COUNT, Proposals, some_requests
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def drafting_engine(**options: object) -> tuple[Engine, Proposals]:
    """headway-tiny with headway-draft, which is asked for guesses in every step."""
    engine = engine_for(
        model_folder(None), draft_model="headway-draft", speculate="draft", **options
    )
    proposals = Proposals()
    engine.scheduler.drafts.speculator = proposals
    return engine, proposals


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 256},
        {"max_model_len": 256, "quantization": "int4", "kv_cache_dtype": "int8"},
        {"num_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 4},
        {"max_model_len": 256, "kernels": "torch", "dtype": "float32"},
    ],
    ids=["native", "int4", "little room", "torch"],
)
def test_it_guesses_what_it_would_say(options: dict[str, object]):
    """After shared, found, copied and preempted blocks, and after wrong guesses of its own."""
    engine, proposals = drafting_engine(**options)
    requests = some_requests(random.Random(3), 14)
    answers = finish(engine, requests)
    alone = {k: v for k, v in options.items() if k != "num_blocks"}
    plain = finish(engine_for(model_folder(None), **alone), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in plain.items()
    }
    assert proposals.num_kept > 20 and len(proposals.told) > 50
    chosen = random.Random(1).sample(proposals.told, 40)
    drafter = engine_for(model_folder("headway-draft"), **alone)
    again = [
        Request(i, known, SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
        for i, (known, _) in enumerate(chosen)
    ]
    said = finish(drafter, again)
    for number, (_, guesses) in enumerate(chosen):
        assert said[number, 0].token_ids[: len(guesses)] == guesses


def test_a_drafter_that_fails_is_left_out(caplog: pytest.LogCaptureFixture):
    engine, proposals = drafting_engine(max_model_len=256)
    requests = some_requests(random.Random(4), 4)
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)

    def fail(batch: object) -> None:
        raise RuntimeError("told to fail")

    engine.executor.drafter.forward = fail  # type: ignore[attr-defined]
    answers = finish(engine, requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in wanted.items()
    }
    assert engine.executor.drafter is None  # type: ignore[attr-defined]
    assert "go on without it" in caplog.text and not proposals.num_guessed


def test_an_overflow_of_the_drafter_is_that_sequences_alone():
    """Its guesses are wrong; the others' are kept, the drafter goes on, the tokens are the same."""
    engine, proposals = drafting_engine(max_model_len=256)
    poison = 3999
    requests = some_requests(random.Random(4), 6)
    requests.append(Request(99, [5, poison, 7, 8], SamplingParams(temperature=0, max_tokens=12)))
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    drafter = engine.executor.drafter  # type: ignore[attr-defined]
    drafter.forward.model.embedding.weight.data[poison] = float("inf")
    answers = finish(engine, requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in wanted.items()
    }
    assert engine.executor.drafter is drafter  # type: ignore[attr-defined]
    assert proposals.num_kept > 5
    for layer in drafter.forward.kv:
        assert bool(layer.k.isfinite().all()) and bool(layer.v.isfinite().all())


def test_a_model_that_cannot_draft_is_refused(tmp_path_factory: pytest.TempPathFactory):
    other = save(
        tiny_model("llama", vocab_size=61, num_hidden_layers=1), tmp_path_factory.mktemp("other")
    )
    for folder, draft, words in (
        (model_folder("headway-draft"), "headway-tiny", "would only slow"),
        (model_folder(None), "headway-tiny", "would only slow"),
        (model_folder(None), str(other), "tokenizer.json"),
    ):
        with pytest.raises(UsageError, match=words):
            engine_for(folder, draft_model=draft, speculate="draft")
    for options, words in (
        ({"speculate": "draft"}, "needs a drafting model"),
        ({"speculate": "lookup", "draft_model": "headway-draft"}, "does not use it"),
        ({"speculate": "prophecy"}, "not a source"),
    ):
        with pytest.raises(UsageError, match=words):
            engine_for(model_folder(None), **options)
