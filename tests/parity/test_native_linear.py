"""Native linear layers equal exact products, row by row, whoever else is in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.kernels import reference
from headway.runtime.native.linear import NativeLinear
from parity.native_sets import cut_in_blocks, each_instruction_set, operands

ROUNDING = {torch.float32: 2**-19, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    dtype=st.sampled_from(list(ROUNDING)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_exact_to_the_type(library, rows, inputs, outputs, dtype, bias, seed):
    x, weight, bias_O = operands(rows, inputs, outputs, dtype, bias, seed)
    kernel = NativeLinear(library)
    out = kernel(x, kernel.prepare(weight), bias_O)
    exact = reference.linear(
        x.double(), weight.double(), None if bias_O is None else bias_O.double()
    )
    assert out.dtype == dtype and out.shape == exact.shape
    torch.testing.assert_close(out.double(), exact, rtol=ROUNDING[dtype], atol=2**-18)


@each_instruction_set
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_row_does_not_depend_on_the_rows_beside_it(library, dtype):
    """Bit for bit, at each height of a tile and in several tiles."""
    x, weight, bias = operands(67, 129, 100, dtype, True)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    whole = kernel(x, packed, bias)
    for rows in (*range(1, 20), 31, 66):
        assert torch.equal(kernel(x[:rows], packed, bias), whole[:rows])
        assert torch.equal(kernel(x[-rows:], packed, bias), whole[-rows:])


@each_instruction_set
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("outputs", [1190, 2630])
def test_panels_multiplied_together_give_each_its_own(library, dtype, outputs):
    """Chunks of several panels at a time, then of fewer, and a last panel that is not whole."""
    x, weight, bias = operands(24, 130, outputs, dtype, True)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    whole = kernel(x, packed, bias)
    for rows in range(1, 14):
        assert torch.equal(kernel(x[:rows], packed, bias), whole[:rows])
    exact = reference.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, rtol=ROUNDING[dtype], atol=2**-9)


@each_instruction_set
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("outputs", [32_832, 32_840])
def test_logits_of_many_rows_are_those_of_few(library, dtype, outputs):
    """More than 4 MiB of them go past the caches, where each row begins at a cache line."""
    x, weight, bias = operands(66, 40, outputs, dtype, True)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    whole = kernel(x, packed, bias)
    for begin, end in [(0, 9), (9, 41), (41, 66)]:
        assert torch.equal(kernel(x[begin:end], packed, bias), whole[begin:end])


@each_instruction_set
@cut_in_blocks(atols=(2**-9, 2**-6))
def test_a_row_is_the_same_in_a_layer_cut_in_blocks(library, sizes, spans, checked, atol):
    x, weight, bias = operands(*sizes, torch.bfloat16, True)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    whole = kernel(x, packed, bias)
    for begin, end in [(0, 1), *spans]:
        assert torch.equal(kernel(x[begin:end], packed, bias), whole[begin:end])
    some = slice(*checked)
    exact = reference.linear(x[some].double(), weight.double(), bias.double())
    torch.testing.assert_close(whole[some].double(), exact, rtol=2**-8, atol=atol)


@each_instruction_set
def test_large_layers_are_shared_by_threads(library):
    """Many chunks, many times: none is lost, none is computed twice by accident."""
    x, weight, _ = operands(9, 512, 3000, torch.float32, False)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    exact = reference.linear(x, weight, None)
    first = kernel(x, packed, None)
    torch.testing.assert_close(first, exact, rtol=1e-5, atol=1e-5)
    for _ in range(100):
        assert torch.equal(kernel(x, packed, None), first)


@each_instruction_set
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_what_is_not_finite_stays_in_its_row(library, dtype):
    x, weight, _ = operands(5, 40, 30, dtype, False)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    clean = kernel(x, packed, None)
    x[1, 3], x[3, 7] = float("nan"), float("inf")
    found = kernel(x, packed, None)
    assert not found[[1, 3]].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], clean[[0, 2, 4]])


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_that_of_torch(library, dtype):
    """Sums of two numbers, of all sizes: ties, subnormals, overflow, infinities and NaN."""
    draw = torch.Generator().manual_seed(1)
    sizes = 2.0 ** torch.randint(-24, 16, (20_000, 2), generator=draw)
    pairs = torch.randn(20_000, 2, generator=draw).to(dtype) * sizes.to(dtype)
    edges = [[1.0, 2**-9], [1 + 2**-7, 2**-8], [1 + 2**-7, 2**-9], [65504, 15], [65504, 16]]
    edges += [[65504, 65504], [2**-24, 2**-24], [2**-14, -(2**-24)], [0.0, -0.0]]
    edges += [[float("inf"), 1], [float("-inf"), 1], [float("inf"), float("-inf")]]
    pairs = torch.cat([torch.tensor(edges, dtype=dtype), pairs])
    kernel = NativeLinear(library)
    found = kernel(pairs, kernel.prepare(torch.ones(1, 2, dtype=dtype)), None)[:, 0]
    wanted = pairs.float().sum(1).to(dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers], wanted[numbers])


def test_a_build_that_computes_wrongly_is_not_used(monkeypatch):
    from headway.runtime.native import load as loading

    monkeypatch.setattr(loading, "is_right", lambda library: False)
    library, why = loading.load(1)
    assert (library is None and "wrong" in why) or "not there" in why


def test_an_instruction_set_of_another_machine_is_a_sentence():
    from headway.runtime.native.load import load

    library, why = load(1, "avx1024")
    assert library is None and ("avx1024" in why or "not there" in why)
