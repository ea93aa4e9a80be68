"""The drafting model guesses what it would say itself, wherever its keys and values come from."""

import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from drive import engine_for, finish, greedy
from headway.core.errors import UsageError
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.engine.engine import Engine
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.proposers.draft import OFF
from headway.perf.model import Prior, StepModel
from headway.runtime.drafter import DraftRequest
from headway.spec.embedded import model_folder
from parity.drafting import COUNT, Foreknowing, Proposals, some_requests
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second, whatever it does."""
INT4 = {"quantization": "int4", "quantization_group": 64}
"""A drafter has one format, an engine of its own would be measured."""


def drafting_engine(**options: object) -> tuple[Engine, Proposals]:
    """headway-tiny with headway-draft, which is asked for guesses in every step."""
    engine = engine_for(
        model_folder(None), draft_model="headway-draft", speculative_method="draft", **options
    )
    proposals = Proposals()
    engine.scheduler.drafts.speculator = proposals
    return engine, proposals


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 256},
        {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6},
        {"max_model_len": 256, **INT4, "kv_cache_dtype": "int8"},
        {"max_model_len": 256, "kv_cache_dtype": "int4"},
        {"num_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 4},
        {"max_model_len": 256, "kernels": "torch", "dtype": "float32"},
    ],
    ids=["native", "short blocks", "int4", "int4 KV", "little room", "torch"],
)
def test_it_guesses_what_it_would_say(options: dict[str, object]):
    """After shared, found, copied and preempted blocks, and after wrong guesses of its own."""
    engine, proposals = drafting_engine(**options)
    requests = some_requests(random.Random(3), 14, kernels=options.get("kernels"))
    answers = finish(engine, requests)
    alone = {k: v for k, v in options.items() if k != "num_blocks"}
    plain = finish(engine_for(model_folder(None), **alone), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in plain.items()
    }
    assert proposals.num_kept > 20 and len(proposals.told) > 50
    chosen = random.Random(1).sample(proposals.told, 40)
    if alone.get("kv_cache_dtype") == "int4":  # the drafter's own are as computed
        alone |= {"kv_cache_dtype": "auto", "block_size": 64}
    drafter = engine_for(model_folder("headway-draft"), **alone)
    again = [
        Request(i, known, SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
        for i, (known, _) in enumerate(chosen)
    ]
    said = finish(drafter, again)
    for number, (_, guesses) in enumerate(chosen):
        assert said[number, 0].token_ids[: len(guesses)] == guesses


def test_what_others_guessed_takes_the_place_of_its_own():
    """Where other tokens were verified and came, it forgets what it computed for its own."""
    engine, _ = drafting_engine(max_model_len=256)
    requests = some_requests(random.Random(3), 14)
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    others = Foreknowing({key: answer.token_ids for key, answer in wanted.items()})
    engine.scheduler.drafts.speculator = others
    assert finish(engine, requests) == wanted
    assert others.num_kept > 100 and len(others.told) > 80
    drafter = engine_for(model_folder("headway-draft"), max_model_len=256)
    greedily = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    again = [Request(i, known, greedily) for i, (known, _) in enumerate(others.told)]
    said = finish(drafter, again)
    for number, (_, guesses) in enumerate(others.told):
        assert said[number, 0].token_ids[: len(guesses)] == guesses


def test_a_drafter_that_fails_is_asked_again_for_a_while(caplog: pytest.LogCaptureFixture):
    """Requests go on; nobody plans for it until it is asked again; records say why; it comes back,
    and where it fails again and again it is off for good."""
    engine, _ = drafting_engine(max_model_len=256)
    speculation = AdaptiveSpeculator(engine.settings.speculation, StepModel(GUESSES_PAY))
    speculation.backoff = NoBackoff()
    engine.scheduler.drafts.speculator = speculation
    requests = [greedy(number, [5 + number, 6, 7], 200) for number in range(2)]
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    drafter, calls = engine.executor.drafter, []  # type: ignore[attr-defined]
    propose = drafter.propose

    def fail(*args: object) -> dict[int, list[int]]:
        calls.append(engine.scheduler._step - 1)
        if len(calls) in (2, 4, 6, 8):
            raise RuntimeError("told to fail")
        return dict(propose(*args))

    drafter.propose = fail
    records = []
    step = engine.step

    def keep() -> tuple[list[SequenceUpdate], StepRecord]:
        updates, record = step()
        records.append(record)
        return updates, record

    engine.step = keep  # type: ignore[method-assign]
    answers = finish(engine, requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in wanted.items()
    }
    gaps = [after - before for before, after in pairwise(calls)]
    assert gaps[:6] == [1, 10, 1, 20, 1, 40], "a step takes a second there"
    assert len(calls) == 8, "after the fourth failure it is not asked any more"
    said = [record.draft_failure for record in records]
    assert said[calls[0]] == "" and "asked again after 10 s" in said[calls[1]]
    assert said[calls[2]] == "" and said[-1] == f"RuntimeError: told to fail; {OFF}"
    assert caplog.text.count("the drafter failed (") == 4
    good = {calls[at] for at in (0, 2, 4, 6)}
    assert {record.step for record in records if record.num_proposed} <= good
    assert records[calls[0]].num_proposed > 0 and records[calls[2]].num_proposed > 0
    assert engine.executor.drafter is drafter  # type: ignore[attr-defined]


def test_garbage_of_the_drafter_changes_nothing():
    """Ids that are no tokens are no guesses; tokens that never come are thrown away."""
    engine, proposals = drafting_engine(max_model_len=256)
    requests, rng = some_requests(random.Random(4), 4), random.Random(5)
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    garbage = [[-1], [4096], [5, 2**40], [7, -(2**63), 8], [3] * 500, [1, 2, 3], []]
    propose = engine.executor.drafter.propose  # type: ignore[attr-defined]

    def lie(asked: list[DraftRequest], hidden_RH: object) -> dict[int, list[int]]:
        propose(asked, hidden_RH)
        return {each.sequence.new.sequence_id: rng.choice(garbage) for each in asked}

    engine.executor.drafter.propose = lie  # type: ignore[attr-defined]
    answers = finish(engine, requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in wanted.items()
    }
    assert proposals.num_guessed > 100


def test_a_sequence_that_leaves_between_guess_and_verification_leaves_nothing():
    """Aborted with its guesses made, at each step in turn; the others' tokens are the same."""
    requests = some_requests(random.Random(6), 4)
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    engine, proposals = drafting_engine(max_model_len=256)
    for step in range(1, 12):
        victim = Request(1000 + step, [9, 8, 7, 6] * step, SamplingParams(max_tokens=50, n=2))

        def leave(at: int, last: int = step, request_id: int = victim.request_id) -> None:
            if at == last:
                assert any(
                    sequence_id in proposals._next for sequence_id in engine.scheduler._by_id
                )
                engine.abort(request_id, 1)
                engine.check_integrity()
                engine.abort(request_id)
                engine.check_integrity()

        again = [replace(each, request_id=each.request_id + 100 * step) for each in requests]
        answers = finish(engine, [*again, victim], leave)
        for (request_id, index), answer in wanted.items():
            assert answers[request_id + 100 * step, index].token_ids == answer.token_ids
    assert not proposals._next and not engine.kv.num_used and proposals.num_kept > 50


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
            engine_for(folder, draft_model=draft, speculative_method="draft")
    for options, words in (
        ({"speculative_method": "draft"}, "needs a drafting model"),
        ({"speculative_method": "ngram", "draft_model": "headway-draft"}, "does not use it"),
        ({"speculative_method": "prophecy"}, "not a source"),
    ):
        with pytest.raises(UsageError, match=words):
            engine_for(model_folder(None), **options)
