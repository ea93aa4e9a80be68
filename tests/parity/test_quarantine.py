"""Numbers that are not finite stay with the request that made them."""

import math
import random
from pathlib import Path

import pytest
import torch

from drive import engine_for, finish, greedy
from guessing import Guesser
from headway.core.errors import RequestError
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.engine.engine import Engine
from headway.engine.sequence import Sequence
from parity.tiny import tiny_model

POISON = 77
PROMPTS = {1: [5, 9, 13, 2, 8], 3: [101, 40, 41], 4: [6] * 9, 5: [30, 31, 32, 33, 34, 35, 36]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def poisoned(folder: Path, backend: str) -> Engine:
    """An engine whose model overflows at one token of its vocabulary."""
    engine = engine_for(folder, num_blocks=12, block_size=4, attention_backend=backend)
    engine.executor.model.embedding.weight[POISON] = math.inf  # type: ignore[attr-defined]
    return engine


def step_all(engine: Engine) -> list[SequenceUpdate]:
    updates = []
    while engine.has_work:
        updates += engine.step()[0]
        engine.check_integrity()
    return updates


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_an_overflow_fails_its_request_and_no_other(folder: Path, backend: str) -> None:
    requests = {i: greedy(i, prompt, 8) for i, prompt in PROMPTS.items()}
    clean = finish(poisoned(folder, backend), [requests[1]])
    clean |= finish(poisoned(folder, backend), [requests[3], requests[4]])
    clean |= finish(poisoned(folder, backend), [requests[5]])

    engine = poisoned(folder, backend)
    for request in (requests[1], greedy(2, [4, POISON, 6, 3, POISON, 7, 8], 8)):
        engine.add(request)
    updates = step_all(engine)
    for request in (requests[3], requests[4]):  # these get the blocks the failed one had
        engine.add(request)
    updates += step_all(engine)
    engine.add(requests[5])
    updates += step_all(engine)

    ends = {u.request_id: u.finish_reason for u in updates if u.finish_reason}
    assert ends == {1: "length", 2: "error", 3: "length", 4: "length", 5: "length"}
    for number in PROMPTS:
        tokens = [t for u in updates if u.request_id == number for t in u.token_ids]
        assert tokens == clean[number, 0].token_ids
    for layer in engine.executor.kv:  # type: ignore[attr-defined]
        assert torch.isfinite(layer.k).all()
        assert torch.isfinite(layer.v).all()


class Poisoner(Guesser):
    """Guesses what will come, and the poison somewhere among it."""

    def guess(self, sequence: Sequence) -> list[int]:
        following = self.truth(sequence)[sequence.num_generated :]
        following.insert(self.rng.randint(0, min(4, len(following))), POISON)
        return following[:8]


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
def test_an_overflow_in_a_guess_fails_nobody(folder: Path, backend: str) -> None:
    """The guesses before it are kept, the rest comes again; no block keeps the bad numbers."""
    requests = [greedy(i, prompt, 12) for i, prompt in PROMPTS.items()]
    wanted = finish(poisoned(folder, backend), requests)
    engine = poisoned(folder, backend)
    guesser = Poisoner(
        random.Random(1),
        211,
        lambda sequence: list(wanted[sequence.request.request_id, 0].token_ids),
    )
    engine.scheduler.drafts.speculator = guesser
    found = finish(engine, requests)
    assert {key: a.token_ids for key, a in found.items()} == {
        key: a.token_ids for key, a in wanted.items()
    }
    assert guesser.num_kept > 5
    for layer in engine.executor.kv:  # type: ignore[attr-defined]
        assert torch.isfinite(layer.k).all()
        assert torch.isfinite(layer.v).all()


@pytest.mark.parametrize("params", [{"allowed_token_ids": [2]}, {"stop_token_ids": [*range(211)]}])
def test_only_end_tokens_allowed_before_min_tokens_is_refused(folder: Path, params: dict) -> None:
    engine = engine_for(folder)
    sampling = SamplingParams(min_tokens=3, max_tokens=9, **params)
    with pytest.raises(RequestError, match="end token") as refused:
        engine.add(Request(1, [5, 6], sampling))
    assert refused.value.param == "min_tokens"
