"""Each sampling parameter changes what an engine answers, on every path that chooses tokens.

The table has a pair of requests for each parameter, which differ in it alone. The last test shows
that the table sees a runtime that ignores one: with it the two answers of the pair are equal.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drive import engine_for, finish
from headway.core import grammar
from headway.core.plan import StepPlan
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from parity.devices import on_cpu, small_model

PROMPT = [7, 11, 5, 7, 20, 11]
EOS = 2
DRAWN = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
ENDS = {"logit_bias": {EOS: 6.0}, "ignore_eos": False, "max_tokens": 40}
PAIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "n": ({}, 2),
    "temperature": ({}, 0.1),
    "top_p": ({}, 0.02),
    "top_k": ({}, 1),
    "min_p": ({}, 0.95),
    "presence_penalty": ({"top_k": 3}, 2.0),
    "frequency_penalty": ({"top_k": 3}, 2.0),
    "repetition_penalty": ({"top_k": 3}, 20.0),
    "seed": ({}, 4),
    "max_tokens": ({}, 5),
    "min_tokens": (ENDS, 30),
    "stop_token_ids": ({"logit_bias": {9: 6.0}}, [9]),
    "ignore_eos": (ENDS, True),
    "logit_bias": ({}, {9: 50.0}),
    "allowed_token_ids": ({}, [9, 10]),
    "logprobs": ({}, 2),
    "prompt_logprobs": ({}, 2),
    "grammar": ({}, grammar.regex("[0-9]{12}", "p")),
}
"""Parameter → (what both requests of its pair have besides `DRAWN`, its value in the second)."""
IN_TEXT = {"stop", "skip_special_tokens", "include_stop_str_in_output"}
"""Parameters of the text of an answer, which no runtime sees (tests/unit/frontend)."""
IN_ENGINE = {"n", "max_tokens", "stop_token_ids", "ignore_eos", "grammar"}
"""Parameters that the engine obeys alone."""
IN_BOTH = {"min_tokens", "prompt_logprobs"}
"""Parameters of which the engine has a part too, so that answers differ without the runtime's."""
PATHS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "device": {"kernels": "torch", "make": on_cpu},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("sampling"))


def pair(name: str) -> tuple[SamplingParams, SamplingParams]:
    """Two requests' parameters that differ in `name` alone."""
    more, value = PAIRS[name]
    common = DRAWN | more
    return SamplingParams(**common), SamplingParams(**common | {name: value})


def equal_pairs(engine: Engine, names: Collection[str] = PAIRS) -> list[str]:
    """Those of these parameters that change nothing; all requests are in the same batches."""
    sampling = [each for name in names for each in pair(name)]
    found = finish(engine, [Request(i, PROMPT, each) for i, each in enumerate(sampling)])
    answers = [[found[i, index] for index in range(s.n)] for i, s in enumerate(sampling)]
    return [name for at, name in enumerate(names) if answers[2 * at] == answers[2 * at + 1]]


def engine_of(folder: Path, path: str) -> Engine:
    """An engine that has no prefix cache, so that answers differ in nothing else."""
    options = {"dtype": "float32", "max_num_seqs": 2 * len(PAIRS) + 1, "prefix_cache": False}
    return engine_for(folder, **options, **PATHS[path])


def test_the_table_has_every_parameter():
    assert PAIRS.keys() | IN_TEXT == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("path", PATHS)
def test_each_parameter_changes_the_answer(folder: Path, path: str):
    engine = engine_of(folder, path)
    assert equal_pairs(engine) == []
    requests = [Request(i, PROMPT, pair(name)[1]) for i, name in enumerate(sorted(IN_BOTH))]
    found = finish(engine, requests)
    assert EOS not in found[0, 0].token_ids[: PAIRS["min_tokens"][1]]
    entries = found[1, 0].prompt_logprobs
    assert entries is not None and [each is None for each in entries] == [True] + [False] * 5


def test_a_runtime_that_ignores_a_parameter_is_seen(folder: Path):
    engine = engine_of(folder, "torch")
    submit, unseen = engine.executor.submit, []
    for name in PAIRS.keys() - IN_ENGINE - IN_BOTH:

        def deaf(plan: StepPlan, name: str = name) -> None:
            for new in plan.new:
                if name == "seed":
                    new.seed = 0
                else:
                    default = getattr(SamplingParams(), name)
                    new.sampling = msgspec.structs.replace(new.sampling, **{name: default})
            submit(plan)

        engine.executor.submit = deaf  # type: ignore[method-assign]
        if equal_pairs(engine, [name]) != [name]:
            unseen.append(name)
    assert unseen == []
