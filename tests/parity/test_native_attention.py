"""Native attention equals the reference, and each row is the same to the bit in any company."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.core.plan import BlockCopy
from headway.runtime.attention import AttentionRule, NativeAttention, NativeKVLayer
from headway.runtime.attention.cache import copy_blocks
from headway.runtime.attention.reference import causal_attention
from headway.runtime.native.library import NativeLibrary
from headway.spec.embedded import model_folder
from parity.native_sets import each_instruction_set, loaded
from parity.paged import make_batch, make_case, with_sink_logits, with_tables
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = {torch.float32: 2**-17, torch.bfloat16: 2**-7, torch.float16: 2**-10}
RULES = [
    AttentionRule(scale=0.3),
    AttentionRule(scale=0.2, window=17),
    AttentionRule(scale=0.3, softcap=2.0),
    AttentionRule(scale=0.3, window=300, softcap=5.0),
    AttentionRule(scale=0.3, window=40, sinks=70),
    with_sink_logits(AttentionRule(scale=0.3, window=300), 10, torch.bfloat16),
]


rows = st.one_of(
    st.tuples(st.just(1), st.integers(1, 1300)),
    st.tuples(st.integers(1, 50), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair))),
    st.tuples(st.integers(1, 300), st.sampled_from([0, 1, 500, 700])).map(
        lambda pair: (pair[0], sum(pair))
    ),
)
"""(query length, context length): a decode, a chunk, a long one."""


@each_instruction_set
@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(rows, min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 13]),
    head_dim=st.one_of(st.sampled_from([20, 32, 64, 80, 128, 256]), st.integers(8, 100)),
    block_size=st.one_of(st.sampled_from([1, 16, 32, 48, 256]), st.integers(1, 40)),
    window=st.sampled_from([0, 0, 1, 5, 64, 200, 600]),
    sinks=st.sampled_from([0, 0, 1, 4, 17, 64, 130]),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    sink_logits=st.booleans(),
    dtype=st.sampled_from(list(ROUNDING)),
    own_memory=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_equals_the_reference(
    library,
    sequences,
    kv_heads,
    group,
    head_dim,
    block_size,
    window,
    sinks,
    softcap,
    sink_logits,
    dtype,
    own_memory,
    seed,
):
    """Mixed batches of any shape; what no row may see is NaN, and stays unseen."""
    backend = NativeAttention(library)
    rule = AttentionRule(scale=head_dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    case = make_case(
        [length for length, _ in sequences],
        [context for _, context in sequences],
        (kv_heads * group, kv_heads),
        head_dim,
        block_size,
        with_sink_logits(rule, kv_heads * group, dtype) if sink_logits else rule,
        dtype,
        seed,
        backend.kv_layer if own_memory else NativeKVLayer,
    )
    found = backend.attend(case.q, case.k, case.v, case.layer, case.batch, case.rule)
    assert found.dtype == dtype
    assert_close(found, case.expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] / 2)


def attend_in_chunks(
    library: NativeLibrary,
    qkv: tuple[Tensor, Tensor, Tensor],
    chunk: int,
    block_size: int,
    rule: AttentionRule,
    kv_dtype: torch.dtype,
    neighbours: int = 0,
) -> Tensor:
    """One sequence computed `chunk` tokens a step, beside others with numbers of their own."""
    backend = NativeAttention(library)
    length, kv_heads, head_dim = qkv[1].shape
    everyone = [length] * (1 + neighbours)
    tables = make_batch(everyone, everyone, block_size, random.Random(1)).block_tables_GSB[0]
    shape = (int(tables.max()) + 1, block_size, kv_heads, head_dim)
    layer = backend.kv_layer.zeros(shape, 0, kv_dtype, "cpu")
    found = []
    for begin in range(0, length, chunk):
        end = min(length, begin + chunk)
        batch = with_tables(
            [end - begin] * len(everyone), [end] * len(everyone), block_size, tables
        )
        q, k, v = (
            torch.cat([x[begin:end], *(x[begin:end] * (2 + i) for i in range(neighbours))])
            for x in qkv
        )
        found.append(backend.attend(q, k, v, layer, batch, rule)[: end - begin].clone())
    return torch.cat(found)


@each_instruction_set
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("head_dim", [24, 32])
def test_a_row_is_the_same_to_the_bit_in_any_company(library, rule, kv_dtype, head_dim):
    """700 tokens, beyond one split: in chunks, beside neighbours, in other blocks, one thread."""
    draw = torch.Generator().manual_seed(5)
    qkv = tuple(
        torch.randn(700, n, head_dim, generator=draw).to(torch.bfloat16) for n in (10, 2, 2)
    )
    whole = attend_in_chunks(library, qkv, 700, 16, rule, kv_dtype)
    alone = loaded(library.instruction_set, 1)
    for lib, chunk, block_size, neighbours in [
        (library, 1, 16, 0),
        (library, 7, 16, 2),
        (library, 7, 16, 8),  # enough splits for three threads: both KV heads in one task
        (library, 64, 16, 0),
        (library, 350, 5, 1),
        (alone, 41, 32, 1),
        (alone, 1, 16, 1),
        (alone, 700, 256, 0),
    ]:
        found = attend_in_chunks(lib, qkv, chunk, block_size, rule, kv_dtype, neighbours)
        assert torch.equal(found, whole), (lib, chunk, block_size, neighbours)


@each_instruction_set
@pytest.mark.parametrize("block_size", [16, 5])
def test_int8_numbers_are_off_by_half_a_step(library, block_size):
    """A head is rounded to 127 steps of its largest number; attention reads just that."""
    draw = torch.Generator().manual_seed(6)
    length, rule = 90, AttentionRule(scale=0.2)
    q, k, v = (torch.randn(length, n, 36, generator=draw) for n in (6, 2, 2))
    k[3] = 0
    batch = make_batch([length], [length], block_size, random.Random(0))
    layer = NativeKVLayer.zeros(
        (-(-length // block_size) + 1, block_size, 2, 36), 0, torch.int8, "cpu"
    )
    found = NativeAttention(library).attend(q, k, v, layer, batch, rule)
    read_k, read_v = (x[:length] for x in layer.gather(batch.block_tables_GSB[0][0]))
    for exact, read in ((k, read_k), (v, read_v)):
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((exact - read).abs() <= 0.5001 * step).all()
    assert_close(found, causal_attention(q, read_k, read_v, rule), rtol=1e-5, atol=1e-5)
    assert (found - causal_attention(q, k, v, rule)).abs().max() < 0.03


@each_instruction_set
def test_values_of_a_wider_row_are_read_where_they_are(library):
    """q, k and v as slices of one GEMM, as the layer makes them."""
    draw = torch.Generator().manual_seed(7)
    row = torch.randn(30, 6 * 16, generator=draw)
    q, k, v = (part.unflatten(-1, (-1, 16)) for part in row.split([64, 16, 16], -1))
    batch = make_batch([30], [30], 16, random.Random(0))
    layer = NativeKVLayer.zeros((3, 16, 1, 16), 0, torch.float32, "cpu")
    rule = AttentionRule(scale=0.25)
    found = NativeAttention(library).attend(q, k, v, layer, batch, rule)
    assert_close(found, causal_attention(q, k, v, rule), rtol=1e-5, atol=1e-5)


@each_instruction_set
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_row_that_is_not_finite_shows_and_can_be_wiped(library, kv_dtype, bad):
    draw = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(20, n, 16, generator=draw) for n in (2, 1, 1))
    v[13, 0, 3] = bad
    k[15, 0, 2] = bad
    batch = make_batch([20], [20], 8, random.Random(0))
    layer = NativeKVLayer.zeros((4, 8, 1, 16), 0, kv_dtype, "cpu")
    found = NativeAttention(library).attend(q, k, v, layer, batch, AttentionRule(scale=0.25))
    assert not torch.isfinite(found[13:]).all(-1).all(-1).any()
    layer.wipe(batch.slots_GT[0][13:])
    assert all(torch.isfinite(part).all() for part in layer.parts)
    read_k, read_v = layer.gather(batch.block_tables_GSB[0][0])
    assert not read_k[13:].any()
    assert not read_v[13:].any()
    assert read_k[:13].any(-1).all()


@each_instruction_set
@pytest.mark.parametrize("own_memory", [False, True])
def test_what_was_written_is_gathered_and_can_be_wiped(library, own_memory):
    """bf16, as the set's own memory lays it out and as all do: the same numbers, to the bit."""
    backend = NativeAttention(library)
    kind = backend.kv_layer if own_memory else NativeKVLayer
    draw = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(37, n, 64, generator=draw).to(torch.bfloat16) for n in (4, 2, 2))
    batch = make_batch([37], [37], 16, random.Random(0))
    layer = kind.zeros((4, 16, 2, 64), 0, torch.bfloat16, "cpu")
    assert layer.paired == (own_memory and library.instruction_set == "amx")
    backend.attend(q, k, v, layer, batch, AttentionRule(scale=0.1))
    read_k, read_v = layer.gather(batch.block_tables_GSB[0][0])
    assert torch.equal(read_k[:37], k)
    assert torch.equal(read_v[:37], v)
    together_k, together_v = layer.gather(batch.block_tables_GSB[0])
    assert torch.equal(together_k[0], read_k)
    assert torch.equal(together_v[0], read_v)
    layer.wipe(batch.slots_GT[0][13:30])
    wiped_k, wiped_v = layer.gather(batch.block_tables_GSB[0][0])
    for wiped, whole in ((wiped_k, k), (wiped_v, v)):
        assert not wiped[13:30].any()
        assert torch.equal(wiped[:13], whole[:13])
        assert torch.equal(wiped[30:37], whole[30:])


def test_a_copied_block_is_whole():
    """Numbers and scales, in the layers of its group alone."""
    layers = [NativeKVLayer.zeros((4, 8, 2, 16), group, torch.int8, "cpu") for group in (0, 1)]
    for layer in layers:
        for part in layer.parts:
            part[2] = 7
    copy_blocks(layers, [BlockCopy(group=1, source=2, target=3, sequence_id=0, index=0)])
    assert all((part[3] == 7).all() for part in layers[1].parts)
    assert not any(part[3].any() for part in layers[0].parts)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_requests_get_the_tokens_of_their_solo_run(tmp_path: Path, kv_cache_dtype: str):
    """Together, in chunks of 7, and with so few blocks that some are preempted."""
    folder = save(tiny_model("gemma2"), tmp_path)
    options = {"attention_backend": "native", "kv_cache_dtype": kv_cache_dtype}
    prompts = [[3 + i, 50, 7 * i + 1, 9] * (3 + i) for i in range(6)]
    requests = [greedy(i, prompt, 20) for i, prompt in enumerate(prompts)]
    alone: dict = {}
    for request in requests:
        alone |= finish(engine_for(folder, **options), [request])
    crowded = engine_for(
        folder, num_blocks=12, block_size=8, max_num_batched_tokens=7, max_num_seqs=6, **options
    )
    together = finish(crowded, requests)
    for key, answer in together.items():
        assert answer.token_ids == alone[key].token_ids


def test_narrowed_layers_answer_alike_in_company(tmp_path: Path):
    """Windows with sinks: the same answer in chunks, preempted, and from the prefix cache."""
    narrow = tmp_path / "kv.yaml"
    narrow.write_text("layers: {0: {window: 32, sinks: 6}, 2-5: {window: 32, sinks: 6}}")
    options = {"skip_tokenizer_init": True, "kv_layers": str(narrow), "block_size": 4}
    draw = random.Random(3)
    begin = [draw.randint(5, 2000) for _ in range(60)]
    prompts = [begin + [draw.randint(5, 2000) for _ in range(9 * i)] for i in range(4)]
    solo, alone = engine_for(model_folder(None), prefix_cache=False, **options), {}
    for i, prompt in enumerate(prompts):
        alone |= finish(solo, [greedy(i, prompt, 24)])
    room = {"num_blocks": 40, "max_num_batched_tokens": 17, "max_num_seqs": 4}
    crowded = engine_for(model_folder(None), **room, **options)
    for turn in range(2):
        requests = [greedy(10 * turn + i, prompt, 24) for i, prompt in enumerate(prompts)]
        for (number, index), answer in finish(crowded, requests).items():
            assert answer.token_ids == alone[number % 10, index].token_ids, (turn, number)
    assert crowded.scheduler.num_preemptions > 0


def test_a_native_program_sees_the_sinks(tmp_path: Path):
    """Narrowed layers in fp32: it says what torch says by the definition, sinks and all."""
    draw = random.Random(5)
    prompt = [draw.randint(5, 2000) for _ in range(70)]
    said = {}
    for sinks, kernels, attention in [
        (6, "native", "native"),
        (6, "torch", "reference"),
        (0, "native", "native"),
    ]:
        narrow = tmp_path / f"{sinks}.yaml"
        narrow.write_text(f"layers: {{0-5: {{window: 16, sinks: {sinks}}}}}")
        options = {"dtype": "float32", "kernels": kernels, "attention_backend": attention}
        engine = engine_for(
            model_folder(None), kv_layers=str(narrow), skip_tokenizer_init=True, **options
        )
        answer = finish(engine, [greedy(0, prompt, 24, logprobs=0)])[0, 0]
        said[sinks, kernels] = [at.logprob for at in answer.logprobs]
    assert said[6, "native"] == pytest.approx(said[6, "torch"], abs=1e-3)
    assert said[0, "native"] != pytest.approx(said[6, "torch"], abs=1e-3)
