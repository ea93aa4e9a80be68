"""Stages compute what one process computes, bit for bit: nothing is added up between them."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drive import engine_for, finish
from headway.core.request import Request, SamplingParams
from headway.engine import engine as engine_module
from headway.runtime.parallel import pipeline
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.stage import HEADER, SocketLink, Stage, StageError
from parity.tiny import save, tiny_model
from ranked import (
    answers_of,
    break_a_layer,
    check_a_dead_rank_ends_the_engine,
    check_one_fails_alone,
    disturbed,
    leader_of,
    ranks,
    requests,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = ("llama", "mistral", "qwen3", "phi3", "olmo2", "granite", "gptoss", "deepseekv3")
INT4_KV = {"kv_cache_dtype": "int4", "max_num_batched_tokens": 24}


@pytest.mark.parametrize(
    ("family", "stages", "options"),
    [
        ("llama", 2, INT4_KV),
        ("qwen2", 2, {"dtype": "bfloat16", "num_blocks": 20}),
        ("gemma3", 2, {"dtype": "bfloat16", "transport": "gloo"}),
        ("smollm3", 3, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen3moe", 2, {"quantization": "int4", "quantization_group": 32}),
        *(
            pytest.param(name, 2, {"dtype": "bfloat16"}, marks=pytest.mark.hardening)
            for name in OTHERS
        ),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    tmp_path: Path, family: str, stages: int, options: dict[str, Any]
):
    """Greedy and seeded, shared blocks, preemption; a head tied to an embedding that is elsewhere,
    windows, experts."""
    changes = {"head_dim": 32} if options is INT4_KV else {}
    folder = save(tiny_model(family, **changes), tmp_path / "model")
    asked = requests(0, 4, logprobs=3) + requests(1.0, 8, prompt_logprobs=2)[4:]
    one = answers_of(folder, asked, **options)
    assert answers_of(folder, asked, pipeline_parallel_size=stages, **options) == one


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("qwen2", {"dtype": "bfloat16", "sum_parts": 4, "num_blocks": 20}),
        ("qwen2", {"dtype": "bfloat16", "sum_parts": 2, "transport": "gloo"}),
        ("qwen3moe", {"quantization": "int8", "kv_cache_dtype": "int8", "sum_parts": 2}),
        (
            "qwen2",
            {"quantization": "int4", "quantization_group": 32, "sum_parts": 2},
        ),
        *(
            pytest.param(name, {"dtype": "bfloat16", "sum_parts": 2}, marks=pytest.mark.hardening)
            for name in ("mistral", "gemma3", "smollm3", "phi3", "granite", "gptoss")
        ),
    ],
)
def test_stages_of_two_ranks_each_say_what_one_rank_says(
    tmp_path: Path, family: str, options: dict[str, Any]
):
    """Greedy; with fixed parts seeded too, and log-probabilities of prompts and answers."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 16}
    folder = save(tiny_model(family, **sizes if family == "qwen2" else {}), tmp_path / "model")
    asked = requests(0, 4)
    if "sum_parts" in options:
        asked = requests(0, 4, logprobs=3) + requests(1.0, 8, prompt_logprobs=2)[4:]
    cut = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    one, many = answers_of(folder, asked, **options), answers_of(folder, asked, **cut, **options)
    assert many == one


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}])
def test_a_trained_model_says_the_same_in_stages(shared: Path, sizes: dict[str, int]):
    """Its 5 layers are 2 and 3; greedy, and with fixed parts seeded."""
    folder, asked = shared / "models" / "stories260K", requests(0, 4) + requests(1.0)[4:]
    options = {"dtype": "bfloat16", "sum_parts": 2}
    one = tokens_of(folder, asked, **options)
    assert tokens_of(folder, asked, pipeline_parallel_size=2, **sizes, **options) == one


def test_each_of_four_ranks_holds_a_quarter(tmp_path: Path):
    """Of 4 layers, with a head that is as large as the embedding."""
    folder = save(tiny_model("llama", num_hidden_layers=4), tmp_path / "model")
    held = engine_for(folder, max_model_len=128).executor.describe()
    with ranks(folder, tensor_parallel_size=2, pipeline_parallel_size=2) as engine:
        executor = leader_of(engine)
        assert not executor._meeting.folder.exists()
        told = executor.describe()
        assert told.kernels["ranks"][0] == "4" and "2 stages of 2 ranks" in told.kernels["ranks"][1]
        assert max(executor.weight_bytes) < 0.27 * held.weight_bytes
        assert executor.kv_bytes == [held.kv_bytes // 4] * 4


def test_each_stage_holds_its_layers_and_their_kv(tmp_path: Path):
    """Of 3 layers: the embedding and one layer; two layers, the last norm and the head."""
    folder = save(tiny_model("qwen3moe"), tmp_path / "model")
    whole = engine_for(folder, max_model_len=128)
    held = whole.executor.describe()
    with ranks(folder, pipeline_parallel_size=2) as engine:
        executor = leader_of(engine)
        told = executor.describe()
        assert told.weight_bytes == held.weight_bytes and told.kv_bytes == held.kv_bytes
        last, first = executor.kv_bytes
        assert last == 2 * first and max(executor.weight_bytes) < 0.7 * held.weight_bytes
        assert told.kernels["ranks"] == (
            "2",
            "socket, stages of a pipeline; "
            + ", ".join(f"{each / 2**20:.1f}" for each in executor.weight_bytes)
            + " MiB of weights, "
            + ", ".join(f"{each / 2**20:.1f}" for each in executor.kv_bytes)
            + " MiB of KV",
        )
        read = []
        for each in (engine, whole):
            finish(each, requests(0, 1))
            each.add(Request(9, [5, 6], SamplingParams(max_tokens=4)))
            read.append(each.step()[1].experts_read)
        assert read[0] == read[1] > 0


def test_a_stage_that_dies_ends_the_engine_at_once(tmp_path: Path):
    folder = save(tiny_model("llama"), tmp_path / "model")
    with ranks(folder, pipeline_parallel_size=2) as engine:
        finish(engine, requests(0, 1))
        check_a_dead_rank_ends_the_engine(engine)


def test_a_request_that_the_last_stage_alone_cannot_compute_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No sum is apart: the engine tries again in halves, and the others have their tokens."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    options = {"dtype": "float32", "kernels": "torch"}
    alone = tokens_of(folder, requests(0, 2), **options)
    with ranks(folder, pipeline_parallel_size=2, **options) as engine:
        break_a_layer(engine, monkeypatch)
        check_one_fails_alone(engine, requests(0, 2), alone)


@pytest.mark.parametrize("size", [1, 2])
def test_stages_have_two_steps_and_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """Long plans wait until no stage waits; some requests are aborted, some preempted. Stages are a
    rank each, or two."""
    folder = save(tiny_model("qwen2"), tmp_path / "model")
    options = {"dtype": "bfloat16", "num_blocks": 24, "max_num_batched_tokens": 24}
    options |= {"sum_parts": 2} if size == 2 else {}
    asked = requests(1.0, 8, logprobs=1)
    alone = tokens_of(folder, asked, **options)
    cut = {"pipeline_parallel_size": 2, "tensor_parallel_size": size, "overlap": 1}
    for max_unread_bytes in (pipeline.MAX_UNREAD_BYTES, 30):
        monkeypatch.setattr(pipeline, "MAX_UNREAD_BYTES", max_unread_bytes)
        with ranks(folder, **cut, **options) as engine:
            tokens = disturbed(engine, asked, leaves=3, at=9)
        assert tokens == {key: alone[key] for key in alone if key[0] != 3}


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_whose_masks_raise_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """The stages have computed it, and it is not collected; its sequences have their tokens."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    options = {"dtype": "float32"}
    alone = tokens_of(folder, requests(0, 3), **options)
    cut = {"pipeline_parallel_size": 2, "tensor_parallel_size": size, "overlap": 1}
    with ranks(folder, **cut, **options) as engine:
        begin, calls = engine_module.begin_masks, count()

        class Breaking:
            def finish(self) -> Any:
                raise MemoryError("no masks")

        def breaks(*given: Any) -> Any:
            return Breaking() if next(calls) in (4, 9) else begin(*given)

        monkeypatch.setattr(engine_module, "begin_masks", breaks)
        found = finish(engine, requests(0, 3))
    assert {key: answer.token_ids for key, answer in found.items()} == alone
    assert next(calls) > 9


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_what_a_stage_raises_the_next_raises_and_the_next_step_is_whole(
    pair: tuple[socket.socket, socket.socket],
):
    """Rows that are more than a socket holds, of two types; a step that raised between them."""
    first = Stage(0, 2, SocketLink(None, pair[0]))
    last = Stage(1, 2, SocketLink(pair[1], None))
    given = {0: torch.randn(3000, 64), 2: torch.randn(5, 64).bfloat16()}

    def produce(rows: Tensor | None) -> Tensor:
        assert rows is None
        return found

    def double(rows: Tensor | None) -> Tensor:
        assert rows is not None
        return rows * 2

    def breaks(rows: Tensor | None) -> Tensor:
        raise ValueError("a bad step")

    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            found = given.get(step, torch.zeros(1, 64))
            shape = tuple(found.shape)
            work = breaks if step == 1 else produce
            sent = pool.submit(first.run, shape, found.dtype, work)
            if step == 1:
                with pytest.raises(StageError):
                    last.run(shape, found.dtype, double)
                with pytest.raises(ValueError, match="a bad step"):
                    sent.result()
            else:
                assert torch.equal(last.run(shape, found.dtype, double), found * 2)
                assert sent.result() is found


def test_a_stage_that_is_gone_silent_or_lying_is_told(pair: tuple[socket.socket, socket.socket]):
    link = SocketLink(pair[1], pair[1], timeout_s=0.05)
    with pytest.raises(RankLostError, match="hangs"):
        link.receive(torch.empty(1, 4))
    pair[0].sendall(HEADER.pack(True, 8))
    with pytest.raises(RankLostError, match="8 bytes of 16"):
        link.receive(torch.empty(1, 4))
    pair[0].close()
    with pytest.raises(RankLostError, match="end is closed"):
        link.receive(torch.empty(1, 4))
    with pytest.raises(RankLostError, match="next stage"):
        link.send(torch.zeros(1, 4))
