"""Engines of several ranks in a test, and what they are asked; their followers end with them."""

import os
import random
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from drive import Answers, engine_for, finish
from forked import HAS_FORKS, Forked
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.runtime.parallel import leader
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.leader import LeaderExecutor
from headway.runtime.parallel.pipeline import PipelineExecutor

BAD = 99
"""The first token of a prompt that something in a test does not bear."""


FORKS = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
"""Of `subprocess` what the leader uses, with followers that have torch already."""


@contextmanager
def ranks(folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine whose followers are gone at the end.

    They begin as forks; tests/system/test_tensor_parallel.py starts them as a server does.
    """
    with pytest.MonkeyPatch.context() as patch:
        if HAS_FORKS:
            patch.setattr(leader, "subprocess", FORKS)
        engine = engine_for(folder, **{"max_model_len": 128, **options})
    try:
        yield engine
    finally:
        if isinstance(engine.executor, LeaderExecutor):
            engine.executor.close()
            assert all(one.process.returncode is not None for one in engine.executor.followers)


def answers_of(folder: Path, requests: list[Request], **options: Any) -> Answers:
    """What each sequence is answered."""
    with ranks(folder, **options) as engine:
        return finish(engine, requests)


def tokens_of(folder: Path, requests: list[Request], **options: Any) -> dict[Any, list[int]]:
    """The tokens of each sequence."""
    found = answers_of(folder, requests, **options)
    return {key: answer.token_ids for key, answer in found.items()}


def requests(temperature: float, count: int = 8, **more: Any) -> list[Request]:
    """Prompts of which some begin alike; every other one has two answers."""
    rng = random.Random(7)
    common = [rng.randrange(3, 90) for _ in range(33)]
    return [
        Request(
            at,
            common[: rng.choice([0, 33])]
            + [rng.randrange(3, 90) for _ in range(rng.choice([1, 9, 40]))],
            SamplingParams(
                temperature=temperature,
                seed=at,
                max_tokens=24,
                ignore_eos=True,
                n=1 + at % 2,
                **more,
            ),
        )
        for at in range(count)
    ]


def leader_of(engine: Engine) -> LeaderExecutor:
    """The executor of rank 0."""
    assert isinstance(engine.executor, LeaderExecutor)
    return engine.executor


def break_a_layer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """On rank 0 a norm of layer 1 raises as long as a prompt with the token `BAD` is known."""
    own = leader_of(engine).own
    norm = own.model.layers[1].mlp_norm
    forward = type(norm).forward

    def breaks(self: Any, x_TH: Tensor) -> Tensor:
        known = own.state.sequences.values()
        assert self is not norm or all(BAD not in one.new.token_ids for one in known), "bad"
        return forward(self, x_TH)

    patch.setattr(type(norm), "forward", breaks)


def check_one_fails_alone(engine: Engine, asked: list[Request], alone: dict[Any, Any]) -> None:
    """A prompt with the token `BAD` ends with an error; the others have the tokens `alone`."""
    reasons, tokens = {}, {key: list[int]() for key in alone}
    for request in [*asked, Request(77, [BAD, 5], SamplingParams(max_tokens=4))]:
        engine.add(request)
    while engine.has_work:
        for update in engine.step()[0]:
            reasons[update.request_id, update.index] = update.finish_reason
            if update.request_id != 77:
                tokens[update.request_id, update.index] += update.token_ids
    assert reasons.pop((77, 0)) == "error" and set(reasons.values()) == {"length"}
    assert tokens == alone


def check_a_dead_rank_ends_the_engine(engine: Engine) -> None:
    """Its follower is killed, and the next step raises."""
    follower = leader_of(engine).followers[0]
    os.kill(follower.process.pid, signal.SIGKILL)
    follower.process.wait()
    engine.add(Request(78, [5, 6], SamplingParams(max_tokens=4)))
    with pytest.raises(RankLostError):
        engine.step()


def disturbed(
    engine: Engine, requests: list[Request], leaves: int, at: int
) -> dict[tuple[int, int], list[int]]:
    """The tokens of each sequence, of stages that have two steps, but those of the request that
    `leaves` behind step `at`, where the oldest of the others is preempted."""
    executor, held = engine.executor, set()
    assert isinstance(executor, PipelineExecutor)
    tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    for step in count():
        if not engine.has_work:
            break
        for update in engine.step()[0]:
            tokens[update.request_id, update.index] += update.token_ids
        held.add(len(executor._steps))
        if step == at:
            engine.abort(leaves)
            engine.scheduler.preempt(engine.scheduler.running[0])
        engine.check_integrity()
    assert held == {0, 1} and engine.scheduler.num_preemptions > 0
    return {key: found for key, found in tokens.items() if key[0] != leaves}
