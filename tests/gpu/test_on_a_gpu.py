"""What only a GPU can show: kernels at real sizes, the engine's tokens, equal bits in any batch.

`pytest -m "gpu and not hardening"`, in minutes; skipped where torch sees no CUDA device.
"""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for, finish
from headway.config.attention_choice import FLASHINFER_HEADS, LIBRARIES
from headway.core.request import Request, SamplingParams
from headway.runtime.attention import AttentionRule, KVLayer, ReferenceAttention
from headway.runtime.kernels import reference
from headway.spec.embedded import model_folder
from parity.cobatch import random_request, write_letters
from parity.paged import make_batch
from parity.tiny import save, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
RULES = [
    AttentionRule(scale=0.1),
    AttentionRule(scale=0.1, softcap=30.0),
    AttentionRule(scale=0.1, window=300),
    AttentionRule(scale=0.1, window=300, sinks=4),
]
STEPS = [([1] * 8, [1, 17, 64, 511, 512, 513, 2000, 4096]), ([1, 1, 77, 300], [900, 40, 900, 300])]


@with_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lens", STEPS, ids=["decodes", "mixed"])
def test_attention_at_real_sizes(lens, rule, head_dim, dtype):
    from headway.runtime.cuda.triton.paged_attention import paged_attention

    batch = make_batch(*lens, 16, random.Random(1))
    blocks = int(batch.block_tables_GSB[0].max()) + 1
    draw = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, blocks, 16, 8, head_dim, generator=draw).to(dtype)
    q = torch.randn(sum(lens[0]), 32, head_dim, generator=draw).to(dtype)
    expected = ReferenceAttention().attend(q, None, None, KVLayer(k, v, 0), batch, rule)
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).int()
    found = paged_attention(
        *(q.cuda(), k.cuda(), v.cuda(), None, starts.cuda()),
        torch.tensor(batch.context_lens).int().cuda(),
        batch.block_tables_GSB[0].int().cuda(),
        *(max(batch.query_lens), max(batch.context_lens)),
        scale=rule.scale,
        softcap=rule.softcap,
        window=rule.window,
        sinks=rule.sinks,
    )
    assert_close(found.cpu().float(), expected.float(), atol=2e-2, rtol=2e-2)


@with_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layers_at_real_sizes(dtype):
    from headway.runtime.cuda.triton import layers

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(300, 4096, generator=draw).to(dtype)
    weight = torch.randn(4096, generator=draw).to(dtype)
    found = layers.rms_norm(x.cuda(), weight.cuda(), 1e-5).cpu()
    assert_close(found, reference.rms_norm(x, weight, 1e-5), atol=4e-2, rtol=2e-2)
    assert_close(layers.silu_mul(x.cuda()).cpu(), reference.silu_mul(x), atol=4e-2, rtol=2e-2)
    heads = x.view(300, 32, 128)
    angles = torch.randn(300, 1, 64, generator=draw)
    found = layers.rope(heads.cuda(), angles.cos().cuda(), angles.sin().cuda()).cpu()
    assert_close(found, reference.rope(heads, angles.cos(), angles.sin()), atol=4e-2, rtol=2e-2)


@with_triton
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 300])
def test_a_row_of_an_int4_product_has_the_same_bits_in_any_batch(tokens):
    from headway.runtime.cuda.triton.linear_int4 import linear_int4, pack
    from headway.runtime.rounding import round_weight

    draw = torch.Generator("cuda").manual_seed(1)
    weight = round_weight(torch.randn(4096, 1024, generator=draw, device="cuda"), 64)
    x = torch.randn(300, 1024, generator=draw, device="cuda").bfloat16()
    together = linear_int4(x, pack(weight), None)
    assert torch.equal(linear_int4(x[:tokens], pack(weight), None), together[:tokens])
    expected = x.float() @ weight.plain().T
    assert_close(together.float(), expected, atol=0.5, rtol=2e-2)


@with_triton
@pytest.mark.parametrize("kind", ["16 bits", "fp8", "fp8 by 128"])
@pytest.mark.parametrize("outputs", [1024, 8192, 20_000])
def test_products_at_real_sizes(outputs, kind):
    """Near the product in fp32; each row has the same bits among any number of others."""
    from headway.runtime.cuda.same_bits import differing
    from headway.runtime.cuda.triton.linear import linear, pack
    from headway.runtime.rounding import RoundedWeight, round_weight_fp8

    draw = torch.Generator("cuda").manual_seed(1)
    plain = torch.randn(outputs, 1024, generator=draw, device="cuda").bfloat16()
    x = torch.randn(300, 1024, generator=draw, device="cuda").bfloat16()
    weight, expected = plain, plain.float()
    if kind != "16 bits":
        rounded = round_weight_fp8(plain)
        if kind == "fp8 by 128":
            scales = rounded.scales_OG.repeat(1, 8) * torch.arange(1, 9, device="cuda") / 4
            rounded = RoundedWeight(rounded.levels_OH, scales, 128)
        weight, expected = pack(rounded), rounded.plain()
    found = linear(x, weight)
    assert_close(found.float(), x.float() @ expected.T, atol=0.5, rtol=2e-2)
    assert differing(lambda rows: linear(rows, weight), x) == []


@with_triton
@pytest.mark.parametrize("tokens", [1, 30, 2000])
def test_experts_at_real_sizes(tokens):
    """128 experts of which a token visits 8: each visit's product, and nothing read back."""
    from headway.runtime.cuda.triton.linear import linear
    from headway.runtime.kernels.grouped import visits_of

    draw = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(128, 768, 512, generator=draw, device="cuda").bfloat16()
    experts_TK = torch.rand(tokens, 128, generator=draw, device="cuda").topk(8).indices
    x = torch.randn(tokens * 8, 512, generator=draw, device="cuda").bfloat16()
    torch.cuda.set_sync_debug_mode("error")
    try:
        visits = visits_of(experts_TK, 128)
        found = linear(x, weights, None, visits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    of_V = experts_TK.flatten()[visits.order_V]
    for expert in of_V.unique().tolist()[::16]:
        rows = of_V == expert
        assert_close(
            found[rows].float(), x[rows].float() @ weights[expert].float().T, atol=0.5, rtol=2e-2
        )


@with_triton
@pytest.mark.parametrize("lens", STEPS, ids=["decodes", "mixed"])
def test_latent_rows_at_real_sizes(lens):
    """128 heads over rows of 512 + 64 numbers."""
    from headway.runtime.attention.cache import LatentKVLayer
    from headway.runtime.cuda.triton.paged_attention import paged_attention

    batch = make_batch(*lens, 16, random.Random(1))
    blocks = int(batch.block_tables_GSB[0].max()) + 1
    draw = torch.Generator().manual_seed(1)
    k = torch.randn(blocks, 16, 1, 576, generator=draw).bfloat16()
    q = torch.randn(sum(lens[0]), 128, 576, generator=draw).bfloat16()
    layer, rule = LatentKVLayer(k, k[..., :512], 0), AttentionRule(scale=0.04)
    expected = ReferenceAttention().attend(q, None, None, layer, batch, rule)
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).int()
    on_gpu = k.cuda()
    found = paged_attention(
        *(q.cuda(), on_gpu, on_gpu[..., :512], None, starts.cuda()),
        torch.tensor(batch.context_lens).int().cuda(),
        batch.block_tables_GSB[0].int().cuda(),
        *(max(batch.query_lens), max(batch.context_lens)),
        scale=rule.scale,
    )
    assert_close(found.cpu().float(), expected.float(), atol=3e-2, rtol=3e-2)


@with_triton
@pytest.mark.parametrize("family", ["qwen3moe", "gptoss", "deepseekv3"])
def test_experts_and_latent_rows_in_graphs_say_what_a_cpu_says(family, tmp_path: Path):
    """In fp32, decodes as graphs."""
    folder = save(tiny_model(family, vocab_size=61), tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [Request(i, [5 + i, 9, 3], sampling) for i in range(4)]
    expected = finish(engine_for(folder, dtype="float32", kernels="torch"), requests)
    engine = engine_for(folder, device="cuda", threads=None, dtype="float32", max_num_seqs=8)
    assert engine.executor.graphs is not None  # type: ignore[attr-defined]
    for key, answer in finish(engine, requests).items():
        assert answer.token_ids == expected[key].token_ids


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
@pytest.mark.parametrize("head_dim", FLASHINFER_HEADS)
@pytest.mark.parametrize("rule", RULES[:3], ids=str)
@pytest.mark.parametrize("lens", STEPS, ids=["decodes", "mixed"])
def test_flashinfer_at_real_sizes(lens, rule, head_dim):
    """Long decodes are cut into parts; each size and rule is compiled once, in one type."""
    from headway.runtime.attention.flashinfer import FlashInferAttention

    batch = make_batch(*lens, 16, random.Random(1))
    blocks = int(batch.block_tables_GSB[0].max()) + 1
    draw = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, blocks, 16, 8, head_dim, generator=draw).bfloat16()
    q = torch.randn(sum(lens[0]), 32, head_dim, generator=draw).bfloat16()
    expected = ReferenceAttention().attend(q, None, None, KVLayer(k, v, 0), batch, rule)
    found = FlashInferAttention().attend_paged(
        *(
            q.cuda(),
            k.cuda(),
            v.cuda(),
            torch.tensor([0, *batch.query_lens]).cumsum(0).int().cuda(),
        ),
        torch.tensor(batch.context_lens).int().cuda(),
        batch.block_tables_GSB[0].int().cuda(),
        *(max(batch.query_lens), max(batch.context_lens)),
        **{"scale": rule.scale, "window": rule.window, "softcap": rule.softcap},
    )
    assert_close(found.cpu().float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "varlen", "flashinfer", "sdpa"])
def test_the_embedded_model_says_on_a_gpu_what_it_says_on_a_cpu(backend):
    """In fp32 where the backend has it; those of libraries want 16 bits."""
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    dtype = "bfloat16" if backend in LIBRARIES else "float32"
    prompts = [[5, 9, 13] * 20, [7, 8, 9], [300] * 33]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    requests = [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)]
    host = engine_for(model_folder(None), dtype=dtype, kernels="torch")
    device = engine_for(
        model_folder(None), dtype=dtype, device="cuda", attention_backend=backend, threads=None
    )
    expected, found = finish(host, requests), finish(device, requests)
    same = [found[key].token_ids == answer.token_ids for key, answer in expected.items()]
    assert all(same) if dtype == "float32" else any(same)


@with_triton
@pytest.mark.parametrize("mixes", [20, pytest.param(200, marks=pytest.mark.hardening)])
def test_random_requests_get_the_tokens_they_get_alone(tmp_path: Path, mixes: int):
    """Ten requests in each mix, in fp32, each against its solo run."""
    folder = save(tiny_model("llama", vocab_size=61, max_position_embeddings=64), tmp_path)
    write_letters(folder)
    rng = random.Random(5)
    engine = engine_for(folder, device="cuda", threads=None, dtype="float32", max_num_seqs=16)
    for mix in range(mixes):
        requests = [random_request(rng, 100 * mix + i) for i in range(10)]
        together = finish(engine, requests)
        for request in requests:
            if request.sampling.temperature > 0 and request.sampling.seed is None:
                continue
            for key, answer in finish(engine, [request]).items():
                assert together[key].token_ids == answer.token_ids


@with_triton
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_and_overlap_change_no_token(tmp_path: Path, graphs: bool, overlap: int):
    """Random requests as they are computed one step at a time, without a graph."""
    folder = save(tiny_model("llama", vocab_size=61, max_position_embeddings=64), tmp_path)
    write_letters(folder)
    rng = random.Random(5)
    room = {"device": "cuda", "threads": None, "dtype": "float32", "max_num_seqs": 16}
    requests = [random_request(rng, i) for i in range(20)]
    expected = finish(engine_for(folder, **room, graphs=False), requests)
    engine = engine_for(folder, **room, graphs=graphs, overlap=overlap)
    assert (engine.executor.graphs is not None) == graphs  # type: ignore[attr-defined]
    for key, answer in finish(engine, requests).items():
        assert answer.token_ids == expected[key].token_ids


@with_triton
def test_a_replay_has_the_bits_of_the_step_without_a_graph(tmp_path: Path):
    """Five rows in a graph of eight, over tables that are wider."""
    folder = save(tiny_model("llama", vocab_size=61, max_position_embeddings=64), tmp_path)
    room = {"device": "cuda", "threads": None, "dtype": "bfloat16", "max_num_seqs": 8}
    plain, engine = (engine_for(folder, **room, graphs=graphs) for graphs in (False, True))
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3)
    requests = [Request(i, [5 + i, 9, 3], sampling) for i in range(5)]
    assert finish(engine, requests) == finish(plain, requests)


@with_triton
def test_steps_stay_within_what_was_counted_for_them(tmp_path: Path):
    """Prompts that fill a step, then decodes of all rows, beside what the plan keeps free."""
    shape = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192}
    folder = save(tiny_model("llama", **shape, max_position_embeddings=2048), tmp_path)
    engine = engine_for(folder, device="cuda", threads=None, dtype="bfloat16", max_num_seqs=64)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=0.5)
    finish(engine, [Request(i, [5 + i] * 500, sampling) for i in range(64)])
    executor = engine.executor
    assert 0 < executor.memory.peak <= engine.settings.step_bytes  # type: ignore[attr-defined]
