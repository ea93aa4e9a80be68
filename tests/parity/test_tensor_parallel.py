"""Ranks compute what one process computes: greedy tokens, and with fixed parts all tokens."""

from pathlib import Path
from typing import Any

import pytest

from drive import engine_for, finish
from headway.core.request import Request, SamplingParams
from parity.tiny import save, tiny_model
from ranked import (
    BAD,
    answers_of,
    check_a_dead_rank_ends_the_engine,
    check_one_fails_alone,
    leader_of,
    ranks,
    requests,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = ("llama", "mistral", "qwen3", "gemma2", "granite", "smollm3")
CUT = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 8 query and 4 KV heads, whose inputs are whole groups of 32 in 4 parts."""
    return save(tiny_model("qwen2", **CUT), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"transport": "shared"}),
        ("gemma3", {"transport": "gloo", "num_blocks": 20, "block_size": 8}),
        ("phi3", {}),
        *(pytest.param(name, {}, marks=pytest.mark.hardening) for name in OTHERS),
    ],
)
def test_greedy_tokens_in_fp32_are_those_of_one_rank(
    tmp_path: Path, family: str, options: dict[str, Any]
):
    """With biases, shared blocks and preemption, windows and norms of heads, fused matrices."""
    folder = save(tiny_model(family), tmp_path / "model")
    one = tokens_of(folder, requests(0), dtype="float32")
    many = tokens_of(folder, requests(0), dtype="float32", tensor_parallel_size=2, **options)
    assert many == one


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.hardening)])
def test_a_trained_model_says_the_same_on_many_ranks(shared: Path, size: int):
    """Of 8 query heads, 4 KV heads and 172 neurons: on 8 ranks two have a KV head, and a rank has
    21 or 22 neurons."""
    options = {"dtype": "bfloat16", "sum_parts": size}
    folder, asked = shared / "models" / "stories260K", requests(0, 4) + requests(1.0)[4:]
    one = tokens_of(folder, asked, **options)
    assert tokens_of(folder, asked, tensor_parallel_size=size, **options) == one


def test_ranks_with_unlike_shares_say_the_same(tmp_path: Path):
    """One query head and two, which read copies of one KV head; 25 neurons and 26."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    folder = save(tiny_model("qwen2", **heads, intermediate_size=51), tmp_path / "model")
    options = {"sum_parts": 2, "dtype": "bfloat16"}
    with ranks(folder, tensor_parallel_size=2, **options) as engine:
        many = finish(engine, requests(1.0, 4))
        told = engine.executor.describe()
    alone = engine_for(folder, max_model_len=128, **options)
    one, held = finish(alone, requests(1.0, 4)), alone.executor.describe()
    assert many == one
    assert told.kv_bytes == 2 * held.kv_bytes


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"dtype": "bfloat16"}),
        (2, {"quantization": "int8", "kv_cache_dtype": "int8", "num_blocks": 20}),
        (2, {"quantization": "int4", "quantization_group": 32, "max_num_batched_tokens": 24}),
    ],
    ids=["bf16", "int8", "int4"],
)
def test_with_fixed_parts_seeded_tokens_are_the_same(
    folder: Path, size: int, options: dict[str, Any]
):
    """At temperature 1, where a last place of a sum would change a token soon."""
    one = tokens_of(folder, requests(1.0), sum_parts=4, **options)
    assert (
        tokens_of(folder, requests(1.0), sum_parts=4, tensor_parallel_size=size, **options) == one
    )


@pytest.mark.parametrize("family", ["qwen3moe", "gptoss"])
def test_experts_are_dealt_over_ranks(tmp_path: Path, family: str):
    """Each row is one rank's, so it is exact; sink logits by head; as many experts are read."""
    folder = save(tiny_model(family), tmp_path / "model")
    options = {"dtype": "bfloat16", "sum_parts": 2}
    whole = engine_for(folder, max_model_len=128, **options)
    with ranks(folder, tensor_parallel_size=2, **options) as engine:
        assert finish(engine, requests(1.0, 4)) == finish(whole, requests(1.0, 4))
        read = []
        for each in (engine, whole):
            each.add(Request(9, [5, 6], SamplingParams(max_tokens=4)))
            read.append(each.step()[1].experts_read)
        assert read[0] == read[1] > 0
        executor = leader_of(engine)
        held = whole.executor.describe().weight_bytes
        assert max(executor.weight_bytes) < 0.6 * held


@pytest.mark.parametrize(
    ("is_tied", "options"),
    [
        (True, {"dtype": "bfloat16", "transport": "gloo"}),
        (True, {"quantization": "int8"}),
        (False, {"quantization": "int4", "quantization_group": 32, "quantization_head": "int4"}),
    ],
    ids=["tied", "tied int8", "int4"],
)
def test_log_probabilities_are_those_of_one_rank(
    tmp_path: Path, is_tied: bool, options: dict[str, Any]
):
    """Of the head's rows, of which ranks have 106 and 105: for tokens drawn and for prompts."""
    folder = save(tiny_model("qwen2", **CUT, tie_word_embeddings=is_tied), tmp_path / "model")
    sampling = SamplingParams(
        seed=3, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=3, temperature=1.0
    )
    asked = [Request(at, [5 + at, *range(100, 190)], sampling) for at in range(3)]
    one = answers_of(folder, asked, sum_parts=2, **options)
    assert answers_of(folder, asked, sum_parts=2, tensor_parallel_size=2, **options) == one


def test_each_rank_holds_its_share_and_what_one_says_the_other_hears(folder: Path):
    with ranks(folder, tensor_parallel_size=2) as engine:
        executor = leader_of(engine)
        own, other = executor.weight_bytes
        if executor.own.kernels.library is not None:
            program = executor.own.target.program
            assert program is not None and program.num_calls == 1 + 2 * 2  # two sums a layer
        whole = engine_for(folder, max_model_len=128).executor.describe()
        assert max(own, other) < 0.55 * whole.weight_bytes
        told = executor.describe()
        assert told.kernels["ranks"][0] == "2" and told.weight_bytes == own + other
        assert told.kv_bytes == whole.kv_bytes


def test_what_drawing_raises_is_rank_0s_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The request fails by itself, as with one rank; who runs beside it has its own tokens."""
    alone = tokens_of(folder, requests(0, 2), sum_parts=2)
    with ranks(folder, tensor_parallel_size=2, sum_parts=2) as engine:
        executor = leader_of(engine)
        assert not executor._meeting.folder.exists()
        sampler = executor.own.sampler
        draw = sampler.sample

        def breaks(logits: Any, sequences: Any, masks: Any) -> Any:
            assert all(one.new.token_ids[0] != BAD for one in sequences), "a bad row"
            return draw(logits, sequences, masks)

        monkeypatch.setattr(sampler, "sample", breaks)
        check_one_fails_alone(engine, requests(0, 2), alone)


def test_a_rank_that_dies_ends_the_engine(folder: Path):
    """The engine's own trial fails too, so that its process ends and another begins."""
    with ranks(folder, tensor_parallel_size=2) as engine:
        finish(engine, requests(0, 1))
        executor = leader_of(engine)
        executor.own.target.model.layers[0].mlp.down.group.timeout_s = 0.2  # type: ignore[union-attr]
        check_a_dead_rank_ends_the_engine(engine)
