"""The products of 16 and 8 bits, alone and of experts; run with TRITON_INTERPRET=1 by
`test_interpreted`.

Small shapes, as in `cases`.
"""

import pytest
import torch

from headway.runtime.cuda.triton.linear import linear, outputs_a_tile, pack, stack
from headway.runtime.cuda.triton.linear_int4 import linear_int4
from headway.runtime.cuda.triton.linear_int4 import pack as pack_int4
from headway.runtime.cuda.triton.linear_int4 import stack as stack_int4
from headway.runtime.cuda.triton.types import INTERPRETED
from headway.runtime.kernels import reference
from headway.runtime.kernels.grouped import visits_of
from headway.runtime.kernels.triton_linear import WideningLinear
from headway.runtime.rounding import RoundedWeight, round_weight, round_weight_fp8
from headway.spec.formats import INT8, Format
from interpret.closeness import TYPES, close, drawn

assert INTERPRETED, "run by test_interpreted.py"
EVERY_CODE = torch.arange(256, dtype=torch.uint8)
"""Of e4m3; two are NaN, which no checkpoint may hold."""
SHAPES = [(1, 40, 64), (5, 37, 150)]


def fp8_weight(outputs: int, inputs: int, group: int, seed: int = 3) -> RoundedWeight:
    """e4m3 numbers with a scale for each output and group."""
    levels = drawn(outputs, inputs, dtype=torch.float32, seed=seed) * 60
    groups = -(-inputs // group) if group else 1
    scales = drawn(outputs, groups, dtype=torch.float32, seed=seed + 1).abs() / 50 + 1e-3
    return RoundedWeight(levels.to(torch.float8_e4m3fn), scales, group)


def int8_weight(outputs: int, inputs: int, group: int) -> RoundedWeight:
    """int8 levels in groups, as MXFP4 is held."""
    draw = torch.Generator().manual_seed(2)
    levels = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8)
    scales = torch.rand(outputs, -(-inputs // group), generator=draw) / 500
    return RoundedWeight(levels, scales, group, kind="int8")


def check(weight: RoundedWeight, tokens: int, dtype: torch.dtype, bias: bool) -> None:
    """Against the plain weights, in fp64."""
    outputs, inputs = weight.levels_OH.shape
    x = drawn(tokens, inputs, dtype=dtype)
    added = drawn(outputs, dtype=dtype, seed=4) if bias else None
    expected = x.double() @ weight.plain().double().T
    expected = expected if added is None else expected + added.double()
    close(linear(x, pack(weight), added), expected.to(dtype), 16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_weights_of_16_bits(tokens, outputs, inputs, dtype):
    """Inputs that fill no step, outputs that fill no tile, rows of a wider matrix."""
    x = drawn(tokens, 2 * inputs, dtype=dtype)[:, :inputs]
    weight, bias = drawn(outputs, inputs, dtype=dtype, seed=1), drawn(outputs, dtype=dtype, seed=2)
    for added in (None, bias):
        expected = x.double() @ weight.double().T
        expected = expected if added is None else expected + added.double()
        close(linear(x, weight, added), expected.to(dtype), 16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_fp8_weights(group, tokens, outputs, inputs, dtype):
    """A scale for each output, or for each group; the last may be smaller."""
    check(fp8_weight(outputs, inputs, group), tokens, dtype, bias=tokens > 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["16 bits", "fp8", "int8", "int4"])
def test_wide_rows_give_sums_that_are_not_rounded(kind, dtype):
    """Those of the head: in fp32, less than a step from what rows of the model's type give.

    The interpreter cuts bf16 off where a GPU rounds to the nearest.
    """
    x, plain = drawn(5, 96, dtype=dtype), drawn(40, 96, dtype=dtype, seed=1)
    if kind == "16 bits":
        wide, narrow = linear(x.float(), plain), linear(x, plain)
    elif kind == "int4":
        weight = pack_int4(round_weight(plain, 32))
        wide = linear_int4(x.float(), weight, None, dtype=dtype)
        narrow = linear_int4(x, weight, None)
    else:
        weight = pack(fp8_weight(40, 96, 0) if kind == "fp8" else int8_weight(40, 96, 32))
        wide, narrow = linear(x.float(), weight, dtype=dtype), linear(x, weight)
    step = torch.finfo(dtype).eps
    assert wide.dtype == torch.float32 and narrow.dtype == dtype
    assert ((wide - narrow.float()).abs() <= wide.abs() * step).all()
    assert (wide != narrow.float()).float().mean() > 0.9


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_int8_weights_in_groups(dtype):
    check(int8_weight(37, 96, 32), 3, dtype, bias=True)


def test_every_number_of_e4m3_is_widened_exactly():
    """Its least numbers and both zeros too: a product with ones of a single input."""
    codes = EVERY_CODE[(EVERY_CODE & 0x7F) != 0x7F]
    levels = codes[:, None].view(torch.float8_e4m3fn)
    weight = RoundedWeight(levels, torch.ones(len(codes), 1), 0)
    for dtype in (torch.float32, torch.float16):
        found = linear(torch.ones(1, 1, dtype=dtype), pack(weight))
        assert torch.equal(found[0].float(), levels[:, 0].float())


def test_a_checkpoints_blocks_of_128():
    """DeepSeek's and Qwen's: 128 outputs and 128 inputs have a scale; what torch says of it."""
    levels = (drawn(200, 300, dtype=torch.float32) * 60).to(torch.float8_e4m3fn)
    blocks = drawn(2, 3, dtype=torch.float32, seed=1).abs() / 50 + 1e-3
    weight = RoundedWeight(levels, blocks.repeat_interleave(128, 0)[:200].contiguous(), 128)
    x = drawn(3, 300, dtype=torch.bfloat16).float()
    kernel = WideningLinear(Format("fp8", 128), torch.float32)
    close(kernel(x, kernel.pack(weight), None), reference.fp8_linear(x, weight, None), 32)


def test_plain_weights_are_rounded_as_the_definition_says():
    """At load, by output."""
    weight, x = drawn(24, 64, dtype=torch.float32), drawn(3, 64, dtype=torch.float32, seed=1)
    kernel = WideningLinear(Format("fp8"), torch.float32)
    plain = round_weight_fp8(weight).plain()
    close(kernel(x, kernel.prepare(weight), None), x @ plain.T, 16)
    kernel = WideningLinear(INT8, torch.float32)
    close(kernel(x, kernel.prepare(weight), None), x @ round_weight(weight, 0).plain().T, 16)


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("kind", ["16 bits", "fp8", "fp8 by 32"])
def test_a_row_has_the_same_bits_in_any_batch(kind):
    """Alone, in a tile that others fill, in the next tile: bits of a prompt and of a decode."""
    x = drawn(70, 96, dtype=torch.float32)
    weight = drawn(40, 96, dtype=torch.float32, seed=1)
    if kind != "16 bits":
        weight = pack(fp8_weight(40, 96, 32 if kind.endswith("32") else 0))
    together = linear(x, weight)
    for row in (0, 3, 63, 64, 69):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(linear(x[3:9], weight), together[3:9])


def test_the_tile_is_the_layers():
    """By outputs and type alone: 128 programs for a row from 4,096 outputs on."""
    for outputs in (4096, 8192, 14_336, 28_672, 128_256):
        assert outputs / outputs_a_tile(outputs, torch.bfloat16) >= 112
    assert {outputs_a_tile(n, torch.float32) for n in (10, 10**6)} == {32}


# ── experts ─────────────────────────────────────────────────────────────────────────────────

CHOSEN = {
    "few": [[0, 2], [1, 2], [2, 4]],
    "all to one": [[3, 3]] * 40,
    "two tiles of one": [[1, 0]] * 70 + [[1, 4]] * 3,
}


def experts_case(name, dtype, outputs=24, inputs=48):
    """(rows sorted by expert, visits, the expert of each row, plain matrices of 5, their bias)."""
    experts_TK = torch.tensor(CHOSEN[name])
    visits = visits_of(experts_TK, 5)
    x = drawn(experts_TK.numel(), inputs, dtype=dtype)
    weights = drawn(5, outputs, inputs, dtype=torch.float32, seed=1)
    return x, visits, experts_TK.flatten()[visits.order_V], weights, drawn(5, outputs, dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_experts_multiply_their_own_rows(name, dtype):
    x, visits, expert_V, weights, bias = experts_case(name, dtype)
    weights = weights.to(dtype)
    expected = torch.einsum("vh,voh->vo", x.double(), weights[expert_V].double())
    for added, more in ((None, 0), (bias, bias.double()[expert_V])):
        close(linear(x, weights, added, visits), (expected + more).to(dtype), 16)
    close(
        reference.grouped_linear(x, weights, None, visits.starts_E1),
        expected.to(dtype),
        16,
    )


@pytest.mark.parametrize("kind", ["fp8", "fp8 by 16", "int8", "int4"])
@pytest.mark.parametrize("name", CHOSEN)
def test_experts_in_other_formats(name, kind):
    x, visits, expert_V, weights, bias = experts_case(name, torch.float32)
    round_one = {
        "fp8": round_weight_fp8,
        "fp8 by 16": lambda _: fp8_weight(24, 48, 16),
        "int8": lambda plain: round_weight(plain, 0),
        "int4": lambda plain: round_weight(plain, 32),
    }[kind]
    rounded = [round_one(plain) for plain in weights]
    plain = torch.stack([one.plain() for one in rounded])
    expected = torch.einsum("vh,voh->vo", x, plain[expert_V]) + bias[expert_V]
    if kind == "int4":
        found = linear_int4(x, stack_int4([pack_int4(one) for one in rounded]), bias, visits)
    else:
        found = linear(x, stack([pack(one) for one in rounded]), bias, visits)
    close(found, expected, 16)


@pytest.mark.usefixtures("ordered_dots")
def test_a_visit_has_the_same_bits_whoever_else_is_there():
    """One token alone, and among others that visit the same experts."""
    weights = drawn(5, 24, 48, dtype=torch.float32, seed=1)
    experts_TK = torch.tensor(CHOSEN["two tiles of one"])
    x_TH = drawn(len(experts_TK), 48, dtype=torch.float32)

    def outputs(experts_TK, x_TH):
        visits = visits_of(experts_TK, 5)
        rows = linear(x_TH[visits.order_V // 2], weights, None, visits)
        return torch.empty_like(rows).index_copy_(0, visits.order_V, rows).unflatten(0, (-1, 2))

    together = outputs(experts_TK, x_TH)
    for token in (0, 69, 72):
        one = slice(token, token + 1)
        assert torch.equal(outputs(experts_TK[one], x_TH[one]), together[one])
