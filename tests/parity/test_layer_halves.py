"""Attention on one rank and the MLPs on another compute what one rank computes, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from drive import engine_for, finish
from headway.core.request import Request, SamplingParams
from parity.tiny import save, tiny_model
from ranked import (
    answers_of,
    break_a_layer,
    check_a_dead_rank_ends_the_engine,
    check_one_fails_alone,
    leader_of,
    ranks,
    requests,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES: dict[str, Any] = {"pipeline_parallel_size": -2}
INT4_KV = {"kv_cache_dtype": "int4", "max_num_batched_tokens": 24}
OTHERS = ("mistral", "qwen3", "phi3", "olmo2", "granite", "gemma2", "gptoss", "deepseekv3")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", INT4_KV),
        ("gemma3", {"dtype": "bfloat16", "num_blocks": 20}),
        ("qwen3moe", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen2", {"dtype": "float32", "sum_parts": 2}),
        *(
            pytest.param(name, {"dtype": "bfloat16"}, marks=pytest.mark.hardening)
            for name in OTHERS
        ),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    tmp_path: Path, family: str, options: dict[str, Any]
):
    """Greedy and seeded, shared blocks, preemption, windows; a tied head; experts."""
    changes = {"head_dim": 32} if options is INT4_KV else {}
    folder = save(tiny_model(family, **changes), tmp_path / "model")
    asked = requests(0, 4, logprobs=3) + requests(1.0, 8, prompt_logprobs=2)[4:]
    one = answers_of(folder, asked, **options)
    assert answers_of(folder, asked, **HALVES, **options) == one


def test_each_rank_holds_its_half(tmp_path: Path):
    """No KV beside the MLPs, and as many experts are read as with one rank."""
    folder = save(tiny_model("qwen3moe"), tmp_path / "model")
    whole = engine_for(folder, max_model_len=128)
    held = whole.executor.describe()
    with ranks(folder, **HALVES) as engine:
        executor = leader_of(engine)
        told = executor.describe()
        assert told.weight_bytes == held.weight_bytes and min(executor.weight_bytes) > 0
        assert executor.kv_bytes == [held.kv_bytes, 0]
        assert "attention on the first, MLPs on the second" in told.kernels["ranks"][1]
        read = []
        for each in (engine, whole):
            finish(each, requests(0, 1))
            each.add(Request(9, [5, 6], SamplingParams(max_tokens=4)))
            read.append(each.step()[1].experts_read)
        assert read[0] == read[1] > 0


def test_what_attention_raises_the_other_half_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody is a row apart: the engine tries again in halves, and the others have their tokens."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    options = {"dtype": "float32", "kernels": "torch"}
    alone = tokens_of(folder, requests(0, 2), **options)
    with ranks(folder, **HALVES, **options) as engine:
        break_a_layer(engine, monkeypatch)
        check_one_fails_alone(engine, requests(0, 2), alone)


def test_a_half_that_dies_ends_the_engine_at_once(tmp_path: Path):
    folder = save(tiny_model("llama"), tmp_path / "model")
    with ranks(folder, **HALVES) as engine:
        finish(engine, requests(0, 1))
        check_a_dead_rank_ends_the_engine(engine)
