"""Weights that a checkpoint holds rounded: their definition, and layers whose parts differ."""

import pytest
import torch
from torch import Tensor

from headway.core.formats import INT8, PLAIN, Format
from headway.core.quantization import Quantization
from headway.runtime.kernels import Kernels, reference
from headway.runtime.kernels.parts import PartsLinear
from headway.runtime.kernels.quantized import RoundedLinear
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.layers import Linear
from headway.runtime.rounding import RoundedWeight, fused, round_rows, round_weight

Q4, Q8 = Format("int4", 32, fp32_scales=True, offsets="any"), Format("int8", 32)


def some_weight(format: Format, outputs: int, inputs: int, seed: int = 0) -> RoundedWeight:
    """Any numbers that the format holds."""
    draw = torch.Generator().manual_seed(seed)
    least, most = (-8, 8) if format.kind == "int4" else (-128, 128)
    levels = torch.randint(least, most, (outputs, inputs), generator=draw, dtype=torch.int8)
    groups = -(-inputs // format.group) if format.group else 1
    scales = torch.randn(outputs, groups, generator=draw) / inputs**0.5
    if format.group and not format.fp32_scales:
        scales = scales.half().float()
    offsets = None
    if format.offsets == "zeros":
        offsets = scales * torch.randint(-7, 9, scales.shape, generator=draw)
    elif format.offsets == "any":
        offsets = torch.randn(outputs, groups, generator=draw) / inputs**0.5
    order = torch.randperm(inputs, generator=draw) if format.permuted else None
    return RoundedWeight(levels, scales, format.group, offsets, order, format.kind)


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
    levels, scales = round_rows(x)
    wanted = levels.double() * scales[:, None].double() @ weight.plain().double().T + bias
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
        layer.take([q, k, third])
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
    layer.take([gate, up])
    (whole,) = layer.matrices
    assert torch.equal(whole.levels_OH, torch.cat([gate.levels_OH, up.levels_OH]))
    assert torch.equal(whole.offsets_OG, torch.cat([gate.offsets_OG, up.offsets_OG]))


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
