"""Cold, warm or evicted: the same tokens, in each type of KV and with windows.

Native attention computes a token in the same way to the bit whatever it is computed beside, so what
was found must give the very tokens that computing it again would.
"""

from pathlib import Path

import pytest

from drive import engine_for, finish, greedy
from headway.engine.engine import Engine
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 160,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
MODELS = {"full": ("llama", {}), "window": ("qwen3", WINDOWS), "windows": ("mistral", {})}
"""One full group; a window beside it; windows alone."""
KINDS = {
    "own": {},
    "int8": {"kv_cache_dtype": "int8"},
    "sdpa": {"attention_backend": "sdpa"},
}
POOLS = {"cold": {"prefix_cache": False}, "warm": {}, "evicted": {"num_blocks": 12}}
SYSTEM = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, more = MODELS[request.param]
    return save(tiny_model(family, **SHAPE | more), tmp_path_factory.mktemp("cached"))


def talk(engine: Engine) -> list[list[int]]:
    """The answers of three conversations in turn, five turns each.

    Two begin alike, and the third does not; some requests run beside each other.
    """
    texts = [[*SYSTEM, 11], [*SYSTEM, 12, 13], [20, 21, 22]]
    answers = []
    for turn in range(5):
        requests = [
            greedy(3 * turn + number, list(text), 4 + number) for number, text in enumerate(texts)
        ]
        gained = finish(engine, requests[:1])
        gained |= finish(engine, requests[1:])
        for number, request in enumerate(requests):
            answer = gained[request.request_id, 0].token_ids
            answers.append(answer)
            texts[number] += [*answer, 30 + turn, 40 + number]
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_cold_warm_and_evicted_give_equal_tokens(folder: Path, kind: str):
    """The pool of the evicted run holds less than half of the three conversations."""
    runs, computed = {}, {}
    for name, pool in POOLS.items():
        engine = engine_for(
            folder, block_size=8, max_num_batched_tokens=32, max_num_seqs=4, **KINDS[kind], **pool
        )
        tokens: list[int] = []
        schedule = engine.scheduler.schedule

        def counted(schedule=schedule, tokens=tokens):
            plan = schedule()
            tokens.append(plan.num_tokens)
            return plan

        engine.scheduler.schedule = counted  # type: ignore[method-assign]
        runs[name] = talk(engine)
        computed[name] = sum(tokens)
    assert runs["warm"] == runs["cold"]
    assert runs["evicted"] == runs["cold"]
    assert computed["warm"] < 0.5 * computed["cold"]
    assert computed["warm"] < computed["evicted"] < computed["cold"]
