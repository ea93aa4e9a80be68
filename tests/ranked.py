"""Engines of several ranks in a test, and what they are asked; their followers end with them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drive import Answers, engine_for, finish
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.runtime.parallel.leader import LeaderExecutor


@contextmanager
def ranks(folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine whose followers are gone at the end."""
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
