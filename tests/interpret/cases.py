"""Each Triton kernel equals the reference; run with TRITON_INTERPRET=1 by `test_interpreted`.

Small shapes, in fp32 and fp16; of bf16 the loads and stores, since products are made in fp32 here.
"""

import random

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.core.plan import GrammarMasks, NewSequence
from headway.core.request import SamplingParams
from headway.runtime.attention import AttentionRule, KVLayer, ReferenceAttention
from headway.runtime.attention.cache import LatentKVLayer
from headway.runtime.attention.triton import ScaledKVLayer, TritonAttention
from headway.runtime.batch import Batch, Lens, WorkerSequence
from headway.runtime.cuda.sampling import choose, row_inputs
from headway.runtime.cuda.staging import Staging
from headway.runtime.cuda.triton import layers
from headway.runtime.cuda.triton.draw import draw
from headway.runtime.cuda.triton.fused import add_rms_norm, rope_write
from headway.runtime.cuda.triton.linear_int4 import linear_int4, pack
from headway.runtime.cuda.triton.paged_attention import SPLIT, paged_attention
from headway.runtime.cuda.triton.types import INTERPRETED
from headway.runtime.kernels import reference
from headway.runtime.rounding import RoundedWeight, round_rows, round_weight
from headway.runtime.sampler import NO_TOKEN
from interpret.closeness import TYPES, close, drawn
from parity.devices import with_triton
from parity.paged import make_batch, with_tables
from parity.tiny import save, tiny_model

assert INTERPRETED, "run by test_interpreted.py"


# ── attention ───────────────────────────────────────────────────────────────────────────────

DECODES = ([1, 1, 1, 1], [1, 17, 64, 200])
MIXED = ([1, 1, 5, 20], [40, 3, 5, 33])
RULES = {
    "plain": {},
    "cap": {"softcap": 3.0},
    "window": {"window": 20},
    "sinks": {"window": 20, "sinks": 3},
}


def attention_case(lens, contexts, rule, dtype, heads=(4, 2), head_dim=16, page=8, seed=1):
    """(q, layer, batch, what the reference says), the layer written already."""
    batch = make_batch(lens, contexts, page, random.Random(seed))
    blocks = int(batch.block_tables_GSB[0].max()) + 1
    k, v = drawn(2, blocks, page, heads[1], head_dim, dtype=dtype, seed=seed)
    q = drawn(sum(lens), heads[0], head_dim, dtype=dtype, seed=seed + 1)
    layer = KVLayer(k, v, 0)
    return q, layer, batch, ReferenceAttention().attend(q, None, None, layer, batch, rule)


def ours(q, k, v, batch, rule, scales=None):
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).int()
    contexts = torch.tensor(batch.context_lens).int()
    table = batch.block_tables_GSB[0].int()
    longest = max(batch.query_lens), max(batch.context_lens)
    return paged_attention(
        *(q, k, v, scales, starts, contexts, table, *longest),
        scale=rule.scale,
        softcap=rule.softcap,
        window=rule.window,
        sinks=rule.sinks,
        sink_logits=rule.sink_logits,
    )


def on_device(batch: Batch) -> Batch:
    """The batch with the lengths that a device has."""
    batch.lens = Lens(
        query_starts_S1=torch.tensor([0, *batch.query_lens]).cumsum(0).int(),
        context_lens_S=torch.tensor(batch.context_lens).int(),
        tables_GSB=[batch.block_tables_GSB[0].int()],
        rows_T=torch.zeros(sum(batch.query_lens), dtype=torch.int64),
        longest_query=max(batch.query_lens),
        longest_context=max(batch.context_lens),
        has_placeholders=False,
    )
    batch.views.clear()
    return batch


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_attention_is_the_references(lens, name, dtype):
    rule = AttentionRule(scale=0.3, **RULES[name])
    q, layer, batch, expected = attention_case(*lens, rule, dtype)
    close(ours(q, layer.k, layer.v, batch, rule), expected)


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_sink_logits_take_their_share(lens):
    rule = AttentionRule(scale=0.3, sink_logits=torch.tensor([0.0, 3.0, -2.0, 40.0]))
    q, layer, batch, expected = attention_case(*lens, rule, torch.float32)
    close(ours(q, layer.k, layer.v, batch, rule), expected)


@pytest.mark.parametrize(("heads", "head_dim"), [((3, 1), 24), ((7, 7), 8), ((2, 1), 96)])
def test_any_heads_and_sizes(heads, head_dim):
    """Groups and head sizes that are no power of two, MHA and MQA."""
    rule = AttentionRule(scale=0.2)
    q, layer, batch, expected = attention_case(*MIXED, rule, torch.float32, heads, head_dim)
    close(ours(q, layer.k, layer.v, batch, rule), expected)


@pytest.mark.usefixtures("ordered_dots")
def test_a_row_has_the_same_bits_in_any_batch():
    """Alone and beside longer contexts, which have more splits: those it lacks change nothing."""
    rule = AttentionRule(scale=0.3)
    lens, contexts = [1, 1], [SPLIT + 30, 2 * SPLIT + 9]
    q, layer, batch, expected = attention_case(lens, contexts, rule, torch.float32, (2, 1), 16, 16)
    together = ours(q, layer.k, layer.v, batch, rule)
    close(together, expected)
    table = batch.block_tables_GSB[0][:1].int()
    starts, context = torch.tensor([0, 1]).int(), torch.tensor(contexts[:1]).int()
    alone = paged_attention(
        *(q[:1], layer.k, layer.v, None, starts, context, table, 1, contexts[0]), scale=0.3
    )
    assert torch.equal(alone[0], together[0])


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_decode_has_the_same_bits_beside_a_chunk(dtype):
    """A mixed step is two calls: the decodes' part has the tile and the splits of decodes alone."""
    rule, backend = AttentionRule(scale=0.3), TritonAttention()
    lens, contexts = [1, 1, 5, 20], [40, SPLIT + 30, 5, 33]
    q, layer, batch, expected = attention_case(lens, contexts, rule, dtype)
    memory = ScaledKVLayer(layer.k, layer.v, 0, torch.empty(0), torch.empty(0))
    together = backend.attend(q, None, None, memory, on_device(batch), rule)
    close(together, expected)
    table = batch.block_tables_GSB[0]
    for row in (0, 1):
        alone = with_tables(lens[row : row + 1], contexts[row : row + 1], 8, table[row : row + 1])
        found = backend.attend(q[row : row + 1], None, None, memory, on_device(alone), rule)
        assert torch.equal(found[0], together[row])


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_a_prompt_has_the_same_bits_in_any_chunks(name):
    """Whole, and in parts of 7, 2 and the rest: keys that a row does not see change nothing."""
    rule = AttentionRule(scale=0.3, **RULES[name])
    q, layer, batch, _ = attention_case([50], [50], rule, torch.float32)
    whole = ours(q, layer.k, layer.v, batch, rule)
    for begin, end in ((0, 7), (7, 9), (9, 50)):
        part = with_tables([end - begin], [end], 8, batch.block_tables_GSB[0])
        assert torch.equal(ours(q[begin:end], layer.k, layer.v, part, rule), whole[begin:end])


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_int8_keys_and_values(lens):
    """Levels times the scale of each token and head."""
    rule = AttentionRule(scale=0.3)
    q, layer, batch, _ = attention_case(*lens, rule, torch.float32)
    levels, scales = zip(*(round_rows(x.flatten(0, 2)) for x in (layer.k, layer.v)), strict=True)
    k8, v8 = (x.view(layer.k.shape) for x in levels)
    k_scale, v_scale = (x.view(layer.k.shape[:3]) for x in scales)
    plain = KVLayer(k8 * k_scale[..., None], v8 * v_scale[..., None], 0)
    expected = ReferenceAttention().attend(q, None, None, plain, batch, rule)
    close(ours(q, k8, v8, batch, rule, (k_scale, v_scale)), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_latent_rows(lens, dtype):
    """Keys of 20 + 8 numbers whose first 20 are the values; more heads than a program has."""
    rule = AttentionRule(scale=0.3, window=30, sinks=2)
    q, layer, batch, _ = attention_case(*lens, rule, dtype, (20, 1), 28)
    latent = LatentKVLayer(layer.k, layer.k[..., :20], 0)
    expected = ReferenceAttention().attend(q, None, None, latent, batch, rule)
    found = ours(q, latent.k, latent.v, batch, rule)
    assert found.shape == (sum(lens[0]), 20, 20)
    close(found, expected)


# ── between the products ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [64, 100])
def test_norms(size, offset, dtype):
    x, weight = drawn(3, size, dtype=dtype) * 3, drawn(size, dtype=dtype, seed=1)
    found = layers.rms_norm(x, weight, 1e-5, offset)
    close(found, reference.rms_norm(x, weight, 1e-5, offset), 4)
    heads = drawn(3, 4 * size, dtype=dtype).view(3, 4, size)
    close(layers.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5), 4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gates(dtype):
    x = drawn(3, 2 * 37, dtype=dtype) * 4
    close(layers.silu_mul(x), reference.silu_mul(x), 8)
    close(layers.gelu_tanh_mul(x), reference.gelu_tanh_mul(x), 8)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("half", [4, 8])
def test_ropes(half, dtype):
    """All dims or some; a view of a wider row, as q is of qkv."""
    wide = drawn(5, 7, 16, dtype=dtype)
    angles = drawn(5, 1, half, dtype=torch.float32, seed=2)
    for x in (wide, wide[:, 2:5]):
        found = layers.rope(x, angles.cos(), angles.sin())
        close(found, reference.rope(x, angles.cos(), angles.sin()), 2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [64, 100])
def test_a_sum_and_its_norm(size, offset, dtype):
    """The sum to the bit, but in bf16, which the interpreter cuts off; of a view of wider rows."""
    x, weight = drawn(3, 2 * size, dtype=dtype)[:, :size], drawn(size, dtype=dtype, seed=1)
    more = drawn(3, size, dtype=dtype, seed=2) * 3
    total, normed = add_rms_norm(x, more, weight, 1e-5, offset)
    expected, of_it = reference.add_rms_norm(x, more, weight, 1e-5, offset)
    close(total, expected)
    assert dtype == torch.bfloat16 or torch.equal(total, expected)
    close(normed, of_it, 4)
    assert torch.equal(normed, layers.rms_norm(total, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "half"), [((4, 2), 8), ((3, 1), 4), ((7, 7), 8)])
def test_ropes_with_the_write(heads, half, dtype):
    """q, k and v as they lie in a row of qkv; slots of any order, the others as they were."""
    (n, g), size, tokens, page = heads, 16, 5, 4
    qkv = drawn(tokens, (n + 2 * g) * size, dtype=dtype)
    q, k, v = (
        part.unflatten(-1, (-1, size)) for part in qkv.split([n * size, g * size, g * size], -1)
    )
    angles = drawn(tokens, 1, half, dtype=torch.float32, seed=2)
    cos, sin = angles.cos(), angles.sin()
    memory = drawn(2, 6, page, g, size, dtype=dtype, seed=3)
    slots = torch.tensor([17, 4, 5, 23, 8])
    expected = KVLayer(memory[0].clone(), memory[1].clone(), 0)
    expected.write(layers.rope(k, cos, sin), v, slots)
    found = rope_write(q, k, v, (cos, sin), (memory[0], memory[1]), slots)
    assert torch.equal(found, layers.rope(q, cos, sin))
    assert torch.equal(memory[0], expected.k) and torch.equal(memory[1], expected.v)


# ── sampling ────────────────────────────────────────────────────────────────────────────────


def rows_of(sampling, vocabulary):
    """Inputs of rows with these parameters and seeds of their own."""
    rows = [WorkerSequence(NewSequence(i, 0, [1], 1, p, i, []), i, 1) for i, p in sampling]
    return row_inputs([0] * len(rows), rows, GrammarMasks(), vocabulary, Staging("cpu"))


def parameters(rng):
    """Any mix of filters, a fifth of the rows greedy."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 3, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
    )


MIXES = [
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.9, "temperature": 0.3},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.1},
    {"top_k": 10**6, "top_p": 1e-6, "min_p": 1.0},
]


@pytest.mark.parametrize("block", [64, 16])
def test_each_filter_draws_what_the_reference_draws(block, monkeypatch):
    """Alone and together, with ties and forbidden tokens; a row in one block, and in four."""
    monkeypatch.setattr("headway.runtime.cuda.triton.draw.BLOCK", block)
    rows = rows_of([(i, SamplingParams(**mix)) for i, mix in enumerate(MIXES)], 61)
    logits = (drawn(len(MIXES), 61, dtype=torch.float32, seed=block) * 4).round() / 2
    logits[:, ::7] = -torch.inf
    assert choose(logits, rows, draw).tolist() == choose(logits, rows).tolist()


@pytest.mark.hardening
@pytest.mark.parametrize("vocabulary", [61, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_the_draw_is_the_references(seed, vocabulary):
    """Filters in any mix, ties, forbidden tokens, over one block of a row and several."""
    rng = random.Random(seed)
    count = 12 if vocabulary < 100 else 4
    rows = rows_of([(i, parameters(rng)) for i in range(count)], vocabulary)
    logits = drawn(count, vocabulary, dtype=torch.float32, seed=seed) * rng.choice([1, 4])
    if seed % 2:
        logits = (logits * 2).round() / 2
    logits[:, ::7] = -torch.inf
    assert draw(logits, rows).tolist() == choose(logits, rows).tolist()
    assert choose(logits, rows, draw).tolist() == choose(logits, rows).tolist()


def test_a_row_with_nothing_allowed_has_no_token():
    rows = rows_of([(0, SamplingParams(temperature=0)), (1, SamplingParams())], 9)
    assert draw(torch.full((2, 9), -torch.inf), rows).tolist() == [NO_TOKEN, NO_TOKEN]
    logits = torch.full((2, 9), -torch.inf)
    logits[:, 5] = -3e38
    assert draw(logits, rows).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("count", "near"), [(100, 0.15), pytest.param(2000, 0.04, marks=pytest.mark.hardening)]
)
def test_draws_follow_the_distribution(count, near):
    """Shares of so many draws of one row are near its softmax, whose shares are 0.03 to 0.64."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(count, 1)
    rows = rows_of([(i, SamplingParams(seed=i)) for i in range(count)], 4)
    shares = torch.bincount(draw(logits, rows), minlength=4) / count
    assert_close(shares, logits[0].softmax(-1), atol=near, rtol=0)


def test_nothing_is_computed_of_no_tokens():
    empty = torch.empty(0, 8)
    assert layers.rms_norm(empty, torch.ones(8), 1e-5).shape == (0, 8)
    assert layers.silu_mul(empty).shape == (0, 4)
    weight = pack(round_weight(torch.ones(4, 32), 32))
    assert linear_int4(torch.empty(0, 32), weight, None).shape == (0, 4)


# ── 4-bit weights ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 40, 64), (5, 70, 150)])
@pytest.mark.parametrize("group", [32, 64])
def test_int4_weights(group, tokens, outputs, inputs, dtype):
    """Against the plain weights in fp64; the last group may be smaller."""
    weight = round_weight(drawn(outputs, inputs, dtype=torch.float32, seed=3), group)
    x, bias = drawn(tokens, inputs, dtype=dtype), drawn(outputs, dtype=dtype, seed=4)
    for added in (None, bias):
        expected = x.double() @ weight.plain().double().T
        expected = expected if added is None else expected + added.double()
        close(linear_int4(x, pack(weight), added), expected.to(dtype), 16)


def test_int4_weights_of_others():
    """With offsets, fp32 scales, and inputs in another order."""
    levels = torch.randint(-8, 8, (20, 64), generator=torch.Generator().manual_seed(1))
    scales, offsets = drawn(20, 2, dtype=torch.float32), drawn(20, 2, dtype=torch.float32, seed=1)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).int()
    weight = RoundedWeight(levels.to(torch.int8), scales, 32, offsets, order)
    x = drawn(3, 64, dtype=torch.float32)
    close(linear_int4(x, pack(weight), None), x @ weight.plain().T, 16)


@pytest.mark.usefixtures("ordered_dots")
def test_a_row_of_a_product_has_the_same_bits_in_any_batch():
    weight = pack(round_weight(drawn(40, 64, dtype=torch.float32), 32))
    x = drawn(70, 64, dtype=torch.float32, seed=1)
    together = linear_int4(x, weight, None)
    assert torch.equal(linear_int4(x[:1], weight, None)[0], together[0])
    assert torch.equal(linear_int4(x[65:], weight, None), together[65:])


# ── the engine over them ────────────────────────────────────────────────────────────────────


def test_an_engine_says_the_same(tmp_path):
    """A prompt in chunks, a decode beside it; other models and formats are in `engine_cases`."""
    folder = save(tiny_model("llama", max_position_embeddings=64), tmp_path)
    room = {"block_size": 8, "max_num_batched_tokens": 9, "max_num_seqs": 3, "kernels": "torch"}
    requests = [greedy(0, [5, 9, 13, 2, 8] * 2, 2), greedy(1, [7, 8], 3)]
    expected = finish(engine_for(folder, attention_backend="reference", **room), requests)
    engine = engine_for(folder, make=with_triton(), **room)
    assert finish(engine, requests) == expected
    kernels = engine.executor.describe().kernels
    assert {kernels[name][0] for name in ("rms_norm", "attention", "linear")} == {"triton"}
