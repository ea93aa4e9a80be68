"""Decode steps as graphs, with a recorder in their place: sizes, padding, addresses, fallbacks.

A recorder replays by calling, and holds each replay to the operations, shapes and addresses that
were captured; nothing may be read back meanwhile. So a step that would need anything else fails.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from drive import engine_for, finish, greedy
from headway.config.device_choice import choose_graphs
from headway.config.options import EngineOptions
from headway.config.quantization_choice import experts_at_once
from headway.core import grammar as grammars
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.runtime.cuda.graphs import (
    DeviceGraph,
    GraphKey,
    Graphs,
    input_bytes,
    pad_inputs,
    row_counts,
    widths,
)
from headway.runtime.cuda.sampling import draw_arrays
from headway.spec import ExpertsSpec, read_model_spec
from headway.spec.formats import Format
from headway.spec.quantization import Quantization
from parity.cobatch import ENGINES, VOCABULARY, random_request, same
from parity.devices import Recorder, RecordingExecutor, small_model, with_graphs
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("graphs"))


# ── sizes and padding ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 2, 5, 8, 63, 64, 100, 256, 300])
def test_every_count_of_rows_has_a_size(most: int):
    """The least that holds it, and never more than half of it for nobody from 8 rows on."""
    counts = row_counts(most)
    assert counts == sorted(set(counts)) and counts[-1] == min(most, 256)
    graphs = Graphs(rows=counts, widths=[128], memory=torch.zeros(0), make=Recorder)
    for num_rows in range(1, counts[-1] + 1):
        key = graphs.key_of(num_rows, 1, True)
        assert key is not None and key.rows >= num_rows
        assert key.rows <= max(2 * num_rows, 8)
        assert not [count for count in counts if num_rows <= count < key.rows]
    assert graphs.key_of(counts[-1] + 1, 1, True) is None
    assert graphs.key_of(1, 129, False) is None


def test_tables_grow_by_four():
    assert widths(128, 16) == [128]
    assert widths(8192, 16) == [128, 512, 2048, 8192]
    assert widths(3, 16) == [3]


def test_rows_of_nobody_lie_in_the_null_block():
    """Ids, positions and slots 0, and tables of block 0 behind those of the step."""
    ids, table = np.array([7, 8, 9]), np.array([[4, 5], [6, 0], [1, 2]])
    found = pad_inputs([ids, ids, ids, table], 4, 3, 1)
    assert [part.tolist() for part in found[:3]] == [[7, 8, 9, 0]] * 3
    assert found[3].tolist() == [[4, 5, 0], [6, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert found[3].dtype == np.int32


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_memory_holds_the_largest_inputs(groups: int):
    """What `Staging` lays out for a key fits in what is counted for it."""
    for key in (GraphKey(1, 1, True), GraphKey(5, 3, False), GraphKey(256, 128, True)):
        ids, table = np.zeros(key.rows, np.int64), np.zeros((key.rows, key.width), np.int32)
        parts = [ids] * (3 + groups) + [np.zeros(key.rows + 1, np.int32)] * 2 + [table] * groups
        parts += draw_arrays([], VOCABULARY).values()
        parts[-6:] = [np.zeros((key.rows, *part.shape[1:]), part.dtype) for part in parts[-6:]]
        assert sum(-(-part.nbytes // 16) * 16 for part in parts) <= input_bytes(key, groups)


# ── the engine over them ────────────────────────────────────────────────────────────────────


def graphed(folder: Path, overlap: int = 0, **room: object) -> tuple[Engine, RecordingExecutor]:
    options = {**room, "kernels": "torch", "attention_backend": "sdpa"}
    engine = engine_for(folder, **options, overlap=overlap, make=with_graphs())
    assert isinstance(engine.executor, RecordingExecutor)
    return engine, engine.executor


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_replayed_steps_give_the_same_tokens(folder: Path, number: int, overlap: int):
    """Requests of every parameter, preempted and in all mixes, whose decodes are replayed."""
    rng = random.Random(number)
    room = {**ENGINES[number], "kernels": "torch", "attention_backend": "sdpa"}
    requests = [random_request(rng, i) for i in range(8)]
    expected = finish(engine_for(folder, **room), requests)
    engine, executor = graphed(folder, overlap, **ENGINES[number])
    before = Recorder.num_replays
    found = finish(engine, requests)
    for key, answer in found.items():
        same(answer, expected[key])
    assert Recorder.num_replays - before > 5
    graphs = executor.graphs
    assert graphs is not None and {key.draws for key in graphs.captured} == {True}
    assert {key.draws for key in graphs.missing} <= {False}, "penalties are no graph's"
    executor.probe(0)
    assert not graphs.missing
    for key, answer in finish(engine, requests).items():
        same(answer, expected[key])


def test_a_window_and_a_whole_context_have_tables_of_their_own(tmp_path: Path):
    """Two KV groups, of which one gives blocks back: Gemma 3's layers."""
    folder = save(tiny_model("gemma3", vocab_size=VOCABULARY), tmp_path)
    room = {"kernels": "torch", "block_size": 4, "max_num_seqs": 5, "attention_backend": "sdpa"}
    requests = [greedy(i, [(3 * i + j) % 50 for j in range(3 + i)], 24) for i in range(5)]
    expected = finish(engine_for(folder, **room), requests)
    engine, executor = graphed(folder, **room)
    assert finish(engine, requests) == expected
    assert len(executor.settings.cache.num_blocks) == 2


@pytest.mark.parametrize("family", ["qwen3moe", "gptoss", "deepseekv2", "deepseekv3"])
def test_experts_and_latent_rows_are_replayed(family: str, tmp_path: Path):
    """Who is chosen is never asked for: the tokens of the CPU's executor, drawn in the graph."""
    folder = save(tiny_model(family, vocab_size=VOCABULARY), tmp_path)
    room = {"kernels": "torch", "block_size": 4, "max_num_seqs": 5, "attention_backend": "sdpa"}
    requests = [Request(i, [5 + i, 9, 3], one) for i, one in enumerate([*PLAIN, PLAIN[0]])]
    expected = finish(engine_for(folder, **room), requests)
    before = Recorder.num_replays
    engine, executor = graphed(folder, 1, **room)
    assert finish(engine, requests) == expected
    assert Recorder.num_replays - before >= 5
    assert executor.graphs is not None and not executor.graphs.missing


def test_prompts_and_more_rows_than_any_graph_run_without_one(folder: Path):
    """A step of a chunk beside decodes is computed as it is; nothing is asked of the graphs."""
    engine, executor = graphed(folder, block_size=4, max_num_seqs=3, num_blocks=40)
    graphs = executor.graphs
    assert graphs is not None and sorted(graphs.captured) == [
        GraphKey(rows, graphs.widths[0], True) for rows in (1, 2, 3)
    ]
    before = Recorder.num_replays
    finish(engine, [greedy(0, [3, 4, 5, 6], 1)])
    assert Recorder.num_replays == before, "a prompt is no decode"
    finish(engine, [greedy(1, [7, 8], 4)])
    assert Recorder.num_replays == before + 3


def test_what_has_no_graph_is_captured_when_the_engine_is_idle(folder: Path):
    """A longer context than those of the start: computed as it is, and replayed from then on."""
    room = {"block_size": 1, "max_num_seqs": 2, "num_blocks": 60, "prefix_cache": False}
    engine, executor = graphed(folder, **room)
    graphs = executor.graphs
    assert graphs is not None
    graphs.widths = [8, graphs.widths[-1]]
    graphs.captured.clear()
    executor._capture(graphs.first_keys(draws=True))
    request = greedy(0, [5] * 7, 9)
    first = finish(engine, [request])
    asked = GraphKey(1, graphs.widths[-1], True)
    assert graphs.missing == {asked: 7}
    executor.probe(0)
    assert not graphs.missing and asked in graphs.captured
    before = Recorder.num_replays
    assert finish(engine, [request]) == first
    assert Recorder.num_replays == before + 8
    assert executor.describe().kernels["graphs"][0] == "3 of decode steps"


def test_rows_of_nobody_change_nothing_but_the_null_block(folder: Path):
    """Three decodes in a graph of four rows: all other blocks are as after the step without it."""
    room = {"block_size": 4, "max_num_seqs": 8, "num_blocks": 30}
    engine, executor = graphed(folder, **room)
    plain = engine_for(folder, **room, kernels="torch", attention_backend="sdpa")
    requests = [greedy(i, [4 + i, 9, 8], 6) for i in range(3)]
    assert finish(engine, requests) == finish(plain, requests)
    for own, other in zip(executor.kv, plain.executor.kv, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(own.k[1:], other.k[1:], atol=1e-5, rtol=1e-5)
        assert torch.isfinite(own.k[0]).all()


PLAIN = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(top_k=7, top_p=0.8, min_p=0.02, seed=4, max_tokens=9, ignore_eos=True),
]
EDITED = [
    SamplingParams(temperature=0, presence_penalty=1.5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={3: 4.0}, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=4, stop_token_ids=[3], max_tokens=9),
    SamplingParams(seed=5, grammar=grammars.regex("[a-f]{9}", "p"), max_tokens=9),
]


class Outside(TorchDispatchMode):
    """The operations of a step that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def decodes(folder: Path, params: list[SamplingParams], overlap: int) -> tuple[Any, Counter[str]]:
    """(answers, what decode steps queue outside graphs); a replay is not looked into."""
    engine, executor = graphed(folder, overlap, block_size=4, max_num_seqs=8, num_blocks=60)
    outside, whole = Outside(), Recorder.replay
    submit, sample = executor.submit, executor.sample
    is_decode = [False]

    def unseen(self: Recorder) -> None:
        is_decode[0] = True
        with _disable_current_modes():
            whole(self)

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def run(*given: Any) -> None:
            before = outside.names.copy()
            is_decode[0] = is_decode[0] and call is sample
            with outside:
                call(*given)
            if not is_decode[0]:
                outside.names = before

        return run

    with patch.object(Recorder, "replay", unseen):
        executor.submit, executor.sample = counted(submit), counted(sample)
        requests = [Request(i, [5 + i, 9, 3], one) for i, one in enumerate(params)]
        found = finish(engine, requests)
    return found, outside.names


VIEWS = {"slice", "view", "select", "as_strided", "detach", "alias", "_unsafe_view", "unsqueeze"}
COPIES = {"copy_", "clone", "_to_copy"}
OF_THE_HOST = {"lift_fresh", "empty", "to", "resolve_conj", "resolve_neg"}
"""Arrays as tensors, room for them, tensors as lists."""
NOTHING = VIEWS | COPIES | OF_THE_HOST


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_plain_decode_is_one_launch(folder: Path, overlap: int):
    """Greedy, temperature and filters: inputs go up, the graph runs, results are copied."""
    room = {"kernels": "torch", "attention_backend": "sdpa", "block_size": 4, "max_num_seqs": 8}
    requests = [Request(i, [5 + i, 9, 3], one) for i, one in enumerate(PLAIN)]
    found, outside = decodes(folder, PLAIN, overlap)
    assert found == finish(engine_for(folder, **room), requests)
    assert outside["clone"] > 5 and outside.keys() <= NOTHING, outside


@pytest.mark.parametrize("number", range(len(EDITED)))
def test_a_row_that_is_edited_is_sampled_behind_its_graph(folder: Path, number: int):
    """Beside plain rows, which get the tokens that they get without it."""
    room = {"kernels": "torch", "attention_backend": "sdpa", "block_size": 4, "max_num_seqs": 8}
    params = [PLAIN[0], EDITED[number], PLAIN[2]]
    requests = [Request(i, [5 + i, 9, 3], one) for i, one in enumerate(params)]
    found, outside = decodes(folder, params, 0)
    expected = finish(engine_for(folder, **room), requests)
    for key, answer in found.items():
        same(answer, expected[key])
    assert not outside.keys() <= NOTHING


def test_the_recorder_sees_a_moved_input():
    """An input at another address, and an operation of another size, are not what was captured."""
    inputs = [torch.ones(3)]
    recorder = Recorder()
    recorder.capture(lambda: inputs[0] * 2)
    recorder.replay()
    kept = inputs[0]
    inputs[0] = torch.ones(3)
    with pytest.raises(AssertionError, match="not captured"):
        recorder.replay()
    inputs[0] = kept
    recorder.replay()


def test_who_has_graphs(folder: Path):
    """Attention that reads lengths on the host, and experts, are computed as they come."""
    spec = read_model_spec(folder)
    assert choose_graphs(EngineOptions(), "cuda", "triton", spec, True)[0]
    assert choose_graphs(EngineOptions(), "cuda", "varlen", spec, True)[0]
    assert not choose_graphs(EngineOptions(graphs=False), "cuda", "triton", spec, True)[0]
    for host in ("sdpa", "flashinfer"):
        chosen, why = choose_graphs(EngineOptions(), "cuda", host, spec, True)
        assert not chosen and host in why
    assert not choose_graphs(EngineOptions(), "cpu", "sdpa", spec, True)[0]
    experts = ExpertsSpec(count=4, active=2, intermediate_size=8, normalize=True)
    layers = tuple(replace(layer, sparse=True) for layer in spec.layers)
    sparse = replace(spec, experts=experts, layers=layers)
    for kind, kernels, expected in (
        ("none", "cuda", True),
        ("int4", "cublas", True),
        ("fp8", "cuda", True),
        ("none", "torch", False),
    ):
        at_once = experts_at_once(Quantization.of(kind), kernels, sparse)
        assert at_once == expected
        assert choose_graphs(EngineOptions(), "cuda", "triton", sparse, at_once)[0] == expected
    permuted = Quantization((("*", Format("int4", 64, permuted=True)),))
    assert not experts_at_once(permuted, "cuda", sparse)
    assert experts_at_once(permuted, "cuda", spec)


def test_a_device_graph_needs_a_device():
    if torch.cuda.is_available():
        pytest.skip("there is one: see tests/gpu")
    with pytest.raises((RuntimeError, AssertionError)):
        DeviceGraph().capture(lambda: torch.ones(1))
