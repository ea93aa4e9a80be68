"""Native int8 and int4 layers compute what the definition says, row by row, whoever is beside."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.kernels.quantized import RoundedLinear
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.rounding import (
    LEVELS,
    RoundedWeight,
    rotate,
    rotation_of,
    round_rows,
    round_weight,
)
from headway.spec.formats import GROUPS, INT8, ROTATED_INT8, Format
from parity.native_sets import cut_in_blocks, each_instruction_set, loaded, operands

ROUNDING = {torch.float32: 2**-18, torch.bfloat16: 1.1 * 2**-7, torch.float16: 1.1 * 2**-10}
"""Sums apart by fp32's rounding may be rounded to neighbours in 16 bits."""
FORMATS = [INT8, ROTATED_INT8, *(Format("int4", group) for group in GROUPS)]
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(list(ROUNDING)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_native_equals_the_definition(library, rows, inputs, outputs, format, dtype, bias, seed):
    x, weight, bias_O = operands(rows, inputs, outputs, dtype, bias, seed)
    plain, native = RoundedLinear(format), NativeQuantizedLinear(library, format)
    expected = plain(x, plain.prepare(weight), bias_O)
    found = native(x, native.prepare(weight), bias_O)
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=2**-18)


@each_instruction_set
@each_format
def test_the_largest_levels_do_not_overflow(library, format):
    """Every product 127 · ±127, 127 · 7 or 127 · -8, over inputs of a large layer: exact sums."""
    inputs, group, (least, most) = 20_001, format.group, LEVELS[format.kind]
    signs = torch.ones(4, inputs)
    signs[1, ::2], signs[2, 1::3], signs[3] = -1, -1, -1
    levels = torch.where(signs > 0, most, least).to(torch.int8)
    count = -(-inputs // group) if group else 1
    native = NativeQuantizedLinear(library, format)
    weight = RoundedWeight(levels, torch.ones(4, count), group, rotated=format.rotated)
    packed = native.pack(weight)
    x = torch.cat([signs, -signs]) * 127
    exact = (x.double() @ levels.double().T).float()
    torch.testing.assert_close(native(x, packed, None), exact, rtol=1e-6, atol=0)


@each_instruction_set
@each_format
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_row_does_not_depend_on_the_rows_beside_it(library, format, dtype):
    """Bit for bit, at each height of a tile, in several tiles, with one thread or three."""
    x, weight, bias = operands(67, 261, 100, dtype, True)
    native = NativeQuantizedLinear(library, format)
    packed = native.prepare(weight)
    whole = native(x, packed, bias)
    for rows in (*range(1, 20), 31, 66):
        assert torch.equal(native(x[:rows], packed, bias), whole[:rows])
        assert torch.equal(native(x[-rows:], packed, bias), whole[-rows:])
    alone = NativeQuantizedLinear(loaded(library.instruction_set, 1), format)
    assert torch.equal(alone(x, packed, bias), whole)


@each_instruction_set
@each_format
@pytest.mark.parametrize("outputs", [1190, 2630])
def test_panels_multiplied_together_give_each_its_own(library, format, outputs):
    """Chunks of several panels at a time, then of fewer, and a last panel that is not whole."""
    x, weight, bias = operands(24, 130, outputs, torch.bfloat16, True)
    plain, native = RoundedLinear(format), NativeQuantizedLinear(library, format)
    packed = native.prepare(weight)
    whole = native(x, packed, bias)
    for rows in range(1, 8):
        assert torch.equal(native(x[:rows], packed, bias), whole[:rows])
    torch.testing.assert_close(whole, plain(x, plain.prepare(weight), bias), rtol=2**-7, atol=2**-7)


@each_instruction_set
@each_format
@pytest.mark.parametrize("outputs", [32_832, 32_840])
def test_logits_of_many_rows_are_those_of_few(library, format, outputs):
    """More than 4 MiB of them go past the caches, where each row begins at a cache line."""
    x, weight, bias = operands(66, 40, outputs, torch.bfloat16, True)
    native = NativeQuantizedLinear(library, format)
    packed = native.prepare(weight)
    whole = native(x, packed, bias)
    for begin, end in [(0, 9), (9, 41), (41, 66)]:
        assert torch.equal(native(x[begin:end], packed, bias), whole[begin:end])


@each_instruction_set
@each_format
@cut_in_blocks(atols=(2**-7, 2**-5))
def test_a_row_is_the_same_in_a_layer_cut_in_blocks(library, format, sizes, spans, checked, atol):
    x, weight, bias = operands(*sizes, torch.bfloat16, True)
    native = NativeQuantizedLinear(library, format)
    packed = native.prepare(weight)
    whole = native(x, packed, bias)
    for begin, end in [(0, 1), *spans]:
        assert torch.equal(native(x[begin:end], packed, bias), whole[begin:end])
    plain, some = RoundedLinear(format), slice(*checked)
    expected = plain(x[some], plain.prepare(weight), bias)
    torch.testing.assert_close(whole[some], expected, rtol=2**-7, atol=atol)


def extremes(dtype: torch.dtype, inputs: int = 75) -> torch.Tensor:
    """Rows that are hard to round: an outlier, nothing, the tiny, the huge, ties, not finite."""
    x = torch.randn(12, inputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[0, 17] = 6e4
    x[1] = 0
    x[2] *= 1e-7
    x[3] = torch.finfo(dtype).max
    x[4] = torch.arange(inputs).to(dtype) - 37
    x[4, 0] = 63.5
    x[5, 3], x[6, 74], x[7, 0] = float("nan"), float("inf"), float("-inf")
    x[8, :2] = torch.tensor([float("inf"), float("nan")])
    x[9] = torch.finfo(dtype).smallest_normal
    return x


@each_instruction_set
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("inputs", [75, 172, 320, 1088])
def test_rows_are_rounded_as_defined(library, dtype, inputs):
    """Bit for bit: blocks with a scale each, the last one short, rotated or not, padded."""
    x = extremes(dtype, inputs)
    for format in FORMATS:
        levels, scales = round_rows(rotate(x) if format.rotated else x, format.block)
        found = NativeQuantizedLinear(library, format).round_rows(x)
        rows = found.levels.view(len(x), -1)
        assert torch.equal(rows[:, :inputs], levels)
        assert not rows[:, inputs:].any()
        own, blocks = found.scales.view(len(x), -1), scales.shape[1]
        torch.testing.assert_close(own[:, :blocks], scales, rtol=0, atol=0, equal_nan=True)
        assert not own[:, blocks:].any()


def test_a_rotation_spreads_an_outlier_and_undoes_itself():
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    x[:, 70] = 100
    turned = rotate(x)
    assert turned[:, 64:128].abs().min() > 60 and turned.abs().max() < 140
    torch.testing.assert_close(rotate(turned) / 64, x, rtol=1e-5, atol=1e-4)
    weight = torch.randn(7, 192, generator=torch.Generator().manual_seed(1))
    rounded = round_weight(weight, 0, rotated=True)
    torch.testing.assert_close(rounded.plain(), weight, rtol=0, atol=0.05)


def test_an_outlier_costs_its_own_block_alone():
    """With one scale for a row the numbers beside an outlier of 100 would be 0."""
    x = torch.full((1, 192), 0.3)
    x[0, 0] = 100
    for block, exact in [(0, 0), (64, 128), (32, 160)]:
        levels, scales = round_rows(x, block)
        size = block or 192
        found = levels * scales.repeat_interleave(size, 1)
        assert int((found - x).abs().lt(1e-3).sum()) == exact + 1


@each_instruction_set
@each_format
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_what_is_not_finite_stays_in_its_row(library, format, dtype):
    x = extremes(dtype)
    _, weight, _ = operands(1, 75, 30, dtype, False)
    plain, native = RoundedLinear(format), NativeQuantizedLinear(library, format)
    found = native(x, native.prepare(weight), None)
    assert not found[5:9].isfinite().any()
    finite = torch.tensor([0, 1, 2, 4, 9, 10, 11])
    assert found[finite].isfinite().all()
    assert torch.equal(found[finite], native(x[finite], native.prepare(weight), None))
    expected = plain(x[finite], plain.prepare(weight), None)
    torch.testing.assert_close(found[finite], expected, rtol=ROUNDING[dtype], atol=2**-18)


@each_format
def test_weights_are_off_by_half_a_level_at_most(format):
    """But for what is as large as int4's level -8 with the other sign: it becomes 7."""
    group = format.group
    for seed in range(5):
        weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(seed))
        rounded = round_weight(weight, group, format.rotated)
        weight = rotate(weight) / rotation_of(300) if format.rotated else weight
        step = rounded.scales_OG.repeat_interleave(group or 300, 1)[:, :300]
        off = (rounded.levels_OH * step - weight).abs() / step.abs()
        clamped = (rounded.levels_OH == 7) & (weight / step > 7.5) & (group > 0)
        assert off[~clamped].max() < (0.51 if group else 0.5001)
        assert clamped.float().mean() < 0.01 and off.max() < 1.01


def test_the_largest_of_an_int4_group_is_level_minus_8():
    """Whatever its sign; of two as large the negative one, and zeros keep a scale of +0."""
    weight = torch.zeros(4, 64)
    weight[:3, :4] = torch.tensor([[0.8, -0.3, 0.76, 0], [-0.8, 0.3, 0.8, 0], [0, 0, -1.6, 1.4]])
    rounded = round_weight(weight, 32)
    assert rounded.levels_OH[:3, :4].tolist() == [[-8, 3, -8, 0], [-8, 3, 7, 0], [0, 0, -8, 7]]
    wanted = torch.tensor([[-0.1, 0], [0.1, 0], [0.2, 0], [0, 0]]).half().float()
    assert torch.equal(rounded.scales_OG, wanted) and not rounded.scales_OG[:, 1].signbit().any()
    for seed in range(5):
        weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(seed))
        groups, levels = (
            each.unflatten(1, (-1, 64)) for each in (weight, round_weight(weight, 64).levels_OH)
        )
        largest = groups.abs().argmax(-1, keepdim=True)
        assert levels.gather(-1, largest).eq(-8).all()


@each_instruction_set
def test_a_weight_that_is_not_finite_shows(library):
    weight = torch.ones(3, 64)
    weight[1, 5] = float("inf")
    for format in FORMATS:
        for kernel in (NativeQuantizedLinear(library, format), RoundedLinear(format)):
            out = kernel(torch.ones(2, 64), kernel.prepare(weight), None)
            assert not out[:, 1].isfinite().any()
            assert out[:, [0, 2]].isfinite().all()


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 70),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(list(ROUNDING)),
    power=st.integers(-130, 130),
    seed=st.integers(0, 99),
)
def test_one_pass_rounds_and_packs_as_defined(library, inputs, outputs, format, dtype, power, seed):
    """Bit for bit, for numbers of every size: scales that vanish or overflow are not excepted."""
    _, weight, _ = operands(0, inputs, outputs, dtype, False, seed)
    weight = (weight.double() * 2.0**power).to(dtype)
    same_panels(NativeQuantizedLinear(library, format), weight)


@each_instruction_set
@each_format
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_one_pass_rounds_what_is_hard_to_round_as_defined(library, format, dtype):
    weight = extremes(dtype)
    same_panels(NativeQuantizedLinear(library, format), weight[weight.isfinite().all(1)])


def same_panels(kernel: NativeQuantizedLinear, weight: torch.Tensor) -> None:
    """`prepare` gives what `pack` makes of the definition's numbers."""
    expected = kernel.pack(round_weight(weight, kernel.format.group, kernel.format.rotated))
    found = kernel.prepare(weight)
    assert torch.equal(found.panels, expected.panels)
    if found.scales is not None:
        torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
