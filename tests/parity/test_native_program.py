"""A model's program computes, bit for bit, what its operations compute called one by one."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drive import engine_for
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan
from headway.core.request import SamplingParams
from headway.runtime.attention import AttentionRule, NativeAttention, NativeKVLayer
from headway.runtime.attention.int4 import filled_blocks
from headway.runtime.executor import TorchExecutor
from headway.runtime.native.layers import NativeLayers
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.lower import (
    NotLoweredError,
    OperationRecorder,
    Value,
    lower,
    share_buffers,
)
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.spec import FAMILIES as ROWS
from headway.spec.formats import GROUPS, INT8, PLAIN, Format
from parity.native_sets import each_instruction_set, loaded
from parity.paged import make_batch
from parity.tiny import FAMILIES, SIZES, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
]
BY_CALLS = (
    *("mixtral", "qwen2moe", "qwen3moe", "gptoss", "deepseekv2", "deepseekv3", "gemma3n"),
    *("granitehybrid", "qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe"),
)
"""Families with something on their way that no program does: a router, streams, latent rows,
states."""
LOWERED = [family for family in FAMILIES if family not in BY_CALLS]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return loaded(*request.param)


def executor_for(folder: Path, **options: object) -> TorchExecutor:
    executor = engine_for(folder, **{"block_size": 16, **options}).executor
    assert isinstance(executor, TorchExecutor)
    return executor


def random_steps(executor: TorchExecutor, rng: random.Random, most: int = 90) -> list[StepPlan]:
    """Four sequences in chunks of any length, one token or many at a time; a few steps."""
    groups, free = len(executor.settings.cache.num_blocks), iter(range(1, 10**6))
    lengths = [rng.choice([1, 17, rng.randint(2, most)]) for _ in range(4)]
    prompts = [[rng.randrange(SIZES["vocab_size"]) for _ in range(n)] for n in lengths]
    new = [NewSequence(i, 0, p, len(p), SamplingParams(), 0) for i, p in enumerate(prompts)]
    blocks = [[[next(free) for _ in range(6)] for _ in range(groups)] for _ in prompts]
    done, steps = [0] * 4, []
    while sum(done) < sum(lengths):
        rows = [i for i in range(4) if done[i] < lengths[i] and rng.random() < 0.8]
        counts = {i: min(lengths[i] - done[i], rng.choice([1, 30, 90])) for i in rows}
        advanced = [
            ScheduledSequence(
                *(i, done[i], prompts[i][done[i] : done[i] + counts[i]]),
                *(blocks[i] if not done[i] else [[]] * groups, False),
            )
            for i in sorted(rows, key=lambda i: counts[i])
        ]
        if advanced:
            steps.append(StepPlan(len(steps), new if not steps else [], advanced, []))
            for i in rows:
                done[i] += counts[i]
    return steps


@pytest.mark.parametrize("options", WEIGHTS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("family", LOWERED)
@torch.inference_mode()
def test_a_program_is_its_model(family: str, options: dict[str, str], tmp_path: Path):
    """Every family, in plain and rounded weights, over chunks and decodes; and so is its head."""
    executor = executor_for(save(tiny_model(family), tmp_path), **options)
    program = executor.target.program
    assert program is not None, executor.describe().kernels["step"]
    for seed in range(3):
        for plan in random_steps(executor, random.Random(seed)):
            executor.state.apply(plan)
            batch = executor.state.batch(plan)
            executor.target.program = None
            wanted = executor.forward(batch).clone()
            executor.target.program = program
            hidden_TH = executor.forward(batch)
            assert torch.equal(hidden_TH, wanted)
            logits_TV = executor.logits(hidden_TH)
            assert torch.equal(logits_TV, executor.model.logits(wanted))
            assert logits_TV.isfinite().all() and torch.equal(hidden_TH, wanted)
        executor.state.apply(StepPlan(100, [], [], [0, 1, 2, 3]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["int4", "int4/int8", "int8/int4"])
@torch.inference_mode()
def test_a_program_over_int4_kv_is_its_model(dtype: str, kv: str, tmp_path: Path):
    """Chunks that fill blocks and such that do not; the rounded blocks are the same, too."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 90}
    sizes = {"head_dim": 32, "max_position_embeddings": 384, "use_sliding_window": True, **windows}
    folder = save(tiny_model("qwen3", **sizes), tmp_path)
    options = {"dtype": dtype, "kv_cache_dtype": kv, "block_size": 64, "max_num_seqs": 96}
    executor = executor_for(folder, **options)
    program = executor.target.program
    assert program is not None, executor.describe().kernels["step"]
    filled = 0
    assert min(executor.settings.cache.num_blocks) > 72, "one of 3 groups has fewer than are named"
    for plan in random_steps(executor, random.Random(3), most=300):
        executor.state.apply(plan)
        batch = executor.state.batch(plan)
        executor.target.program = None
        wanted = executor.forward(batch).clone()
        rounded = [part.clone() for layer in executor.target.kv for part in layer.parts]
        for layer in executor.target.kv:
            layer.wipe(batch.slots_GT[layer.group])
        executor.target.program = program
        assert torch.equal(executor.forward(batch), wanted)
        again = [part for layer in executor.target.kv for part in layer.parts]
        assert all(map(torch.equal, again, rounded))
        filled += sum(len(filled_blocks(batch, layer)) for layer in executor.target.kv)
    assert filled > 2


@torch.inference_mode()
def test_a_program_reads_sink_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A dense family that has some, which nobody publishes: gpt-oss's router is not lowered."""
    row = replace(ROWS["LlamaForCausalLM"], sink_logits=True)
    monkeypatch.setitem(ROWS, "LlamaForCausalLM", row)
    executor = executor_for(save(tiny_model("llama"), tmp_path), load_format="dummy")
    program = executor.target.program
    assert program is not None, executor.describe().kernels["step"]
    found = []
    for logit in (-100.0, 3.0):
        for layer in executor.model.layers:
            layer.attention.sink_logits.weight.fill_(logit)
        (plan, *_) = random_steps(executor, random.Random(1))
        executor.state.apply(plan)
        batch = executor.state.batch(plan)
        executor.target.program = None
        wanted = executor.forward(batch).clone()
        executor.target.program = program
        found.append(executor.forward(batch).clone())
        assert torch.equal(found[-1], wanted)
        executor.state.apply(StepPlan(100, [], [], [0, 1, 2, 3]))
    assert not torch.equal(*found)


def test_what_is_not_lowered_is_told(tmp_path: Path):
    """A router chooses in torch; attention may; and then the model runs as it is drawn."""
    sparse = executor_for(save(tiny_model("qwen3moe"), tmp_path / "sparse"))
    folder = save(tiny_model("llama"), tmp_path / "plain")
    other = executor_for(folder, attention_backend="sdpa")
    plain = executor_for(folder, kernels="torch")
    assert sparse.describe().kernels["step"] == (
        "torch",
        "each operation called from Python: a program has no `softmax`",
    )
    for executor in (sparse, other, plain):
        assert executor.target.program is None
        assert executor.describe().kernels["step"][0] == "torch"
    assert executor_for(folder).describe().kernels["step"][0] == "native"


@torch.inference_mode()
def test_a_token_id_beyond_the_embedding_is_refused(tmp_path: Path):
    """As torch does, and the next step is as if nothing had happened."""
    executor = executor_for(save(tiny_model("llama"), tmp_path))
    token_ids, first = [3, 4, 5], None
    for step, ids in enumerate([token_ids, [3, SIZES["vocab_size"], 5], token_ids]):
        new = NewSequence(step, 0, ids, 3, SamplingParams(), 0)
        executor.state.apply(
            plan := StepPlan(step, [new], [ScheduledSequence(step, 0, ids, [[1]], True)], [])
        )
        batch = executor.state.batch(plan)
        if ids != token_ids:
            with pytest.raises(ValueError, match="beyond the embedding"):
                executor.forward(batch)
            continue
        found = executor.forward(batch).clone()
        first = found if first is None else first
        assert torch.equal(found, first)


# ── each instruction set ────────────────────────────────────────────────────────────────────


class Layer:
    """Every operation once: H channels, 4 heads of D on 2, an MLP, scaled sums."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype, format: Format) -> None:
        draw = torch.Generator().manual_seed(5)
        hidden, size, inner, self.sizes = 24, 10, 33, [40, 20, 20]
        self.layers, self.attention = NativeLayers(library), NativeAttention(library)
        self.linear = kernel_of(library, format)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype) / shape[-1] ** 0.5

        shapes = [(80, hidden), (hidden, 40), (2 * inner, hidden), (hidden, inner)]
        self.qkv, self.out, self.gate_up, self.down = (
            self.linear.prepare(weight(*shape)) for shape in shapes
        )
        self.embedding, self.norm = weight(50, hidden), weight(hidden)
        self.head_norm, self.bias, self.size = weight(size), weight(80), size
        angles = torch.rand(64, 1, 3, generator=draw) * 9
        self.cos, self.sin = angles.cos(), angles.sin()
        self.kv = NativeKVLayer.zeros((9, 8, 2, size), 0, dtype, "cpu")

    def __call__(self, token_ids: Tensor, batch: object, angles: tuple[Tensor, Tensor]) -> Tensor:
        norm, size = self.layers.rms_norm, self.size
        x = torch.nn.functional.embedding(token_ids, self.embedding) * 1.7
        q, k, v = self.linear(norm(x, self.norm, 1e-6), self.qkv, self.bias).split(self.sizes, -1)
        k = norm(k, self.norm[:20], 1e-6, 1.0)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
        q = self.layers.rope(norm(q, self.head_norm, 1e-6), *angles)
        rule = AttentionRule(scale=0.4, window=11, softcap=3.0)
        seen = self.attention.attend(q, self.layers.rope(k, *angles), v, self.kv, batch, rule)
        x = x + self.linear(seen.flatten(1), self.out, None) * 0.3
        inner = self.linear(norm(x, self.norm, 1e-6), self.gate_up, None)
        return x + self.linear(self.layers.gated["gelu_tanh"](inner), self.down, None)


@each_instruction_set
@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.integers(1, 30), min_size=1, max_size=2),
    dtype=st.sampled_from(TYPES),
    format=st.sampled_from([PLAIN, INT8, Format("int4", 32)]),
    seed=st.integers(0, 10**6),
)
def test_every_operation_is_the_one_called_alone(library, lens, dtype, format, seed):
    """One layer drawn by hand, twice, for few and then for many tokens."""
    layer = Layer(library, dtype, format)
    program, why = lower(partial(layer, batch=None, angles=(layer.cos, layer.sin)), library, dtype)
    assert program is not None, why
    for query_lens in (lens[:1], lens):
        batch = make_batch(query_lens, [n + 2 for n in query_lens], 8, random.Random(seed))
        batch.token_ids_T, batch.positions_T = batch.token_ids_T % 50, batch.positions_T % 64
        angles = layer.cos[batch.positions_T], layer.sin[batch.positions_T]
        wanted = layer(batch.token_ids_T, batch, angles)
        assert torch.equal(program(batch), wanted)


def kernel_of(library: NativeLibrary, format: Format) -> NativeLinear | NativeQuantizedLinear:
    return NativeLinear(library) if format == PLAIN else NativeQuantizedLinear(library, format)


def random_layer(library: NativeLibrary, dtype: torch.dtype, format: Format, *sizes: int):
    """(a table of 50 embeddings, a product's kernel, its packed weight, a bias)."""
    draw = torch.Generator().manual_seed(3)
    inputs, outputs = sizes
    table, weight = (
        torch.randn(50, inputs, generator=draw),
        torch.randn(*sizes[::-1], generator=draw),
    )
    kernel = kernel_of(library, format)
    packed = kernel.prepare((weight / inputs**0.5).to(dtype))
    return table.to(dtype), kernel, packed, torch.randn(outputs, generator=draw).to(dtype)


@each_instruction_set
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 70), st.sampled_from([513, 700])),
    inputs=st.sampled_from([24, 600, 2200]),
    inner=st.sampled_from([1, 33, 64, 96, 1312]),
    dtype=st.sampled_from(TYPES),
    format=st.sampled_from([PLAIN, INT8, *(Format("int4", size) for size in GROUPS)]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    biased=st.booleans(),
)
def test_a_product_gates_its_own_outputs(
    library, tokens, inputs, inner, dtype, format, activation, biased
):
    """In tiles where panels are whole, gates of few rows by the chunk, elsewhere behind it."""
    sizes = inputs, 2 * inner
    table, kernel, packed, bias = random_layer(library, dtype, format, *sizes)
    gated = NativeLayers(library).gated[activation]

    def forward(token_ids: Any) -> Any:
        x = torch.nn.functional.embedding(token_ids, table)
        return gated(kernel(x, packed, bias if biased else None))

    program, why = lower(forward, library, dtype)
    assert program is not None and len(program.operations) == 2, why
    batch = make_batch([tokens], [tokens], 8, random.Random(1))
    batch.token_ids_T = batch.token_ids_T % 50
    assert torch.equal(program(batch), forward(batch.token_ids_T))


@each_instruction_set
@pytest.mark.parametrize("format", [PLAIN, INT8, Format("int4", 64)], ids=str)
def test_a_product_gates_outputs_of_so_many_inputs_that_they_are_cut(library, format):
    """Sums of several panels wait in memory, few as the rows are."""
    table, kernel, packed, bias = random_layer(library, torch.bfloat16, format, 36_000, 128)
    gated = NativeLayers(library).gated["silu"]

    def forward(token_ids: Any) -> Any:
        return gated(kernel(torch.nn.functional.embedding(token_ids, table), packed, bias))

    program, why = lower(forward, library, torch.bfloat16)
    assert program is not None and len(program.operations) == 2, why
    batch = make_batch([32], [32], 8, random.Random(1))
    batch.token_ids_T = batch.token_ids_T % 50
    assert torch.equal(program(batch), forward(batch.token_ids_T))


@each_instruction_set
def test_outputs_that_somebody_else_reads_are_not_gated_away(library):
    """The gate is an operation of its own, and both numbers are right."""
    table, kernel, packed, bias = random_layer(library, torch.float32, PLAIN, 24, 64)
    half = kernel.prepare(torch.randn(64, 32, generator=torch.Generator().manual_seed(7)))

    def forward(token_ids: Any) -> Any:
        both = kernel(torch.nn.functional.embedding(token_ids, table), packed, bias)
        return kernel(NativeLayers(library).gated["silu"](both), half, None) + both

    program, why = lower(forward, library, torch.float32)
    assert program is not None and len(program.operations) == 5, why
    batch = make_batch([40], [40], 8, random.Random(1))
    batch.token_ids_T = batch.token_ids_T % 50
    assert torch.equal(program(batch), forward(batch.token_ids_T))


@pytest.mark.parametrize("num_layers", [1, 2, 9])
def test_gated_layers_share_their_buffers(num_layers: int):
    """A residual, a product's outputs, their gate and what comes back: four for any number."""
    recorder = OperationRecorder(torch.float32)
    x = recorder._new(8)
    start = {"code": "embed", "y": x}
    operations = [start]
    for _ in range(num_layers):
        both, gated, back, total = (recorder._new(width) for width in (64, 32, 8, 8))
        operations += [
            {"code": "linear", "x": x, "y": both, "second": gated},
            {"code": "linear", "x": gated, "y": back},
            {"code": "add", "x": x, "second": back, "y": total},
        ]
        x = total
    assert len(share_buffers(operations, recorder.widths, x.buffer)[1]) <= 4


@each_instruction_set
def test_outputs_that_are_the_result_are_not_gated_away(library):
    """Also where a gate that nobody reads follows."""
    table, kernel, packed, bias = random_layer(library, torch.float32, PLAIN, 24, 64)

    def forward(token_ids: Any) -> Any:
        both = kernel(torch.nn.functional.embedding(token_ids, table), packed, bias)
        NativeLayers(library).gated["silu"](both)
        return both

    program, why = lower(forward, library, torch.float32)
    assert program is not None and len(program.operations) == 3, why
    batch = make_batch([40], [40], 8, random.Random(1))
    batch.token_ids_T = batch.token_ids_T % 50
    assert torch.equal(program(batch), forward(batch.token_ids_T))


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 30),
    width=st.one_of(st.integers(1, 70), st.sampled_from([896, 4099])),
    dtype=st.sampled_from(TYPES),
    factor=st.sampled_from([1.0, 0.22, -3.1]),
    place=st.sampled_from(["new", "x", "added"]),
    seed=st.integers(0, 10**6),
)
def test_sums_are_those_of_torch(library, tokens, width, dtype, factor, place, seed):
    """A factor first, and the result over either of the two, or elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    x, added = (torch.randn(tokens, width, generator=draw).to(dtype) for _ in range(2))
    wanted = x * factor + added
    y = {"new": torch.empty_like(x), "x": x, "added": added}[place]
    at = [tensor.data_ptr() for tensor in (x, added, y)]
    library.calls.add(*at, tokens, width, factor, TYPES.index(dtype))
    assert torch.equal(y, wanted)


# ── buffers ─────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), max_size=40),
    st.booleans(),
)
def test_no_buffer_is_written_before_it_is_read(draws: list[tuple[bool, int, int]], is_given: bool):
    """Random operations on random earlier results, run on slots that hold who wrote last.

    Where `is_given` the second buffer is the caller's, whom nobody writes over.
    """
    recorder = OperationRecorder(torch.float32)
    recorder.widths = [3, 5]
    values = [Value(recorder, 0, 3), Value(recorder, 1, 5)]
    operations = [{"code": "norm", "y": value} for value in values[: 1 if is_given else 2]]
    for index, (is_sum, one, other) in enumerate(draws):
        x = values[one % len(values)]
        second = values[other % len(values)]
        recorder.widths.append(x.width + (0 if is_sum else index % 3))
        y = Value(recorder, len(values), recorder.widths[-1])
        operations.append({"code": "add" if is_sum else "norm", "x": x, "second": second, "y": y})
        values.append(y)
    if is_given and not draws:
        return
    given_buffer = values[1].buffer if is_given else None
    slots, sizes = share_buffers(operations, recorder.widths, values[-1].buffer, given_buffer)
    owner: dict[int, int] = {slots[values[1].buffer]: values[1].buffer} if is_given else {}
    for operation in operations:
        for name in ("x", "second"):
            if name in operation:
                assert owner[slots[operation[name].buffer]] == operation[name].buffer
        y = operation["y"]
        assert not is_given or slots[y.buffer] != slots[values[1].buffer]
        inputs = [slots[operation[name].buffer] for name in ("x", "second") if name in operation]
        assert operation["code"] == "add" or slots[y.buffer] not in inputs
        assert sizes[slots[y.buffer]] >= y.width
        owner[slots[y.buffer]] = y.buffer
    assert owner[slots[values[-1].buffer]] == values[-1].buffer
    assert len(sizes) <= max(2, len(values))


def test_values_refuse_what_no_operation_does():
    """Whatever a model file asks of its numbers, by method or by function."""
    value = Value(OperationRecorder(torch.float32), 0, 4)
    for use in (
        lambda: value.double(),
        lambda: torch.softmax(value, -1),
        lambda: value.mean(-1),
        lambda: value / 2.0,
        lambda: value * torch.ones(4),
    ):
        with pytest.raises(NotLoweredError):
            use()
