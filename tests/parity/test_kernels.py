"""Faster kernels and attention backends equal their definitions in plain torch."""

import random

import pytest
import torch
from torch.testing import assert_close

from headway.runtime.attention import BACKENDS, AttentionRule, KVLayer
from headway.runtime.attention.sdpa import buckets
from headway.runtime.batch import Batch
from headway.runtime.kernels import onednn, reference
from headway.runtime.kernels.reference import PANEL_NUMBERS
from headway.runtime.kernels.upcast import UpcastLinear

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = [(4, 4), (7, 1), (14, 2), (8, 4), (6, 1)]
HEAD_DIMS = [8, 24, 64, 80, 128, 256]
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-19}
RULES = [
    AttentionRule(scale=0.125),
    AttentionRule(scale=0.2, window=17),
    AttentionRule(scale=0.3, softcap=2.0),
    AttentionRule(scale=0.3, window=1, softcap=5.0),
]


def linear_inputs(rows: int, hidden: int, outputs: int, bias: bool, dtype: torch.dtype):
    """x, weight and bias whose products are of size one."""
    x = torch.randn(rows, hidden).to(dtype)
    weight = (torch.randn(outputs, hidden) / hidden**0.5).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype) if bias else None


PRODUCTS = [
    pytest.param(reference.linear, id="torch"),
    pytest.param(
        onednn.linear,
        id="onednn",
        marks=pytest.mark.skipif(not onednn.available(), reason="torch is built without oneDNN"),
    ),
]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_upcast_linear_equals_an_exact_product(dtype: torch.dtype, product):
    """Within one rounding of the type, for odd sizes, one row, one output and reused scratch."""
    torch.manual_seed(0)
    random.seed(0)
    kernel = UpcastLinear(product)
    shapes = [(3, 1, 1), (1, 7, 5), (2, 64, 9), (3, 64, 9), (5, 1023, 1025), (17, 31, 1)]
    shapes += [tuple(random.randint(1, 300) for _ in range(3)) for _ in range(40)]
    for rows, hidden, outputs in shapes:
        x, weight, bias = linear_inputs(rows, hidden, outputs, rows % 2 == 0, dtype)
        exact = reference.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        out = kernel(x, weight, bias)
        assert out.dtype == dtype
        # torch's own narrow product, which one and two rows use, rounds before it adds the bias
        assert_close(out.double(), exact, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.skipif(not onednn.available(), reason="torch is built without oneDNN")
def test_onednn_linear_equals_an_exact_product():
    """Within the rounding of fp32, for odd sizes, strided rows, and beyond its row limit."""
    torch.manual_seed(2)
    random.seed(2)
    shapes = [(1, 1, 1), (1, 7, 5), (onednn.MANY_ROWS + 1, 9, 3), (onednn.MANY_ROWS, 65, 33)]
    shapes += [tuple(random.randint(1, 300) for _ in range(3)) for _ in range(40)]
    for rows, hidden, outputs in shapes:
        x, weight, bias = linear_inputs(2 * rows, hidden, outputs, rows % 2 == 0, torch.float32)
        strided = x[::2]
        exact = reference.linear(
            strided.double(), weight.double(), None if bias is None else bias.double()
        )
        out = onednn.linear(strided, weight, bias)
        assert_close(out.double(), exact, rtol=2**-18, atol=2**-18)


@pytest.mark.skipif(not onednn.available(), reason="torch is built without oneDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_linear_equals_an_exact_product(dtype: torch.dtype):
    """Within one rounding of the type, for odd sizes and any number of rows on one packing."""
    torch.manual_seed(3)
    random.seed(3)
    kernel = onednn.PackedLinear()
    for _ in range(20):
        hidden, outputs = random.randint(1, 300), random.randint(1, 300)
        _, weight, bias = linear_inputs(1, hidden, outputs, hidden % 2 == 0, dtype)
        packed = kernel.prepare(weight)
        for rows in (1, 2, random.randint(3, 40), 300):
            x = torch.randn(rows, hidden).to(dtype)
            exact = reference.linear(
                x.double(), weight.double(), None if bias is None else bias.double()
            )
            out = kernel(x, packed, bias)
            assert out.dtype == dtype
            assert_close(out.double(), exact, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


def test_upcast_linear_handles_weights_wider_and_longer_than_its_panel():
    """A row longer than the scratch, and outputs that do not divide into panels."""
    torch.manual_seed(1)
    kernel = UpcastLinear(reference.linear)
    for hidden, outputs in ((PANEL_NUMBERS + 3, 2), (4096, PANEL_NUMBERS // 4096 * 2 + 1)):
        x, weight, bias = linear_inputs(4, hidden, outputs, True, torch.bfloat16)
        exact = reference.linear(x.float(), weight.float(), bias.float())
        assert_close(kernel(x, weight, bias).float(), exact, rtol=2**-7, atol=2**-7)


def test_upcast_linear_leaves_fp32_weights_to_torch():
    """With fp32 weights there is nothing to widen: bit for bit the reference."""
    x, weight, bias = linear_inputs(9, 33, 21, True, torch.float32)
    kernel = UpcastLinear(onednn.linear)
    assert torch.equal(kernel(x, weight, bias), reference.linear(x, weight, bias))


def random_batch(rng: random.Random, block_size: int, num_blocks: int) -> Batch:
    """Decodes first, then chunks, each over blocks of its own in random order."""
    num_decodes, num_chunks = rng.randint(0, 6), rng.randint(0, 3)
    if num_decodes + num_chunks == 0:
        num_decodes = 1
    query_lens = [1] * num_decodes + [rng.randint(1, 40) for _ in range(num_chunks)]
    if num_chunks:  # a single token after the decodes would count as one of them
        query_lens[num_decodes] = max(2, query_lens[num_decodes])
    contexts = [
        rng.choice([length, rng.randint(length, 300)]) if length > 1 else rng.randint(1, 300)
        for length in query_lens
    ]
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    width = -(-max(contexts) // block_size)
    tables = torch.zeros(len(contexts), width, dtype=torch.int64)
    slots = []
    for row, (length, context) in enumerate(zip(query_lens, contexts, strict=True)):
        blocks = [free.pop() for _ in range(-(-context // block_size))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        slots += [
            blocks[at // block_size] * block_size + at % block_size
            for at in range(context - length, context)
        ]
    return Batch(
        token_ids_T=torch.zeros(len(slots), dtype=torch.int64),
        positions_T=torch.zeros(len(slots), dtype=torch.int64),
        slots_GT=[torch.tensor(slots)],
        block_tables_GSB=[tables],
        query_lens=query_lens,
        context_lens=contexts,
        num_decodes=num_decodes,
        sampled_rows=[],
        sampled_sequences=[],
    )


def poison_dead_blocks(layer: KVLayer, batch: Batch, rule: AttentionRule) -> None:
    """NaN in every block that no token of the batch may see any more: another's, by now."""
    block_size = layer.k.shape[1]
    for row, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        dead = batch.block_tables_GSB[0][row, : rule.first_visible(context - length) // block_size]
        layer.k[dead] = layer.v[dead] = torch.nan


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "kv_heads"), HEADS)
def test_sdpa_equals_reference_attention(
    num_heads: int, kv_heads: int, head_dim: int, rule: AttentionRule
):
    """Random mixed batches: same output, same KV memory afterwards, dead blocks never read."""
    rng = random.Random(f"{num_heads} {kv_heads} {head_dim}")
    torch.manual_seed(head_dim)
    for block_size in (1, 16, 5):
        num_blocks = 10 * (300 // block_size + 1) + 1
        batch = random_batch(rng, block_size, num_blocks)
        tokens = len(batch.token_ids_T)
        memory = torch.randn(2, num_blocks, block_size, kv_heads, head_dim)
        q = torch.randn(tokens, num_heads, head_dim)
        k, v = torch.randn(2, tokens, kv_heads, head_dim)
        found = {}
        for name in ("sdpa", "reference"):
            layer = KVLayer(memory[0].clone(), memory[1].clone(), 0)
            poison_dead_blocks(layer, batch, rule)
            found[name] = BACKENDS[name]().attend(q, k, v, layer, batch, rule), layer.k, layer.v
        for ours, expected in zip(found["sdpa"], found["reference"], strict=True):
            assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=expected.dim() == 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_equals_reference_attention_in_narrow_types(dtype: torch.dtype):
    """bf16 and fp16 KV: computed in fp32 by both, so they differ by one rounding at most."""
    rng = random.Random(3)
    torch.manual_seed(3)
    for _ in range(10):
        batch = random_batch(rng, 16, 200)
        tokens = len(batch.token_ids_T)
        memory = torch.randn(2, 200, 16, 2, 64).to(dtype)
        q = torch.randn(tokens, 14, 64).to(dtype)
        k, v = torch.randn(2, tokens, 2, 64).to(dtype)
        reference_out, sdpa_out = (
            BACKENDS[name]().attend(
                q, k, v, KVLayer(memory[0].clone(), memory[1].clone(), 0), batch, RULES[0]
            )
            for name in ("reference", "sdpa")
        )
        assert sdpa_out.dtype == dtype
        assert_close(sdpa_out, reference_out, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] / 8)


def test_buckets_hold_each_row_once_and_waste_at_most_half():
    """Every row is in one bucket whose longest context is at most twice its own."""
    rng = random.Random(0)
    assert buckets([]) == []
    for _ in range(500):
        contexts = [rng.choice([1, 2, 3, 50, 99, 100, 4000]) for _ in range(rng.randint(1, 12))]
        found = buckets(contexts)
        assert sorted(row for rows, _ in found for row in rows) == list(range(len(contexts)))
        for rows, longest in found:
            assert longest == max(contexts[row] for row in rows)
            assert all(contexts[row] * 2 >= longest for row in rows)
