"""Reading the best blocks alone: the definition, the native kernels, and requests in company."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from drive import engine_for, finish, greedy
from headway.runtime.attention import (
    AttentionRule,
    KVLayer,
    NativeAttention,
    NativeKVLayer,
    ReferenceAttention,
)
from headway.runtime.attention.protocol import AttentionBackend
from headway.runtime.attention.reference import best_blocks
from headway.spec.embedded import model_folder
from parity.native_sets import each_instruction_set
from parity.paged import make_batch, with_tables

ROUNDING = {torch.float32: 2**-17, torch.bfloat16: 2**-7, torch.float16: 2**-10}
RULE = AttentionRule(scale=0.3)


def test_a_planted_key_is_found_by_those_who_look_for_it():
    """Head 0 looks for what lies in block 5, head 1 for what lies in block 2; equals: the first."""
    k_BSGD = torch.zeros(8, 4, 2, 16)
    k_BSGD[5, 1, 0], k_BSGD[2, 3, 1] = 1.0, -1.0
    bounds_BG2D = torch.stack(torch.aminmax(k_BSGD, dim=1), 2)
    q_GRD = torch.stack([torch.ones(3, 16), -torch.ones(3, 16)])
    assert best_blocks(q_GRD, bounds_BG2D, 4).tolist() == [[0, 1, 5, 8], [0, 1, 2, 8]]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), group=st.integers(1, 4))
def test_no_block_left_out_holds_a_better_sum_than_the_worst_promise_taken(seed: int, group: int):
    """The bounds are bounds: what a block gives is at most what it promised."""
    draw = torch.Generator().manual_seed(seed)
    k_BSGD = torch.randn(12, 4, 1, 8, generator=draw)
    bounds_BG2D = torch.stack(torch.aminmax(k_BSGD, dim=1), 2)
    q_GRD = torch.randn(1, group, 8, generator=draw)
    chosen = best_blocks(q_GRD, bounds_BG2D, 6)[0].tolist()
    sums_BS = torch.einsum("grd,bsgd->bs", q_GRD, k_BSGD)
    up, down = q_GRD.clamp(min=0).sum(1), (-q_GRD).clamp(min=0).sum(1)
    promises_B = (bounds_BG2D[:, 0, 1] * up - bounds_BG2D[:, 0, 0] * down).sum(-1)
    worst = min(promises_B[block].item() for block in chosen[1:-1])
    for block in set(range(12)) - set(chosen):
        assert sums_BS[block].max().item() <= worst + 1e-5


def attended(
    backend: AttentionBackend,
    qkv: tuple[Tensor, Tensor, Tensor],
    num_prompt: int,
    num_read: int,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    kind: type[KVLayer],
    chunk: int = 10_000,
    neighbours: int = 0,
) -> Tensor:
    """One sequence `chunk` tokens a step, those behind the prompt reading `num_read` blocks.

    Its neighbours have other numbers, and read everything where their number is odd.
    """
    length, kv_heads, head_dim = qkv[1].shape
    everyone = [length] * (1 + neighbours)
    tables = make_batch(everyone, everyone, block_size, random.Random(1)).block_tables_GSB[0]
    layer = kind.zeros((int(tables.max()) + 1, block_size, kv_heads, head_dim), 0, kv_dtype, "cpu")
    layer.allocate_bounds()
    found = []
    for begin in range(0, length, chunk):
        end = min(length, begin + chunk)
        batch = with_tables(
            [end - begin] * len(everyone), [end] * len(everyone), block_size, tables
        )
        at = torch.arange(begin, end)
        reads = torch.full_like(at, num_read)
        reads[(at < num_prompt) | (num_read >= at // block_size + 1)] = 0
        batch.reads_T = torch.cat([reads * (i % 2 == 0) for i in range(len(everyone))])
        q, k, v = (
            torch.cat([x[begin:end], *(x[begin:end] * (2 + i) for i in range(neighbours))])
            for x in qkv
        )
        found.append(backend.attend(q, k, v, layer, batch, RULE)[: end - begin].clone())
    return torch.cat(found)


def drawn(
    length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, n, head_dim, generator=draw).to(dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def is_tied(q_NTD: Tensor, k_GTD: Tensor, place: int, num_read: int, block_size: int) -> bool:
    """Whether rounding decides what is read: the last block of a head and the next are alike."""
    num_blocks = place // block_size
    if not 2 < num_read <= num_blocks:  # nothing is chosen, or everything read
        return False
    blocks_GBSD = k_GTD[:, : num_blocks * block_size].double().unflatten(1, (-1, block_size))
    least_GBD, most_GBD = torch.aminmax(blocks_GBSD, dim=2)
    q_GRD = q_NTD[:, place].double().unflatten(0, (len(k_GTD), -1))
    up_GD, down_GD = (half.clamp(min=0).sum(1) for half in (q_GRD, -q_GRD))
    scores_GB = (up_GD[:, None] * most_GBD - down_GD[:, None] * least_GBD).sum(-1)
    ranked_GB = scores_GB[:, 1:].sort(1, descending=True).values  # the first block is read anyway
    last_G, next_G = ranked_GB[:, num_read - 3], ranked_GB[:, num_read - 2]
    return bool(((last_G - next_G) <= 1e-5 * last_G.abs()).any())


@each_instruction_set
@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(5, 700),
    prompt=st.floats(0, 1),
    num_read=st.integers(2, 20),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 7]),
    head_dim=st.sampled_from([20, 32, 64, 96]),
    block_size=st.sampled_from([3, 16, 32, 48]),
    dtype=st.sampled_from(list(ROUNDING)),
    own_memory=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_equals_the_reference(
    library,
    length,
    prompt,
    num_read,
    kv_heads,
    group,
    head_dim,
    block_size,
    dtype,
    own_memory,
    seed,
):
    backend = NativeAttention(library)
    qkv = drawn(length, (kv_heads * group, kv_heads), head_dim, dtype, seed)
    case = {"block_size": block_size, "kv_dtype": dtype, "chunk": 300}
    expected, found = (
        attended(one, qkv, round(prompt * length), num_read, kind=kind, **case)
        for one, kind in (
            (ReferenceAttention(), KVLayer),
            (backend, backend.kv_layer if own_memory else NativeKVLayer),
        )
    )
    close = torch.isclose(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] / 2)
    others = (~close.flatten(1).all(1)).nonzero().flatten().tolist()
    assert len(others) <= 2
    q_NTD, k_GTD = (x.transpose(0, 1) for x in qkv[:2])
    assert all(is_tied(q_NTD, k_GTD, place, num_read, block_size) for place in others), others


def test_a_tie_is_seen_and_nothing_else_is():
    """Blocks 1 and 2 promise the same, block 3 more: who reads two of them has a tie."""
    k_GTD = (
        torch.tensor([0.0, 1.0, 1.0, 2.0, 0.5]).repeat_interleave(4)[None, :, None].expand(1, 20, 8)
    )
    q_NTD = torch.ones(2, 21, 8)
    assert [is_tied(q_NTD, k_GTD, 20, count, 4) for count in (3, 4, 5)] == [False, True, False]


@each_instruction_set
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_row_is_the_same_to_the_bit_in_any_company(library, kv_dtype):
    """700 tokens of which 400 choose: at once, in chunks, one by one, beside neighbours."""
    backend = NativeAttention(library)
    qkv = drawn(700, (10, 2), 32, torch.bfloat16, 5)
    case = {"block_size": 16, "kv_dtype": kv_dtype, "kind": backend.kv_layer}
    alone = attended(backend, qkv, 300, 9, **case)
    whole = attended(backend, qkv, 700, 9, **case)
    assert torch.equal(alone[:300], whole[:300]) and not torch.equal(alone, whole)
    for chunk, neighbours in ((1, 0), (1, 3), (37, 0), (64, 2), (700, 1)):
        found = attended(backend, qkv, 300, 9, chunk=chunk, neighbours=neighbours, **case)
        assert torch.equal(found, alone), (chunk, neighbours)


def test_a_rejected_draft_leaves_nothing_behind():
    """A block that drafts filled is bounded anew when its own tokens have come."""
    layer = KVLayer.zeros((3, 4, 1, 8), 0, torch.float32, "cpu")
    layer.allocate_bounds()
    layer.write(torch.full((4, 1, 8), 9.0), torch.zeros(4, 1, 8), torch.arange(4, 8))
    layer.write(torch.ones(4, 1, 8), torch.zeros(4, 1, 8), torch.arange(4, 8))
    assert layer.bounds is not None and (layer.bounds[1] == 1).all() and not layer.bounds[2].any()


# ── requests ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers 0 and 1 of headway-tiny read everything."""
    path = tmp_path_factory.mktemp("kv") / "whole.yaml"
    path.write_text("layers: {0-1: whole}")
    return str(path)


def prompts_of(seed: int = 3, shared: int = 120) -> list[list[int]]:
    """Four that begin alike."""
    draw = random.Random(seed)
    begin = [draw.randint(5, 2000) for _ in range(shared)]
    return [begin + [draw.randint(5, 2000) for _ in range(9 * i)] for i in range(4)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"speculative_method": "ngram,suffix", "num_speculative_tokens": 4},
        {"kernels": "torch", "attention_backend": "reference"},
    ],
    ids=["plain", "int8", "drafts", "reference"],
)
def test_requests_get_the_tokens_of_their_solo_run(whole_file: str, options: dict):
    """Together, forked, in chunks of 17, preempted, with prefix hits and shares of their own."""
    options = {
        **{"skip_tokenizer_init": True, "kv_layers": whole_file, "block_size": 4},
        **{"kv_read": "25%", **options},
    }
    shares = [None, 0.5, 1.0, 0.1]
    requests = [
        replace(greedy(i, prompt, 20, n=1 + i % 2), kv_read=share)
        for i, (prompt, share) in enumerate(zip(prompts_of(), shares, strict=True))
    ]
    solo, alone = engine_for(model_folder(None), prefix_cache=False, **options), {}
    for request in requests:
        alone |= finish(solo, [request])
    room = {"num_blocks": 60, "max_num_batched_tokens": 17, "max_num_seqs": 6}
    crowded = engine_for(model_folder(None), **room, **options)
    for turn in range(2):
        again = [replace(one, request_id=10 * turn + one.request_id) for one in requests]
        answers = finish(crowded, again)
        for (number, index), answer in answers.items():
            assert answer.token_ids == alone[number % 10, index].token_ids, (turn, number)
    assert crowded.scheduler.num_preemptions > 0
    assert any(answer.num_cached_tokens for answer in answers.values())
