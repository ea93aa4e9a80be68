"""Weights that a checkpoint holds rounded: their definition, and layers whose parts differ."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.runtime.kernels import Kernels, reference
from headway.runtime.kernels.parts import PartsLinear, pack_parts
from headway.runtime.kernels.quantized import RoundedLinear
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.layers import Linear
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.lower import lower
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.quantized.gguf_blocks import PACKINGS
from headway.runtime.rounding import (
    SUPER_BLOCK,
    RoundedWeight,
    dequantized_rows,
    fused,
    round_weight,
)
from headway.spec.formats import INT8, PLAIN, Format
from headway.spec.quantization import Quantization
from parity.native_sets import NAMES, each_instruction_set, loaded, operands
from parity.rounded_weights import some_weight

OF_OTHERS = [
    Format(kind, group, wide, offsets, permuted)
    for kind, group in [("int4", 32), ("int4", 64), ("int4", 128), ("int8", 16), ("int8", 32)]
    for wide, offsets, permuted in [
        *((False, "none", False), (True, "none", True), (False, "zeros", False)),
        *((True, "zeros", False), (True, "any", False)),
    ]
] + [Format("int8", 64), Format("int8", 128, offsets="zeros"), Format("int8", permuted=True)]
OF_OTHERS += [
    Format(kind, group, True, offsets, super_block=SUPER_BLOCK)
    for kind, group, offsets in [("int4", 32, "any"), ("int8", 32, "any"), ("int8", 16, "none")]
]
Q4, Q8 = Format("int4", 32, fp32_scales=True, offsets="any"), Format("int8", 32)


def test_fused_products_are_rounded_once():
    """1 + 2⁻²³ + 2⁻²⁴ - 2⁻⁵⁴ is below the middle of two numbers, and in fp64 it is the middle."""
    first, second = torch.tensor(2**-24 * (1 + 2**-15)), torch.tensor(1 - 2**-15)
    added = torch.tensor(1 + 2**-23)
    assert fused(first, second, added) == added
    assert (first.double() * second.double() + added.double()).float() != added
    assert fused(-first, second, -added) == -added


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("offsets", ["none", "zeros", "any"])
@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int8", 16), ("int8", 0)])
def test_products_are_those_of_plain_weights(kind, group, offsets, permuted):
    """With rounded inputs: within fp32's rounding of weights that `plain` gives back."""
    format = Format(kind, group, fp32_scales=group > 0, offsets=offsets, permuted=permuted)
    weight = some_weight(format, 20, 75)
    assert weight.format == format and weight.fits(format)
    x, bias = torch.randn(9, 75, generator=torch.Generator().manual_seed(1)), torch.arange(20.0)
    rows = dequantized_rows(x if weight.order_H is None else x[:, weight.order_H.long()], format)
    wanted = rows.double() @ replace(weight, order_H=None).plain().double().T + bias
    found = reference.quantized_linear(x, weight, bias)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=2e-5)


def test_fp8_is_multiplied_in_bf16():
    levels = torch.randn(20, 75, generator=torch.Generator().manual_seed(2))
    codes, scales = levels.to(torch.float8_e4m3fn), torch.rand(20, 1) + 0.5
    weight = RoundedWeight(codes, scales, 0)
    assert weight.format == Format("fp8")
    x = torch.randn(9, 75, dtype=torch.bfloat16)
    wanted = x.double() @ weight.plain().double().T
    found = reference.quantized_linear(x.float(), weight, None)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


def test_a_weight_of_super_blocks_takes_the_bytes_of_its_file():
    """Q4_K: 144 bytes of 256 numbers in the file, 148 here, with a whole byte for each scale."""
    libraries = [loaded(each, 1) for each in NAMES]
    for name, taken in [("Q4_K", 148), ("Q5_K", 276), ("Q6_K", 274), ("IQ4_XS", 266)]:
        format = PACKINGS[name].format
        weight = some_weight(format, 64, 512)
        assert weight.format == format and weight.fits(replace(format, super_block=0))
        assert not replace(weight, supers=None).fits(format)
        assert format.num_bytes(64, 512) == 64 * 2 * taken
        for library in libraries:
            assert NativeQuantizedLinear(library, format).pack(weight).nbytes == 64 * 2 * taken
        halves = [some_weight(format, 32, 512, seed) for seed in (1, 2)]
        joined = RoundedWeight.joined(halves)
        assert joined.fits(format) and joined.supers is not None
        scales, _ = joined.supers.scales_and_offsets(format.kind, format.group)
        assert torch.equal(scales, joined.scales_OG)


def test_numbers_of_a_weight_say_its_format():
    """A zero takes a byte only where scale · zero is the offset, bit for bit."""
    zeros = some_weight(Format("int4", 64, offsets="zeros"), 8, 128)
    assert zeros.zeros() is not None
    assert zeros.fits(Format("int4", 64, offsets="any")) and not zeros.fits(Format("int4", 64))
    assert zeros.offsets_OG is not None
    zeros.offsets_OG[3, 1] *= 1 + 2**-23
    near = RoundedWeight(zeros.levels_OH, zeros.scales_OG, 64, zeros.offsets_OG)
    assert near.zeros() is None and near.format == Format("int4", 64, offsets="any")
    assert not near.fits(Format("int4", 64, offsets="zeros"))


def kernels_of(*formats: tuple[str, Format]) -> Kernels:
    quantization = Quantization(formats)
    rounded = {format: RoundedLinear(format) for format in quantization.rounded}
    plain = PlainLinear(reference.linear)
    return Kernels(linear=plain, quantization=quantization, quantized=rounded)


class Build:
    """As much of `layers.Build` as a linear layer needs."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def weight(self, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"))


def test_parts_of_several_formats_are_products_side_by_side():
    """q and k in one format are one matrix; v in another is one of its own, or plain."""
    name, parts = "layers.0.attention.qkv", (24, 8, 8)
    q, k = some_weight(Q4, 24, 64, 1), some_weight(Q4, 8, 64, 2)
    v, plain = some_weight(Q8, 8, 64, 3), torch.randn(8, 64)
    x, bias = torch.randn(5, 64), torch.randn(40)
    for format, third in [(Q8, v), (PLAIN, None)]:
        kernels = kernels_of((f"{name}.v", format), (name, Q4))
        layer = Linear(Build(kernels), 64, 40, parts=parts)
        layer.kernel, layer.bias = kernels.linear_for(name, layer.parts), bias
        assert isinstance(layer.kernel, PartsLinear) and layer.kernel.outputs == [32, 8]
        layer.weight[32:] = plain
        layer.prepare_rounded([q, k, third])
        assert layer.weight is None and len(layer.matrices) == 2
        wanted = [reference.quantized_linear(x, one, None) for one in (q, k)]
        last = x @ plain.T if third is None else reference.quantized_linear(x, third, None)
        torch.testing.assert_close(layer(x), torch.cat([*wanted, last], 1) + bias)
        assert layer.prepared_bytes > q.nbytes + k.nbytes


def test_parts_of_one_format_are_one_matrix():
    name = "layers.3.mlp.gate_up"
    gate, up = some_weight(Q4, 24, 64, 1), some_weight(Q4, 24, 64, 2)
    kernels = kernels_of((name, Q4))
    layer = Linear(Build(kernels), 64, 48, parts=(24, 24))
    layer.kernel = kernels.linear_for(name, layer.parts)
    layer.prepare_rounded([gate, up])
    (whole,) = layer.matrices
    assert torch.equal(whole.levels_OH, torch.cat([gate.levels_OH, up.levels_OH]))
    assert torch.equal(whole.offsets_OG, torch.cat([gate.offsets_OG, up.offsets_OG]))


def test_a_part_that_is_plain_joins_one_that_the_checkpoint_rounded():
    """q in int8 by the checkpoint, k in 16 bits and int8 by the option: one matrix."""
    kernel, first = RoundedLinear(INT8), some_weight(INT8, 20, 75)
    plain = torch.randn(7, 75, generator=torch.Generator().manual_seed(5))
    packed = pack_parts(kernel, [first, plain], [20, 7])
    wanted = torch.cat([first.plain(), round_weight(plain, 0).plain()])
    assert torch.equal(packed.plain(), wanted)


def test_a_map_names_layers_or_their_parts():
    permuted = Format("int4", 64, permuted=True)
    kept = (("layers.0.attention.qkv.v", Q8), ("layers.0.attention.qkv", Q4))
    kept += (("layers.1.mlp.gate_up", permuted), ("head", PLAIN))
    found = Quantization.of("none", checkpoint=kept)
    assert found.formats_of("layers.0.attention.qkv") == [(Q4, 2), (Q8, 1)]
    assert found.formats_of("layers.1.mlp.gate_up") == [(permuted, 1), (permuted, 1)]
    assert found.formats_of("layers.1.mlp.down") == [(PLAIN, 1)] and found.main == Q8
    assert found.format_of("layers.0.attention.qkv.k") == Q4
    rest = Quantization.of("int4", 64, checkpoint=kept)
    assert rest.format_of("layers.1.mlp.down") == Format("int4", 64) == rest.main
    assert rest.format_of("head") == PLAIN and rest.formats_of("layers.0.attention.qkv") == [
        (Q4, 2),
        (Q8, 1),
    ]


@pytest.mark.parametrize(
    ("format", "each"),
    [
        (INT8, 1 + 4 / 96),
        (Format("int4", 32), 0.5 + 2 / 32),
        (Format("int4", 32, fp32_scales=True, offsets="any"), 0.5 + 8 / 32),
        (Format("int4", 32, offsets="zeros"), 0.5 + 3 / 32),
        (Format("int8", 16, fp32_scales=True), 1 + 4 / 16),
        (Format("fp8"), 1 + 4 / 96),
        (Format("int4", 32, permuted=True), 0.5 + 2 / 32 + 4 / 20),
    ],
)
def test_bytes_of_a_format(format, each):
    assert format.num_bytes(20, 96) == round(20 * 96 * each)


def test_what_is_rounded_at_load_beside_a_checkpoints_numbers():
    assert Format("int4", 128, True, "any").at_load == Format("int4", 128)
    assert Format("int4", 256).at_load == Format("int4", 64)
    assert Q8.at_load == INT8 and PLAIN.at_load == PLAIN and Format("fp8").at_load == PLAIN
    weight = round_weight(torch.randn(4, 64), 64)
    with pytest.raises(AssertionError):
        RoundedLinear(Format("int4", 32)).pack(weight)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return loaded(*request.param)


@each_instruction_set
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    format=st.sampled_from([INT8, Format("int4", 64), *OF_OTHERS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_native_kernels_are_the_definition(
    library, rows, inputs, outputs, format, dtype, bias, seed
):
    """Bit for bit, but for the one set whose processor may have no fused multiply-add."""
    x, _, bias_O = operands(rows, inputs, 1, dtype, False, seed)
    bias_O = torch.randn(outputs).to(dtype) if bias else None
    weight = some_weight(format, outputs, inputs, seed)
    kernel = NativeQuantizedLinear(library, format)
    found = kernel(x, kernel.pack(weight), bias_O)
    wanted = reference.quantized_linear(x, weight, bias_O)
    if library.instruction_set != "portable":
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-16)


@each_instruction_set
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_row_of_weights_with_offsets_does_not_depend_on_the_rows_beside_it(library, kind):
    """Short panels and long ones, at each height of a tile, in several tiles, and in blocks."""
    format = Format(kind, 32, fp32_scales=True, offsets="any")
    for inputs, outputs, checked in [(96, 200, 19), (2600, 70, 14)]:
        kernel = NativeQuantizedLinear(library, format)
        packed = kernel.pack(some_weight(format, outputs, inputs))
        x, _, _ = operands(67, inputs, 1, torch.float32, False)
        whole = kernel(x, packed, None)
        for rows in range(1, checked):
            assert torch.equal(kernel(x[:rows], packed, None), whole[:rows])


@each_instruction_set
def test_the_largest_levels_of_groups_do_not_overflow(library):
    """-128 · 127 over a group of 128, and 16 bits of sums of int4 that begin at -8 · Σ."""
    for format in [Format("int8", 128), Format("int4", 128, offsets="zeros")]:
        least = -128 if format.kind == "int8" else -8
        levels = torch.full((4, 512), least, dtype=torch.int8)
        levels[1, ::2], levels[2, 1::3] = -1 - least, -1 - least
        ones = torch.ones(4, 4)
        offsets = 8 * ones if format.kind == "int4" else None
        weight = RoundedWeight(levels, ones, 128, offsets, kind=format.kind)
        x = torch.cat([torch.ones(1, 512), -torch.ones(1, 512)]) * 127
        kernel = NativeQuantizedLinear(library, format)
        exact = x.double() @ weight.plain().double().T
        assert torch.equal(kernel(x, kernel.pack(weight), None), exact.float())


@each_instruction_set
def test_parts_are_written_beside_each_other_by_a_program(library):
    """q and k by one kernel, v by another, plain: as the calls one by one, biases too."""
    name, sizes = "layers.0.attention.qkv", (48, 16, 16)
    quantization = Quantization(((f"{name}.v", PLAIN), (name, Q4)))
    kernels = Kernels(
        linear=NativeLinear(library),
        quantization=quantization,
        quantized={Q4: NativeQuantizedLinear(library, Q4)},
        library=library,
    )
    layer = Linear(Build(kernels), 96, 80, parts=sizes)
    layer.kernel, layer.bias = kernels.linear_for(name, sizes), torch.randn(80)
    layer.weight[64:] = torch.randn(16, 96)
    layer.prepare_rounded([some_weight(Q4, 48, 96, 1), some_weight(Q4, 16, 96, 2), None])
    program, _ = lower(layer, library, torch.float32, given=96)
    assert program is not None and len(program.operations) == 2
    for rows in (1, 5, 40):
        x = torch.randn(rows, 96)
        assert torch.equal(program.run_rows(x), layer(x))


@each_instruction_set
@pytest.mark.parametrize("format", [Q8, Format("int4", 64, offsets="zeros", permuted=True)])
def test_packed_weights_of_others_are_kept_whole(library, format):
    """The bytes that a cache holds are those that are multiplied."""
    kernel = NativeQuantizedLinear(library, format)
    packed = kernel.pack(some_weight(format, 40, 200))
    blob = torch.cat([part.view(torch.uint8) for part in packed.tensors])
    assert len(blob) == kernel.blob_bytes(40, 200) == packed.nbytes
    x = torch.randn(3, 200)
    found = kernel(x, kernel.from_blob(blob, 40, 200), None)
    assert torch.equal(found, kernel(x, packed, None))


FP8_NUMBERS = [code for code in range(256) if code & 127 != 127]


def some_fp8(outputs: int, inputs: int, group: int, seed: int = 0) -> RoundedWeight:
    """Any numbers of type e4m3, the smallest and the largest too, with scales of either sign."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.randint(len(FP8_NUMBERS), (outputs, inputs), generator=draw)
    levels = torch.tensor(FP8_NUMBERS, dtype=torch.uint8)[places].view(torch.float8_e4m3fn)
    scales = torch.randn(outputs, -(-inputs // group) if group else 1, generator=draw) / inputs
    return RoundedWeight(levels, scales, group)


@each_instruction_set
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 400),
    outputs=st.integers(1, 150),
    group=st.sampled_from([0, 32, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_native_fp8_is_the_definition(library, rows, inputs, outputs, group, dtype, bias, seed):
    """Within fp32's rounding of sums of exact products; then the type's."""
    x, _, _ = operands(rows, inputs, 1, dtype, False, seed)
    bias_O = torch.randn(outputs).to(dtype) if bias else None
    weight = some_fp8(outputs, inputs, group, seed)
    kernel = NativeFp8Linear(library, weight.format)
    packed = kernel.pack(weight)
    found = kernel(x, packed, bias_O)
    wanted = reference.fp8_linear(x.float(), weight, bias_O)
    sizes = x.bfloat16().float().abs() @ weight.plain().abs().T + 1
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    error = (found.float() - wanted).abs()
    assert bool((error <= 2e-6 * sizes + rounding * wanted.abs()).all())
    assert packed.nbytes == kernel.blob_bytes(outputs, inputs)
    blob = torch.cat([part.view(torch.uint8) for part in packed.tensors])
    assert torch.equal(kernel(x, kernel.from_blob(blob, outputs, inputs), bias_O), found)


@each_instruction_set
@pytest.mark.parametrize("group", [0, 128])
def test_each_number_of_fp8_is_multiplied_exactly(library, group):
    """One input each: a product of 1 and the number, by few rows and by many."""
    numbers = torch.tensor(FP8_NUMBERS, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    levels = torch.zeros(len(numbers), 200, dtype=torch.float8_e4m3fn)
    levels[:, 131:132] = numbers
    scales = torch.full((len(numbers), 2 if group else 1), 0.5)
    kernel = NativeFp8Linear(library, Format("fp8", group))
    packed, x = kernel.pack(RoundedWeight(levels, scales, group)), torch.ones(31, 200)
    for rows in (1, 2, 3, 4, 5, 31):
        found = kernel(x[:rows], packed, None)
        assert torch.equal(found, (0.5 * numbers.float().T).expand(rows, -1))


@each_instruction_set
@pytest.mark.parametrize("group", [0, 128])
def test_a_row_in_fp8_does_not_depend_on_the_rows_beside_it(library, group):
    """In few tiles and in many; with more rows and inputs than tiles multiply at once."""
    for inputs, outputs, num_rows in [(96, 200, 67), (1300, 70, 67), (4400, 40, 600)]:
        weight = some_fp8(outputs, inputs, group)
        kernel = NativeFp8Linear(library, Format("fp8", group))
        packed = kernel.pack(weight)
        x, _, _ = operands(num_rows, inputs, 1, torch.float32, False)
        whole = kernel(x, packed, None)
        for rows in range(1, 15):
            assert torch.equal(kernel(x[:rows], packed, None), whole[:rows])
        assert torch.equal(kernel(x[33:], packed, None), whole[33:])
        sizes = x.bfloat16().float().abs() @ weight.plain().abs().T + 1
        wanted = reference.fp8_linear(x, weight, None)
        assert bool(((whole - wanted).abs() <= 4e-6 * sizes).all())


@each_instruction_set
def test_fp8_is_an_operation_of_a_program(library):
    """Beside a part in int4, written where it belongs; and only groups of whole steps."""
    assert not NativeFp8Linear.supports(Format("fp8", 48))
    assert not NativeFp8Linear.supports(Format("fp8", 128, permuted=True))
    name, sizes, fp8 = "layers.0.attention.qkv", (48, 16, 16), Format("fp8", 32)
    kernels = Kernels(
        linear=NativeLinear(library),
        quantization=Quantization(((f"{name}.v", Q4), (name, fp8))),
        quantized={
            Q4: NativeQuantizedLinear(library, Q4),
            fp8: NativeFp8Linear(library, fp8),
        },
        library=library,
    )
    layer = Linear(Build(kernels), 96, 80, parts=sizes)
    layer.kernel, layer.bias = kernels.linear_for(name, sizes), torch.randn(80)
    layer.prepare_rounded(
        [some_fp8(48, 96, 32), some_fp8(16, 96, 32, 1), some_weight(Q4, 16, 96, 2)]
    )
    program, _ = lower(layer, library, torch.float32, given=96)
    assert program is not None and len(program.operations) == 2
    for rows in (1, 5, 40):
        x = torch.randn(rows, 96)
        assert torch.equal(program.run_rows(x), layer(x))
