"""Native norms, ropes and gates equal their definitions: bit for bit where nothing is summed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headway.runtime.kernels import reference
from headway.runtime.native.layers import NativeLayers
from parity.native_sets import each_instruction_set

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The largest step from a number to the next, relative to it; 2 of them in fp32."""
LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
EDGES = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, 1.0, -1.0, 88.0, -88.0, -104.0, -120.0]


def numbers(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw) * scale).to(dtype)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where both are the same number, or both are none."""
    return (found == wanted) | (found.isnan() & wanted.isnan())


# ── a question ──────────────────────────────────────────────────────────────────────────────


@each_instruction_set
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, 40_000)], ids=str)
@pytest.mark.parametrize("are_finite", [None, reference.are_finite], ids=["native", "torch"])
def test_one_number_that_is_not_finite_is_found(library, dtype, shape, are_finite):
    """Wherever it lies; the largest of a type, subnormals and zeros are finite."""
    are_finite = are_finite or NativeLayers(library).are_finite
    x, info = numbers(3, dtype, *shape), torch.finfo(dtype)
    flat = x.view(-1)
    edges = torch.tensor([info.max, info.min, info.smallest_normal / 4, -0.0], dtype=dtype)
    flat[:4] = edges[: len(flat[:4])]
    assert are_finite(x) and are_finite(x[:0])
    for place in {0, len(flat) // 2, len(flat) - 1}:
        for bad in (torch.inf, -torch.inf, torch.nan):
            kept = flat[place].clone()
            flat[place] = bad
            assert not are_finite(x)
            flat[place] = kept


# ── norms ───────────────────────────────────────────────────────────────────────────────────


@each_instruction_set
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.one_of(st.integers(1, 80), st.sampled_from([127, 896, 1000, 4099])),
    dtype=st.sampled_from(TYPES),
    offset=st.sampled_from([0.0, 1.0]),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 10**6),
)
def test_norms_equal_the_reference(library, rows, width, dtype, offset, scale, seed):
    """Two steps of the type at most, as a sum on the other side of a rounding gives; few differ."""
    x = numbers(seed, dtype, rows, width, scale=scale)
    weight = numbers(seed + 1, dtype, width)
    found = NativeLayers(library).rms_norm(x, weight, 1e-6, offset)
    wanted = reference.rms_norm(x, weight, 1e-6, offset)
    assert found.dtype == dtype and found.shape == x.shape
    assert_close(found.double(), wanted.double(), rtol=2 * ULP[dtype], atol=LEAST[dtype])
    if dtype != torch.float32 and rows * width > 1000:
        assert (found == wanted).double().mean() > 0.99


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 20),
    heads=st.integers(1, 9),
    width=st.sampled_from([1, 8, 24, 64, 80, 129]),
    dtype=st.sampled_from(TYPES),
    before=st.integers(0, 50),
    seed=st.integers(0, 10**6),
)
def test_heads_are_normed_where_they_lie(library, rows, heads, width, dtype, before, seed):
    """Queries and keys as parts of the rows of one GEMM; a slice of every other row, too."""
    row = numbers(seed, dtype, 2 * rows, before + heads * width + 3)[::2]
    x = row[:, before : before + heads * width].unflatten(-1, (heads, width))
    weight = numbers(seed + 1, dtype, width)
    found = NativeLayers(library).rms_norm(x, weight, 1e-5)
    assert found.is_contiguous()
    assert torch.equal(found, NativeLayers(library).rms_norm(x.contiguous(), weight, 1e-5))
    wanted = reference.rms_norm(x, weight, 1e-5)
    assert_close(found.double(), wanted.double(), rtol=2 * ULP[dtype], atol=LEAST[dtype])


@each_instruction_set
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_in_any_batch(library, dtype):
    """Bit for bit, with one thread's share of rows and with many."""
    layers, x = NativeLayers(library), numbers(4, dtype, 300, 900)
    weight, (cos, sin) = numbers(5, dtype, 900), torch.rand(2, 300, 1, 10)
    heads = x.view(300, 30, 30)
    whole = layers.rms_norm(x, weight, 1e-6), layers.rope(heads, cos, sin)
    gates = {name: gate(x) for name, gate in layers.gated.items()}
    for begin, end in ((0, 1), (7, 8), (3, 40), (150, 300), (299, 300)):
        part = slice(begin, end)
        assert torch.equal(layers.rms_norm(x[part], weight, 1e-6), whole[0][part])
        assert torch.equal(layers.rope(heads[part], cos[part], sin[part]), whole[1][part])
        for name, gate in layers.gated.items():
            assert torch.equal(gate(x[part]), gates[name][part])


# ── ropes ───────────────────────────────────────────────────────────────────────────────────


@each_instruction_set
@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 40),
    heads=st.integers(1, 9),
    half=st.integers(0, 70),
    left=st.sampled_from([0, 0, 1, 16, 33]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 10**6),
)
def test_ropes_are_those_of_the_reference(library, tokens, heads, half, left, dtype, seed):
    """Bit for bit, on parts of wider rows, with dims that stay; the input is not touched."""
    size = max(1, 2 * half + left)
    row = numbers(seed, dtype, tokens, heads * size + 5)
    x = row[:, 2 : 2 + heads * size].unflatten(-1, (heads, size))
    before, angles = x.clone(), numbers(seed, torch.float32, tokens, 1, half, scale=9)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    found = NativeLayers(library).rope(x, cos, sin)
    assert torch.equal(found, reference.rope(x, cos, sin))
    assert torch.equal(x, before)


@each_instruction_set
@pytest.mark.parametrize("dtype", TYPES)
def test_ropes_in_place(library, dtype):
    """Output and input may be the same memory."""
    x, angles = numbers(1, dtype, 5, 3, 50), torch.rand(5, 1, 21)
    wanted = reference.rope(x, angles.cos(), angles.sin())
    cos, sin = angles.cos(), angles.sin()
    at = x.data_ptr()
    library.calls.rope(
        *(at, at, cos.data_ptr(), sin.data_ptr(), 5, 3, 50, 21, 150, 50, 150, 50),
        TYPES.index(dtype),
    )
    assert torch.equal(x, wanted)


# ── gates ───────────────────────────────────────────────────────────────────────────────────


@each_instruction_set
@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 30),
    inner=st.one_of(st.integers(1, 70), st.sampled_from([1000, 4864])),
    dtype=st.sampled_from(TYPES),
    activation=st.sampled_from(list(GATES)),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_gates_equal_the_reference(library, tokens, inner, dtype, activation, scale, seed):
    """Two steps of the type; torch's gelu loses its digits below -3, to 1e-6 of its input."""
    x = numbers(seed, dtype, tokens, 2 * inner, scale=scale)
    found, wanted = NativeLayers(library).gated[activation](x), GATES[activation](x)
    assert found.dtype == dtype and found.shape == (tokens, inner)
    lost = LEAST[dtype] if activation == "silu" else max(LEAST[dtype], 1e-6 * scale * scale)
    assert_close(found.double(), wanted.double(), rtol=2 * ULP[dtype], atol=lost)
    if dtype != torch.float32 and activation == "silu" and tokens * inner > 1000:
        assert (found == wanted).double().mean() > 0.999


@each_instruction_set
def test_activations_are_exact_to_a_millionth(library):
    """In fp32 against fp64: silu until e^88, gelu while z's own rounding does not show in e^z."""
    x = torch.linspace(-100, 100, 400_001)
    gate_up = torch.cat((x, torch.ones_like(x)))[None]
    gated = NativeLayers(library).gated
    silu = torch.nn.functional.silu(x.double())
    normal = x > -88
    assert_close(gated["silu"](gate_up)[0].double()[normal], silu[normal], rtol=1e-6, atol=0)
    gelu = torch.nn.functional.gelu(x.double(), approximate="tanh")
    found = gated["gelu_tanh"](gate_up)[0].double()
    near = x > -3
    assert_close(found[near], gelu[near], rtol=1e-6, atol=1e-45)
    assert_close(found, gelu, rtol=1e-6, atol=3e-8)


# ── extremes ────────────────────────────────────────────────────────────────────────────────


@each_instruction_set
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_is_seen_in_its_row_alone(library, dtype):
    """NaN and infinities come out as the reference has them, at any lane and in the tail."""
    layers, inf, nan = NativeLayers(library), float("inf"), float("nan")
    cos, sin = torch.rand(2, 6, 1, 11)
    for place in (0, 9, 21, 43):
        x, weight = numbers(place, dtype, 6, 44), numbers(1, dtype, 44)
        x[1, place], x[2, place], x[4, place] = nan, inf, -inf
        pairs = [
            (layers.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)),
            (layers.rope(x.view(6, 2, 22), cos, sin), reference.rope(x.view(6, 2, 22), cos, sin)),
            *((layers.gated[name](x), gate(x)) for name, gate in GATES.items()),
        ]
        for found, wanted in pairs:
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.isinf(), wanted.isinf())
        for found, _ in pairs:
            assert found[[0, 3, 5]].isfinite().all()


@each_instruction_set
@pytest.mark.parametrize("dtype", TYPES)
def test_edges_of_the_number_line(library, dtype):
    """Zeros keep their sign, subnormals are no zeros, large ones overflow where torch's do."""
    x = torch.tensor(EDGES).to(dtype)
    ones = torch.ones_like(x)
    layers = NativeLayers(library)
    for name, gate in GATES.items():
        gate_up = torch.cat((x, ones))[None]
        found, wanted = layers.gated[name](gate_up), gate(gate_up)
        assert_close(found, wanted, rtol=2 * ULP[dtype], atol=1e-30, equal_nan=True)
        if name == "silu":
            assert torch.equal(found.signbit(), wanted.signbit())
    rows = x[x.abs() < 1e30][:, None].expand(-1, 5).contiguous()
    weight = torch.ones(5, dtype=dtype)
    assert_close(layers.rms_norm(rows, weight, 1e-12), reference.rms_norm(rows, weight, 1e-12))
    zero = torch.zeros(1, 1, 2, dtype=dtype)
    angle = torch.ones(1, 1, 1)
    assert torch.equal(layers.rope(zero, angle, angle), zero)
