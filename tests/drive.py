"""Driving a real engine in a test: build one, hand it requests, step until it is idle.

`engine_for` reads a model folder; `finish` returns what each sequence gained, and checks on the way
that the engine's invariants hold and that every sequence ends with exactly one terminal update.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from headway.assemble import make_executor, make_grammars
from headway.config.options import EngineOptions
from headway.core.plan import Executor
from headway.core.request import Request, SamplingParams, SequenceUpdate, TokenLogprobs
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.planning import plan_settings

KV_BYTES = 64 * 2**20


@dataclasses.dataclass(slots=True)
class Answer:
    """What one sequence of one request gained in all."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0


Answers = dict[tuple[int, int], Answer]
"""By request id and index."""


def engine_for(
    folder: Path,
    *,
    num_blocks: int | None = None,
    overlap: int | None = None,
    transport: str = "",
    make: Callable[..., Executor] = make_executor,
    **options: object,
) -> Engine:
    """An engine on the CPU over the model of `folder`; `num_blocks` counts those to give out.

    Then who fits starts, and few blocks lead to preemptions.

    It is `overlap` steps ahead where it is not what is chosen and `make` gives an executor that
    holds them; likewise `transport` is how ranks meet.
    """
    table = EngineOptions(**{"device": "cpu", "kv_memory": KV_BYTES, "threads": 1, **options})
    spec, settings, _, machine = plan_settings(folder, table)
    if num_blocks is not None:
        settings = dataclasses.replace(
            settings,
            cache=dataclasses.replace(
                settings.cache, num_blocks=(num_blocks + 1,) * len(settings.cache.num_blocks)
            ),
            max_model_len=min(settings.max_model_len, num_blocks * settings.cache.block_size),
        )
    if transport:
        parallel = dataclasses.replace(settings.parallel, transport=transport)
        settings = dataclasses.replace(settings, parallel=parallel)
    if overlap is not None:
        scheduler = dataclasses.replace(settings.scheduler, overlap=overlap)
        settings = dataclasses.replace(settings, scheduler=scheduler)
    executor = make(folder, table, spec, settings, machine, None)
    engine = build_engine(
        executor,
        settings,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        grammars=make_grammars(folder, table, spec, settings),
    )
    engine.scheduler.room.predicts_growth = num_blocks is None
    return engine


def finish(
    engine: Engine,
    requests: Iterable[Request],
    each_step: Callable[[int], None] = lambda step: None,
) -> Answers:
    """Add `requests` and step until the engine is idle; `each_step` may abort some on the way."""
    answers: Answers = {}
    for request in requests:
        engine.add(request)
        for index in range(request.sampling.n):
            answers[request.request_id, index] = Answer()
    step = 0
    while engine.wait_for_work():
        updates, _ = engine.step()
        for update in updates:
            take(answers[update.request_id, update.index], update)
        engine.check_integrity()
        each_step(step)
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    return answers


def take(answer: Answer, update: SequenceUpdate) -> None:
    """Add `update` to `answer`."""
    assert answer.finish_reason is None, "an update after the terminal one"
    assert update.finish_reason != "error", "a step failed"
    answer.token_ids += update.token_ids
    answer.logprobs += update.logprobs or []
    answer.finish_reason = update.finish_reason
    answer.num_cached_tokens += update.num_cached_tokens
    if update.prompt_logprobs is not None:
        assert answer.prompt_logprobs is None, "prompt logprobs are told once"
        answer.prompt_logprobs = update.prompt_logprobs


def greedy(request_id: int, prompt: list[int], max_tokens: int, **more: object) -> Request:
    """A request at temperature 0 that does not stop at end tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
    return Request(request_id, prompt, sampling)
