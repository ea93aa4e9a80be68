"""int4 KV, or int8 beside it: native is the definition; two positions say how a key is read."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.engine.engine import Engine
from headway.runtime.attention import AttentionRule, KVLayer, NativeAttention, NativeKVLayer
from headway.runtime.attention.int4 import (
    Int4KVLayer,
    allocate_int4,
    pack_k,
    pack_v,
    round_numbers,
    unpack_k,
    unpack_v,
    with_open_layers,
)
from headway.runtime.attention.protocol import AttentionBackend
from headway.runtime.attention.reference import ReferenceAttention, causal_attention
from headway.runtime.batch import Batch
from headway.runtime.native.library import NativeLibrary
from headway.spec import KVGroupSpec
from headway.spec.kv_format import APART, kv_format
from parity.native_sets import each_instruction_set, loaded
from parity.paged import make_batch, with_sink_logits, with_tables
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64
FORMATS = pytest.mark.parametrize("format", ["int4", *APART])
RULES = [
    AttentionRule(scale=0.3),
    AttentionRule(scale=0.2, window=17),
    AttentionRule(scale=0.3, window=300, softcap=5.0),
]


def make_layer(
    count: int, kv_heads: int, head_dim: int, kind: type[KVLayer], format: str
) -> Int4KVLayer:
    group = KVGroupSpec(layers=(0,), num_kv_heads=kv_heads, head_dim=head_dim)
    (layer,) = allocate_int4((group,), (count, count), kv_format(format), torch.bfloat16, kind)
    assert isinstance(layer, Int4KVLayer)
    return layer


def with_open(batch: Batch) -> Batch:
    """The same blocks for the open ones, of a group of their own."""
    batch.slots_GT = batch.slots_GT[:1] * 2
    batch.block_tables_GSB = batch.block_tables_GSB[:1] * 2
    return batch


def attend_in_chunks(
    backend: AttentionBackend,
    qkv: tuple[Tensor, ...],
    chunk: int,
    rule: AttentionRule,
    neighbours: int = 0,
    format: str = "int4",
) -> tuple[Tensor, Int4KVLayer, Tensor]:
    """(what one sequence attends to, the memory, its blocks), `chunk` tokens a step."""
    length, kv_heads, head_dim = qkv[1].shape
    everyone = [length] * (1 + neighbours)
    tables = make_batch(everyone, everyone, SIZE, random.Random(1)).block_tables_GSB[0]
    kind = NativeKVLayer if isinstance(backend, NativeAttention) else KVLayer
    layer = make_layer(int(tables.max()) + 1, kv_heads, head_dim, kind, format)
    found = []
    for begin in range(0, length, chunk):
        end = min(length, begin + chunk)
        step = [end - begin] * len(everyone), [end] * len(everyone)
        batch = with_open(with_tables(*step, SIZE, tables))
        q, k, v = (
            torch.cat([x[begin:end], *(x[begin:end] * (2 + i) for i in range(neighbours))])
            for x in qkv
        )
        found.append(backend.attend(q, k, v, layer, batch, rule)[: end - begin].clone())
    return torch.cat(found), layer, tables[0]


def attend_mixed(
    qkv: tuple[Tensor, ...], layer: Int4KVLayer, full: Tensor, rule: AttentionRule
) -> Tensor:
    """What each row attends to: the blocks before its own as `layer` has them, its own exactly."""
    (q, *exact), rounded = qkv, layer.gather(full)
    found = []
    for begin in range(0, len(q), SIZE):
        rows = slice(begin, begin + SIZE)
        kv = (torch.cat([o[:begin], x[rows].float()]) for o, x in zip(rounded, exact, strict=True))
        found.append(causal_attention(q[rows], *kv, rule))
    return torch.cat(found)


def draw(length: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """q, k and v; some channels of k are far off zero, as those of real models are."""
    seed = torch.Generator().manual_seed(length + head_dim)
    q, k, v = (
        torch.randn(length, n, head_dim, generator=seed) for n in (heads, kv_heads, kv_heads)
    )
    k[..., 3] += 20
    k[..., 5] = 0
    return tuple(x.to(torch.bfloat16) for x in (q, k, v))


def assert_near(found: Tensor, expected: Tensor, library: NativeLibrary) -> None:
    """Within what bf16 rounds; twice that where queries and weights are multiplied in bf16."""
    off = 2**-6 if library.instruction_set == "avx512_bf16" else 2**-7
    assert_close(found.float(), expected.float(), rtol=off, atol=off)


def test_numbers_are_off_by_half_a_step():
    x = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))
    x[2, 3] = 0.25
    levels, scales = round_numbers(x)
    assert levels.shape == x.shape and scales.shape == (5, 2, 7) and levels.max() == 15
    scale, offset = scales.float()[..., None].unbind(-3)
    found = offset + scale * levels
    step = (x.amax(-1) - x.amin(-1)) / 15
    off = (found - x).abs().amax(-1)
    assert (off <= 0.51 * step + 2e-3).all()
    assert off.max() > 0.05
    assert torch.equal(found[2, 3], x[2, 3])


def test_levels_lie_as_native_code_reads_them():
    """Level 6 of a word: of K channel 1 of 2 and the third 16 tokens; of V token 5 of 8."""
    k, v = torch.zeros(2, 64, 64, dtype=torch.uint8).view(2, 64, 64)
    v = v[:, :32]
    k[7, 35], v[21, 9] = 11, 13
    assert torch.equal(unpack_k(pack_k(k)), k.float()) and torch.equal(
        unpack_v(pack_v(v)), v.float()
    )
    k_words, v_words = (pack(x).view(torch.int32) for pack, x in ((pack_k, k), (pack_v, v)))
    assert k_words.nonzero().tolist() == [[3, 3]] and k_words[3, 3] == 11 << 4 * (4 + 2)
    assert v_words.nonzero().tolist() == [[2, 9]] and v_words[2, 9] == 13 << 4 * (4 + 2)


@pytest.mark.parametrize(("format", "which"), [("int8/int4", 0), ("int4/int8", 1)])
def test_what_is_int8_is_off_by_half_of_its_step(format: str, which: int):
    """A 127th of the largest number of a token's head; the other is as in int4 memory."""
    qkv, rule = draw(130, 2, 1, 32), AttentionRule(scale=0.3)
    _, layer, table = attend_in_chunks(ReferenceAttention(), qkv, 130, rule, format=format)
    _, both, _ = attend_in_chunks(ReferenceAttention(), qkv, 130, rule)
    found, narrow = (one.gather(table[:2]) for one in (layer, both))
    x = qkv[1 + which][:128].float()
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((found[which] - x).abs() <= 0.5001 * step).all()
    assert (narrow[which] - x).abs().max() > step.max()
    assert torch.equal(found[1 - which], narrow[1 - which])


def test_the_open_block_is_exact_and_the_others_are_rounded():
    """Row 70 reads 64 … 70 as they are, and 0 … 63 by levels; row 60 reads all as they are."""
    qkv, rule = draw(100, 2, 1, 32), AttentionRule(scale=0.3)
    found, layer, table = attend_in_chunks(ReferenceAttention(), qkv, 100, rule)
    q, k, v = qkv
    assert torch.equal(found[:64], causal_attention(q[:64], k[:64], v[:64], rule))
    old = [x[:64] for x in layer.gather(table[:1])]
    mixed = [torch.cat([o, x[64:71].float()]) for o, x in zip(old, (k, v), strict=True)]
    assert torch.equal(found[70:71], causal_attention(q[70:71], *mixed, rule))
    assert not torch.equal(found[70:71], causal_attention(q[70:71], k[:71], v[:71], rule))


@each_instruction_set
@FORMATS
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 32), (7, 1, 64), (3, 3, 96)], ids=str)
def test_native_is_the_definition(
    library: NativeLibrary, rule: AttentionRule, shape: tuple[int, int, int], format: str
):
    """Levels and scales bit for bit, int8 the nearest, the output within what bf16 rounds."""
    qkv = draw(333, *shape)
    how = 50, rule, 0, format
    _, defined, table = attend_in_chunks(ReferenceAttention(), qkv, *how)
    found, native, _ = attend_in_chunks(NativeAttention(library), qkv, *how)
    full = table[: 333 // SIZE]
    for one, other in zip(native.parts, defined.parts, strict=True):
        assert one.dtype == torch.int8 or torch.equal(one[full], other[full])
    for x, part, numbers in zip(qkv[1:], native.parts, native.gather(full), strict=False):
        off = (numbers - x[: len(numbers)].float()).abs() / x[: len(numbers)].abs().amax(-1, True)
        assert (off.max() <= 0.5001 / 127) == (part.dtype == torch.int8)
    assert_near(found, attend_mixed(qkv, native, full, rule), library)


@each_instruction_set
def test_sink_logits_take_their_share(library: NativeLibrary):
    """As the definition, where some logit is seen and one takes all; the same bits in chunks."""
    qkv = draw(333, 6, 2, 32)
    for plain in RULES:
        rule = with_sink_logits(plain, 6, torch.bfloat16)
        expected, _, _ = attend_in_chunks(ReferenceAttention(), qkv, 50, rule)
        found, _, _ = attend_in_chunks(NativeAttention(library), qkv, 50, rule)
        without, _, _ = attend_in_chunks(ReferenceAttention(), qkv, 50, plain)
        assert_near(found, expected, library)
        assert (expected - without).abs().amax((0, 2)).min() > 0.1, "a head has no sink"
        again, _, _ = attend_in_chunks(NativeAttention(library), qkv, 7, rule, 1)
        assert torch.equal(again, found)


@each_instruction_set
@FORMATS
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_row_is_the_same_to_the_bit_in_any_company(
    library: NativeLibrary, rule: AttentionRule, format: str
):
    qkv = draw(700, 14, 2, 64)
    whole, _, _ = attend_in_chunks(NativeAttention(library), qkv, 700, rule, format=format)
    alone = loaded(library.instruction_set, 1)
    for lib, chunk, neighbours in [
        (library, 1, 0),
        (library, 7, 3),
        (alone, 64, 1),
        (alone, 350, 0),
    ]:
        how = chunk, rule, neighbours, format
        found, _, _ = attend_in_chunks(NativeAttention(lib), qkv, *how)
        assert torch.equal(found, whole), (chunk, neighbours)


@each_instruction_set
@FORMATS
def test_a_block_that_is_not_finite_shows_and_can_be_wiped(library: NativeLibrary, format: str):
    q, k, v = draw(80, 2, 1, 32)
    v[13, 0, 3] = k[15, 0, 2] = torch.inf
    rule = AttentionRule(scale=0.25)
    how = 80, rule, 0, format
    found, layer, table = attend_in_chunks(NativeAttention(library), (q, k, v), *how)
    assert not torch.isfinite(found[64:]).all(-1).all(-1).any()
    slots = (table[0] * SIZE + torch.arange(SIZE))[13:]
    for memory in with_open_layers([layer]):
        memory.wipe(slots)
        assert all(torch.isfinite(part).all() for part in memory.parts)


# ── through the engine ──────────────────────────────────────────────────────────────────────

MODEL = {
    "vocab_size": 61,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 90,
    "head_dim": 32,
}


@pytest.fixture(scope="module", params=["full", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, more = ("llama", {}) if request.param == "full" else ("qwen3", WINDOWS)
    return save(tiny_model(family, **MODEL | more), tmp_path_factory.mktemp("int4"))


def int4(folder: Path, **options: object) -> Engine:
    how = {"kv_cache_dtype": "int4", "attention_backend": "native", **options}
    return engine_for(folder, **how)


def requests_of(**more: object) -> list:
    """Prompts of 57 to 200 tokens that end before, at and behind a block's end, some repetitive."""
    chooser = random.Random(5)
    texts = [[chooser.randrange(3, 60) for _ in range(n)] for n in (57, 63, 64, 65, 128, 200)]
    texts.append([7, 8, 9, 10] * 30)
    return [greedy(i, text, 90 + i, **more) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 37, "max_num_seqs": 7},
        {"num_blocks": 8, "max_num_batched_tokens": 64, "max_num_seqs": 7},
        {"num_blocks": 8, "kv_host_memory": 2**24, "max_num_seqs": 7},
        {"speculative_method": "ngram", "num_speculative_tokens": 5, "max_num_seqs": 7},
        {"prefix_cache": False, "max_num_seqs": 3},
        {"kv_cache_dtype": "int8/int4", "num_blocks": 8, "max_num_seqs": 7},
        {
            "kv_cache_dtype": "int4/int8",
            "num_blocks": 8,
            "kv_host_memory": 2**24,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 7,
        },
    ],
    ids=["chunks", "preempted", "swapped", "drafts", "no cache", "int8/int4", "int4/int8"],
)
def test_tokens_are_those_of_the_request_alone(folder: Path, options: dict):
    alone, format = {}, options.get("kv_cache_dtype", "int4")
    for request in requests_of():
        alone |= finish(int4(folder, speculative_method="off", kv_cache_dtype=format), [request])
    engine = int4(folder, **{"speculative_method": "off", **options})
    together = finish(engine, requests_of())
    assert {k: a.token_ids for k, a in together.items()} == {
        k: a.token_ids for k, a in alone.items()
    }
    if "num_blocks" in options:
        assert engine.scheduler.num_preemptions


@FORMATS
def test_what_was_found_gives_the_tokens_of_what_is_computed(folder: Path, format: str):
    """Turns of one conversation, and two answers of one prompt that part within a block."""
    cold, warm = (
        int4(folder, kv_cache_dtype=format, prefix_cache=cached, max_num_seqs=4)
        for cached in (False, True)
    )
    texts, computed = [[1 + i % 50 for i in range(150)], [1 + i % 50 for i in range(128)]], []
    for turn in range(3):
        requests = [
            greedy(2 * turn + i, list(text), 30, n=2, seed=4) for i, text in enumerate(texts)
        ]
        first, again = (finish(engine, requests) for engine in (cold, warm))
        assert {k: a.token_ids for k, a in again.items()} == {
            k: a.token_ids for k, a in first.items()
        }
        for i, text in enumerate(texts):
            text += [*first[2 * turn + i, 0].token_ids, 3 + turn]
        computed.append(len(texts[0]))
    assert warm.kv.pools[0].num_cached > 2


@pytest.mark.parametrize("kv_cache_dtype", ["int4", "int8", "int8/int4"])
def test_layers_that_are_skipped_are_as_computed(folder: Path, kv_cache_dtype: str):
    """They are a group of their own; tokens are those of the request alone, preempted or found."""
    options = {
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_dtype_skip_layers": "1",
        "attention_backend": "native",
        "block_size": 64,
    }
    alone: dict = {}
    for request in requests_of():
        alone |= finish(engine_for(folder, **options), [request])
    engine = engine_for(folder, num_blocks=8, max_num_seqs=7, **options)
    for _ in range(2):
        together = finish(engine, requests_of())
        assert all(together[key].token_ids == answer.token_ids for key, answer in alone.items())
    assert engine.scheduler.num_preemptions
    rounded, exact = engine.executor.target.kv
    assert exact.k.dtype == torch.float32 and exact.group == 1
    assert rounded.k.dtype == (torch.uint8 if kv_cache_dtype == "int4" else torch.int8)
    assert rounded.v.dtype == (torch.int8 if kv_cache_dtype == "int8" else torch.uint8)
    assert engine.executor.target.program is not None
    groups = engine.executor.spec.kv_groups
    assert [(group.layers, group.kv_dtype) for group in groups] == [((0,), ""), ((1,), "float32")]


@FORMATS
def test_the_definition_serves_too(folder: Path, format: str):
    """Torch's reference, slow: it generates, and a request's tokens are its own in company."""
    requests = requests_of()[2:5]
    options = {"kv_cache_dtype": format, "attention_backend": "reference", "kernels": "torch"}
    alone: dict = {}
    for request in requests:
        alone |= finish(engine_for(folder, **options), [request])
    together = finish(
        engine_for(folder, max_num_batched_tokens=50, max_num_seqs=3, **options), requests
    )
    assert all(together[key].token_ids == answer.token_ids for key, answer in alone.items())
