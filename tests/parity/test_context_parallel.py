"""Ranks that hold parts of each context compute what one rank computes, bit for bit."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drive import Answers, engine_for, finish
from headway.config.parallel import Parallel
from headway.core.request import Request, SamplingParams
from headway.runtime.batch import Batch
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.meeting import shared_files
from headway.runtime.parallel.rows import ROW_PARTITION, partition_rows
from headway.runtime.parallel.shared import PLACE_BYTES
from parity.tiny import save, tiny_model
from ranked import (
    check_a_dead_rank_ends_the_engine,
    disturbed,
    leader_of,
    ranks,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = {"max_position_embeddings": 4096, "vocab_size": 211}
CUT = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 16}
HARDENING = pytest.mark.hardening
OPTIONS = {"max_model_len": 2048, "max_num_batched_tokens": 256}


def asked(temperature: float, lengths: tuple[int, ...], **more: Any) -> list[Request]:
    """Prompts that begin alike, every other one with two answers."""
    rng = random.Random(11)
    common = [rng.randrange(3, 200) for _ in range(1100)]
    found = []
    for at, length in enumerate(lengths):
        tail = [rng.randrange(3, 200) for _ in range(9)]
        how = {"temperature": temperature, "seed": at, "n": 1 + at % 2, "max_tokens": 12}
        sampling = SamplingParams(**{**how, "ignore_eos": True, **more})
        found.append(Request(at + (100 if temperature else 0), common[:length] + tail, sampling))
    return found


def answers(folder: Path, requests: list[Request], **options: Any) -> Answers:
    """But for the tokens that were found: who begins when is a matter of time."""
    with ranks(folder, **OPTIONS | options) as engine:
        found = finish(engine, requests)
    return {key: replace(answer, num_cached_tokens=0) for key, answer in found.items()}


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 2, {"dtype": "float32"}),
        ("qwen2", 2, {"dtype": "bfloat16", "transport": "gloo"}),
        ("qwen2", 3, {"dtype": "bfloat16", "kv_cache_dtype": "int8", "sum_parts": 2}),
        ("qwen3moe", 2, {"quantization": "int8", "dtype": "bfloat16"}),
        pytest.param("qwen3", 2, {"dtype": "float16"}, marks=pytest.mark.hardening),
        pytest.param("phi3", 4, {"dtype": "bfloat16"}, marks=pytest.mark.hardening),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    tmp_path: Path, family: str, size: int, options: dict[str, Any]
):
    """Contexts that end in the first split, in the second and in the third, greedy and seeded, in
    chunks, with blocks that are shared; answers that cross from one rank's split to another's."""
    folder = save(tiny_model(family, **LONG), tmp_path / "model")
    requests = asked(0, (20, 500, 1015), logprobs=2)
    requests += asked(1.0, (0, 505, 700, 1100), logprobs=1)
    one = answers(folder, requests, **{**options, "transport": ""})
    assert answers(folder, requests, decode_context_parallel_size=size, **options) == one


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("qwen2", {"dtype": "bfloat16", "sum_parts": 2}),
        ("qwen3moe", {"quantization": "int8", "kv_cache_dtype": "int8", "sum_parts": 4}),
        *(
            pytest.param(family, {"dtype": "bfloat16", "sum_parts": 2, **more}, marks=HARDENING)
            for family, more in (
                *(("qwen3", {}), ("phi3", {}), ("granite", {}), ("smollm3", {})),
                ("qwen2", {"transport": "gloo"}),
                ("llama", {"quantization": "int4", "quantization_group": 32}),
            )
        ),
    ],
)
def test_ranks_that_share_layers_hold_parts_of_contexts(
    tmp_path: Path, family: str, options: dict[str, Any]
):
    """Two ranks have the even splits, two the odd ones, each of its own heads: greedy as one rank,
    and with fixed parts seeded, too."""
    folder = save(tiny_model(family, **LONG, **CUT), tmp_path / "model")
    requests = asked(0, (20, 1015), logprobs=2)
    if "sum_parts" in options:
        requests += asked(1.0, (0, 505, 700, 1100), logprobs=1)
    one = answers(folder, requests, **{**options, "transport": ""})
    sizes = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}
    found = answers(folder, requests, **sizes, **options)
    if "sum_parts" in options:
        assert found == one
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in one.items()
    }


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {}, {"dtype": "float32"}),
        ("qwen2", {}, {"dtype": "bfloat16", "overlap": 1}),
        ("qwen3moe", {}, {"quantization": "int8", "kv_cache_dtype": "int8", "overlap": 1}),
        *(
            pytest.param(family, sizes, {"dtype": "bfloat16", **more}, marks=HARDENING)
            for family, sizes, more in (
                ("qwen2", {"tensor_parallel_size": 2}, {"sum_parts": 2, "overlap": 1}),
                ("smollm3", {"pipeline_parallel_size": 3}, {}),
                ("phi3", {"decode_context_parallel_size": 3}, {"overlap": 1}),
                ("qwen3", {"tensor_parallel_size": 2}, {"sum_parts": 2, "transport": "gloo"}),
            )
        ),
    ],
)
def test_stages_hold_parts_of_contexts(
    tmp_path: Path, family: str, sizes: dict[str, int], options: dict[str, Any]
):
    """Rows go from the rank that holds them in one stage to the one that does in the next: greedy,
    seeded and log-probabilities as on one rank, with a step in each stage and with one in all."""
    cut = CUT if "tensor_parallel_size" in sizes else {}
    folder = save(tiny_model(family, **LONG, **cut), tmp_path / "model")
    requests = asked(0, (20, 1015), logprobs=2) + asked(1.0, (0, 505, 1100), logprobs=1)
    one = answers(folder, requests, **{**options, "transport": "", "overlap": None})
    sizes = {"decode_context_parallel_size": 2, "pipeline_parallel_size": 2} | sizes
    assert answers(folder, requests, **sizes, **options) == one


def test_stages_with_parts_of_contexts_have_two_steps(tmp_path: Path):
    """Some of whose requests are aborted, some preempted."""
    folder = save(tiny_model("qwen2", **LONG), tmp_path / "model")
    requests = asked(1.0, (500, 1015, 20, 600))
    one = answers(folder, requests, dtype="bfloat16")
    sizes = {"decode_context_parallel_size": 2, "pipeline_parallel_size": 2, "overlap": 1}
    with ranks(folder, **OPTIONS, **sizes, dtype="bfloat16") as engine:
        tokens = disturbed(engine, requests, leaves=102, at=12)
    assert tokens == {key: answer.token_ids for key, answer in one.items() if key[0] != 102}


def test_a_trained_model_says_the_same_on_four_ranks(shared: Path, tmp_path: Path):
    """Behind the 512 tokens that it was trained for it babbles, everywhere alike."""
    folder = tmp_path / "stories"
    shutil.copytree(shared / "models" / "stories260K", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    requests = asked(0, (20, 1015)) + asked(1.0, (505, 700))
    options = {"dtype": "bfloat16", "sum_parts": 2}
    one = answers(folder, requests, **options)
    for other in ("tensor_parallel_size", "pipeline_parallel_size"):
        sizes = {"decode_context_parallel_size": 2, other: 2}
        assert answers(folder, requests, **sizes, **options) == one


def test_rows_are_dealt_by_position():
    """Token 9, and 510 … 513 of another sequence; the third rank has a row for nobody."""
    batch = Batch(
        token_ids_T=torch.tensor([1, 2, 3, 4, 5]),
        positions_T=torch.tensor([9, 510, 511, 512, 513]),
        slots_GT=[torch.tensor([25, 62, 63, 0, 1]), torch.tensor([9, 14, 15, 80, 81])],
        block_tables_GSB=[],
        query_lens=[1, 4],
        context_lens=[10, 514],
        num_decodes=1,
        sampled_rows=[],
        sampled_sequences=[],
    )
    dealt = []
    for rank in range(3):
        group: Any = SimpleNamespace(rank=rank, size=3)
        found = partition_rows(batch, group)
        assert found.counts == [3, 2, 0] and found.at_T.tolist() == [0, 1, 2, 3, 4]
        dealt.append(found.own)
    assert [own.token_ids_T.tolist() for own in dealt] == [[1, 2, 3], [4, 5], [1]]
    assert [own.slots_GT[1].tolist() for own in dealt] == [[9, 14, 15], [80, 81], [0]]
    assert [own.query_lens for own in dealt] == [[3], [2], [1]]
    rows_TH = [
        own.views[ROW_PARTITION].scatter_own(own.token_ids_T[:, None]).flatten() for own in dealt
    ]
    assert [each.tolist() for each in rows_TH] == [[1, 2, 3, 0, 0], [0, 0, 0, 4, 5], [0] * 5]


def test_who_is_preempted_says_the_same(tmp_path: Path):
    """A pool of 46 blocks on rank 0, where 500 tokens take 32 and 200 take 13: the answers do not
    fit, though that of the first goes on in rank 1's blocks."""
    folder = save(tiny_model("llama", **LONG), tmp_path / "model")
    how = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    requests = [
        Request(at, [3 + (7 + at) * i % 200 for i in range(length)], SamplingParams(**how, seed=at))
        for at, length in enumerate((500, 200))
    ]
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 700}
    one = answers(folder, requests, **options)
    with ranks(folder, **OPTIONS | options, num_blocks=46, decode_context_parallel_size=2) as two:
        found = finish(two, requests)
        assert two.scheduler.num_preemptions > 0
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in one.items()
    }


def test_each_rank_holds_half_of_the_keys_and_values(tmp_path: Path):
    """A context of 2,048 tokens is 64 blocks on each of 2 ranks; weights are whole on each."""
    folder = save(tiny_model("llama", **LONG), tmp_path / "model")
    options = {"max_model_len": 2048, "max_num_seqs": 1}
    held = engine_for(folder, **options).executor.describe()
    with ranks(folder, decode_context_parallel_size=2, **options) as engine:
        executor = leader_of(engine)
        null_block = held.kv_bytes // (2048 // 16 + 1)
        assert executor.kv_bytes == [(held.kv_bytes + null_block) // 2] * 2
        assert executor.weight_bytes == [held.weight_bytes] * 2
        told = executor.describe().kernels
        assert "a part of each context" in told["ranks"][1]
        program = executor.own.target.program
        assert program is not None and program.num_calls == 1 + 2  # where ranks meet, once a layer
        finish(engine, asked(0, (1100,)))
        blocks = [len(pool.index or ()) for pool in engine.kv.pools]
        assert blocks == [1120 // 16 - 32, 32]  # of 1,120 tokens: 512 and 96, and 512 between


def test_each_of_four_ranks_holds_a_quarter_of_the_keys_and_values(tmp_path: Path):
    """And half of the weights, but for the norms; one place for logits, where rank 0 draws."""
    folder = save(tiny_model("llama", **LONG, **CUT), tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 1}
    held = engine_for(folder, **options).executor.describe()
    sizes = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}
    with ranks(folder, **sizes, **options) as engine:
        executor = leader_of(engine)
        null_block = held.kv_bytes // (2048 // 16 + 1)
        assert executor.kv_bytes == [(held.kv_bytes + null_block) // 4] * 4
        assert max(executor.weight_bytes) < 0.55 * held.weight_bytes
        told = executor.describe().kernels["ranks"]
        assert told[0] == "4" and "sums in 2 parts, a part of each context on 2 ranks" in told[1]
        program = executor.own.target.program
        assert (
            program is not None and program.num_calls == 1 + 3 * 2
        )  # two sums and a merge a layer
    files = shared_files(Parallel(size=2, context=2), tmp_path)
    assert len(files) == 4 and sum(files.values()) < 2**25 + 20 * PLACE_BYTES


def test_stages_hold_their_layers_of_their_parts(tmp_path: Path):
    """Of 4 layers 2 of the even splits, 2 of the odd ones, on two ranks each; embedding or head."""
    folder = save(tiny_model("llama", **LONG, num_hidden_layers=4), tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 1}
    held = engine_for(folder, **options).executor.describe()
    sizes = {"decode_context_parallel_size": 2, "pipeline_parallel_size": 2}
    with ranks(folder, **sizes, **options) as engine:
        executor = leader_of(engine)
        null_block = held.kv_bytes // (2048 // 16 + 1)
        assert executor.kv_bytes == [(held.kv_bytes + null_block) // 4] * 4
        assert sum(executor.weight_bytes) == 2 * held.weight_bytes
        assert max(executor.weight_bytes) < 0.55 * held.weight_bytes
        told = executor.describe().kernels["ranks"]
        assert told[0] == "4" and "a part of each context, 2 stages of 2 ranks" in told[1]
        assert not executor._meeting.folder.exists()
    files = shared_files(Parallel(stages=2, context=2), tmp_path)
    assert len(files) == 2 and sum(files.values()) < 9 * PLACE_BYTES, "no place for logits"


@pytest.mark.parametrize("size", [1, 2])
def test_what_one_rank_alone_raises_ends_the_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """Its rows are nobody else's: the others are a meeting apart, and do not wait for it, nor for
    who waits for it."""
    folder = save(tiny_model("llama", **LONG), tmp_path / "model")
    sizes = {"decode_context_parallel_size": 2, "tensor_parallel_size": size}
    with ranks(folder, **sizes, **OPTIONS) as engine:
        finish(engine, asked(0, (20,)))
        executor = leader_of(engine)

        def breaks(given: Any, step: Any) -> Any:
            raise ValueError("a bad row")

        monkeypatch.setattr(executor.own.target, "program", None)
        monkeypatch.setattr(executor.own.target.model, "run_layers", breaks)
        engine.add(Request(9, [5, 6], SamplingParams(max_tokens=4)))
        with pytest.raises(RankLostError):
            engine.step()
        assert [one.process.wait(20) for one in executor.followers] == [1] * (2 * size - 1)


def test_what_one_rank_of_a_stage_alone_raises_ends_the_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other of its stage ends; the stage before has done its part, and ends with the engine."""
    folder = save(tiny_model("llama", **LONG), tmp_path / "model")
    sizes = {"decode_context_parallel_size": 2, "pipeline_parallel_size": 2}
    with ranks(folder, **sizes, **OPTIONS) as engine:
        finish(engine, asked(0, (20,)))
        executor = leader_of(engine)

        def breaks(*given: Any) -> Any:
            raise ValueError("a bad row")

        monkeypatch.setattr(executor.own.target, "_run_layers", breaks)
        engine.add(Request(9, [5, 6], SamplingParams(max_tokens=4)))
        with pytest.raises(RankLostError):
            engine.step()
        assert [one.process.wait(20) for one in executor._others.stage] == [1]
        assert [one.process.poll() for one in executor._others.before] == [None, None]


def test_a_rank_that_dies_ends_the_engine(tmp_path: Path):
    folder = save(tiny_model("llama", **LONG), tmp_path / "model")
    with ranks(folder, decode_context_parallel_size=2, **OPTIONS) as engine:
        finish(engine, asked(0, (20,)))
        executor = leader_of(engine)
        holders: Any = executor.own.target.holders
        holders.timeout_s = 0.2
        check_a_dead_rank_ends_the_engine(engine)
