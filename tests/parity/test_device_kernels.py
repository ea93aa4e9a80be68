"""What a GPU's backends and kernels do that needs none: shapes, read-backs, exact integers."""

import random

import pytest
import torch
from torch.testing import assert_close

from headway.runtime import rounding
from headway.runtime.attention import AttentionRule, KVLayer
from headway.runtime.attention.triton import ScaledKVLayer
from headway.runtime.attention.varlen import VarlenAttention
from headway.runtime.batch import Batch, Lens
from headway.runtime.kernels import reference
from headway.runtime.kernels.fp8_cuda import Fp8Linear
from headway.runtime.kernels.grouped import max_tiles, visits_of
from headway.runtime.rounding import (
    RoundedWeight,
    round_rows,
    round_rows_fp8,
    round_weight_fp8,
)
from headway.spec.formats import Format
from parity.devices import NoReadBacks
from parity.paged import make_batch


def on_meta(batch: Batch) -> Batch:
    """The same batch without data, with the lengths as a GPU has them."""
    table = batch.block_tables_GSB[0].int().to("meta")
    batch.lens = Lens(
        query_starts_S1=torch.empty(len(batch.query_lens) + 1, dtype=torch.int32, device="meta"),
        context_lens_S=torch.empty(len(batch.query_lens), dtype=torch.int32, device="meta"),
        tables_GSB=[table],
        rows_T=torch.empty(sum(batch.query_lens), dtype=torch.int64, device="meta"),
        longest_query=max(batch.query_lens),
        longest_context=max(batch.context_lens),
        has_placeholders=False,
    )
    batch.slots_GT = [slots.to("meta") for slots in batch.slots_GT]
    return batch


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("lens", [([1, 1], [9, 30]), ([1, 5], [9, 30])])
def test_varlen_attends_without_the_host(lens, window):
    """One call for decodes and chunks; no copy either way."""
    batch = on_meta(make_batch(*lens, 16, random.Random(1)))
    tokens = sum(lens[0])
    q = torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, tokens, 2, 64, dtype=torch.bfloat16, device="meta")
    layer = KVLayer.zeros((6, 16, 2, 64), 0, torch.bfloat16, "meta")
    with NoReadBacks("meta", may_send=False):
        rule = AttentionRule(scale=0.1, window=window)
        out = VarlenAttention().attend(q, k, v, layer, batch, rule)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


def fp8_weight(outputs: int, inputs: int) -> RoundedWeight:
    """A random matrix as a checkpoint holds it: e4m3 with a scale by output."""
    draw = torch.Generator().manual_seed(outputs)
    levels = torch.randn(outputs, inputs, generator=draw) * 60
    scales = torch.rand(outputs, 1, generator=draw) / 50 + 1e-3
    return RoundedWeight(levels.to(torch.float8_e4m3fn), scales, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 24, 64), (3, 21, 50), (40, 8, 8)])
def test_fp8_by_torchs_product_is_the_definition(tokens, outputs, inputs, biased, dtype):
    """Within a rounding of fp32 sums, whatever sizes are filled up to; rows that are not finite."""
    draw = torch.Generator().manual_seed(tokens)
    weight, kernel = fp8_weight(outputs, inputs), Fp8Linear(Format("fp8"), dtype)
    x = torch.randn(tokens, inputs, generator=draw).to(dtype)
    x[0, 0] = 0 if tokens > 1 else torch.inf
    bias = torch.randn(outputs, generator=draw).to(dtype) if biased else None
    found = kernel(x, kernel.pack(weight), bias)
    expected = reference.scaled_fp8_linear(x, weight, bias)
    assert (found.dtype, found.shape) == (dtype, (tokens, outputs))
    assert torch.equal(found.isfinite(), expected.isfinite())
    size = 1e-5 if dtype == torch.float32 else 1.6e-2
    found, expected = (out.float().nan_to_num(0, 0, 0) for out in (found, expected))
    assert_close(found, expected, atol=size, rtol=size)


def test_plain_weights_in_fp8():
    """By output as a row of activations is, in parts of any size; the worked example's numbers."""
    weight = torch.tensor([[896.0, 1.0, 0.0], [0, 0, 0], [-448, 0.5, 448]])
    rounded = round_weight_fp8(weight)
    assert rounded.scales_OG.tolist() == [[2.0], [0.0], [1.0]]
    assert torch.equal(rounded.plain(), weight)
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers, scales = round_rows_fp8(weight)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounding, "MAX_ROUNDED_NUMBERS", 100)
        rounded = round_weight_fp8(weight)
    assert rounded.fits(Format("fp8")) and torch.equal(rounded.scales_OG[:, 0], scales)
    assert torch.equal(rounded.levels_OH.float(), numbers.float())
    error = (rounded.plain() - weight.float()).square().mean().sqrt()
    assert 0.01 < error / weight.float().square().mean().sqrt() < 0.04
    kernel = Fp8Linear(Format("fp8"), torch.float32)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))
    found, expected = (
        kernel(x, one, None) for one in (kernel.prepare(weight), kernel.pack(rounded))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(20))
def test_visits_by_expert(seed):
    """Each place once, experts in order, tiles that cover each expert's rows and are enough."""
    rng = random.Random(seed)
    tokens, count, active = rng.choice([1, 7, 300]), rng.choice([4, 40]), rng.choice([1, 2, 4])
    few = rng.choice([count, 5])
    experts_TK = torch.tensor([rng.sample(range(min(few, count)), active) for _ in range(tokens)])
    visits = visits_of(experts_TK, count)
    assert sorted(visits.order_V.tolist()) == list(range(tokens * active))
    expert_V = experts_TK.flatten()[visits.order_V]
    assert (expert_V.diff() >= 0).all()
    starts, tiles = visits.starts_E1.tolist(), visits.tiles_E1.tolist()
    assert torch.equal(expert_V.bincount(minlength=count), visits.starts_E1.diff())
    for expert in range(count):
        assert tiles[expert + 1] - tiles[expert] == -(-(starts[expert + 1] - starts[expert]) // 64)
        own = visits.order_V[starts[expert] : starts[expert + 1]]
        assert (own.diff() > 0).all(), "in the order of the tokens"
    assert tiles[-1] <= max_tiles(tokens * active, count)
    assert visits.num_read == len(experts_TK.unique())


def test_fp8_is_near_the_exact_product():
    """Activations lose 3 of their bits: a few percent of the size of a sum."""
    weight, kernel = fp8_weight(64, 256), Fp8Linear(Format("fp8"), torch.bfloat16)
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(1))
    exact = reference.fp8_linear(x, weight, None)
    error = (kernel(x, kernel.pack(weight), None) - exact).square().mean().sqrt()
    assert 0 < error < 0.05 * exact.square().mean().sqrt()


def test_rows_in_fp8():
    """The worked example, zeros, what is not finite, and every number of e4m3 as it is."""
    numbers, scales = round_rows_fp8(
        torch.tensor([[896.0, 1.0, 0.0], [0, 0, 0], [1, torch.nan, 2], [-448, 0.5, 448]])
    )
    assert scales.tolist()[:2] == [2.0, 0.0] and scales.isnan().tolist() == [False] * 2 + [
        True,
        False,
    ]
    assert numbers[0].float().tolist() == [448.0, 0.5, 0.0]
    assert numbers[3].float().tolist() == [-448.0, 0.5, 448.0]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    again, scales = round_rows_fp8(every[None])
    assert scales.item() == 1 and torch.equal(again[0].float(), every)


def test_rounded_memory_gives_back_what_was_written():
    layer = ScaledKVLayer.zeros((4, 8, 2, 16), 0, torch.int8, "cpu")
    k, v = torch.randn(2, 5, 2, 16, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([8, 9, 15, 24, 31])
    layer.write(k, v, slots)
    found = layer.gather(torch.tensor([1, 3]))
    at = slots - torch.tensor([8, 8, 8, 16, 16])
    for x, memory in zip((k, v), found, strict=True):
        levels, scales = round_rows(x.flatten(0, 1))
        levels, scales = levels.view(x.shape), scales.view(x.shape[:2])
        assert torch.equal(memory[at], levels * scales[..., None])
        assert memory[1 + 1 :][0].abs().sum() == 0
    layer.wipe_where(slots, torch.tensor([True, False, True, False, False]))
    assert layer.gather(torch.tensor([1]))[0][[0, 7]].abs().sum() == 0
    assert layer.gather(torch.tensor([1]))[0][1].abs().sum() > 0
    layer.wipe(slots)
    assert all(not part[1:].any() for part in layer.parts)
