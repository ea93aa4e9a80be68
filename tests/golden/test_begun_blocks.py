"""Answers behind a block that others left half filled are those of who computes all of it.

Random conversations of several turns, in each format of KV: a turn may be asked twice (two go on
from one block), sampled twice, aborted, preempted, or guessed ahead. In int4 such a block is not
rounded yet, and what is copied are its exact numbers.
"""

import random
from pathlib import Path

import pytest

from drive import Answer, Answers, engine_for, take
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.perf.model import Prior, StepModel
from parity.tiny import TWO_LAYERS, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 21,
}
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4"},
    "int8/int4": {"kv_cache_dtype": "int8/int4"},
    "int4/int8": {"kv_cache_dtype": "int4/int8"},
    "int4, guessed": {"kv_cache_dtype": "int4", "speculative_method": "ngram"},
    "float32, guessed": {"dtype": "float32", "speculative_method": "ngram"},
}
PAYS = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)


@pytest.fixture(scope="module", params=["full", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", **TWO_LAYERS)
    if request.param == "window":
        model = tiny_model("qwen3", **TWO_LAYERS | WINDOWS)
    return save(model, tmp_path_factory.mktemp("begun"))


def made(folder: Path, kind: str, **more: object) -> Engine:
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "max_model_len": 400}
    engine = engine_for(folder, **{**sizes, **KINDS[kind], **more})
    if "speculative_method" in KINDS[kind]:
        speculation = AdaptiveSpeculator(engine.settings.speculation, StepModel(PAYS))
        speculation.backoff = NoBackoff()
        engine.scheduler.drafts.speculator = speculation
    return engine


def run(engine: Engine, requests: list[Request], rng: random.Random | None) -> Answers:
    """Their answers; with `rng` some of the running are preempted on the way."""
    answers: Answers = {}
    for request in requests:
        engine.add(request)
        answers |= {(request.request_id, index): Answer() for index in range(request.sampling.n)}
    while engine.wait_for_work():
        for update in engine.step()[0]:
            take(answers[update.request_id, update.index], update)
        running = engine.scheduler.running
        if rng is not None and running and rng.random() < 0.1:
            engine.scheduler.preempt(rng.choice(running))
        engine.check_integrity()
    return answers


def sessions(engine: Engine, plain: Engine, seed: int) -> tuple[int, int]:
    """Random sessions on both engines, with equal answers; (tokens found, those in full blocks)."""
    rng, number, found, whole = random.Random(seed), 0, 0, 0
    size = engine.settings.cache.block_size
    texts = [[rng.randrange(61) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    for _ in range(5):
        requests, of_text = [], {}
        for at, text in enumerate(texts):
            for _ in range(rng.choice([1, 1, 2])):
                sampling = SamplingParams(
                    temperature=rng.choice([0.0, 1.0]),
                    seed=number,
                    n=rng.choice([1, 1, 2]),
                    max_tokens=rng.randint(1, 24),
                    ignore_eos=True,
                )
                tail = [rng.randrange(61) for _ in range(rng.randint(1, 20))]
                requests.append(Request(number, [*text, *tail], sampling))
                of_text[number], number = at, number + 1
        got, expected = run(engine, requests, rng), run(plain, requests, None)
        for place, answer in expected.items():
            assert got[place].token_ids == answer.token_ids, place
        for request in requests:
            num_cached = got[request.request_id, 0].num_cached_tokens
            found, whole = found + num_cached, whole + num_cached // size * size
            index = rng.randrange(request.sampling.n)
            answer = expected[request.request_id, index].token_ids
            cut = rng.choice([len(answer), rng.randint(0, len(answer))])
            texts[of_text[request.request_id]] = [*request.prompt_token_ids, *answer[:cut]]
    return found, whole


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_who_computes_all(folder: Path, kind: str):
    plain_kind = "int4" if "int4" in kind and "guessed" in kind else kind.partition(",")[0]
    plain = made(folder, plain_kind, prefix_cache=False)
    found, whole = sessions(made(folder, kind), plain, seed=3)
    assert found > whole > 0, "nothing was found within a block"
    few = made(folder, kind, num_blocks=26)
    found, whole = sessions(few, plain, seed=4)
    assert found > whole > 0
