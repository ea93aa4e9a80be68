"""FlashInfer's attention without FlashInfer and without a GPU: what is planned, and what it says.

A stand-in has its signatures and its documented meaning; where the package is installed the
signatures are compared. The kernels themselves run by `pytest -m gpu` alone.
"""

import ast
import importlib.util
import inspect
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.core.errors import UsageError
from headway.runtime.attention import AttentionRule, KVLayer, ReferenceAttention
from headway.runtime.attention.flashinfer import (
    SPLIT_TOKENS,
    FlashInferAttention,
    page_ids,
    workspace_bytes,
)
from headway.runtime.batch import Batch, Lens
from headway.runtime.cuda.executor import CudaExecutor
from headway.runtime.cuda.same_bits import differing_attention
from parity.devices import NoReadBacks, cuda_executor, small_model
from parity.flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper, installed
from parity.paged import make_batch
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = {
    "plain": {},
    "cap": {"softcap": 3.0},
    "window": {"window": 20},
    "both": {"window": 20, "softcap": 5.0},
}
STEPS = {
    "decodes": ([1, 1, 1, 1], [1, 17, 64, 200]),
    "chunks": ([5, 20, 7], [5, 33, 40]),
    "mixed": ([1, 1, 5, 20, 1], [40, 3, 5, 33, 9]),
}


def with_lens(batch: Batch, device: str = "cpu") -> Batch:
    """The batch with lengths and tables as a device has them; what fills tables up is no page."""
    table = batch.block_tables_GSB[0].int()
    for row, context in enumerate(batch.context_lens):
        table[row, -(-context // PAGE) :] = 10**6
    batch.lens = Lens(
        query_starts_S1=torch.tensor([0, *batch.query_lens]).cumsum(0).int().to(device),
        context_lens_S=torch.tensor(batch.context_lens).int().to(device),
        tables_GSB=[table.to(device)],
        rows_T=torch.zeros(sum(batch.query_lens), dtype=torch.int64, device=device),
        longest_query=max(batch.query_lens),
        longest_context=max(batch.context_lens),
        has_placeholders=False,
    )
    batch.slots_GT = [slots.to(device) for slots in batch.slots_GT]
    return batch


PAGE = 8
EXECUTOR = "headway.runtime.cuda.executor"


def step(
    name: str, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> tuple[Batch, tuple[torch.Tensor, ...], KVLayer]:
    """(batch, q and this step's k and v, memory), drawn at random."""
    draw = torch.Generator().manual_seed(7)
    batch = make_batch(*STEPS[name], PAGE, random.Random(3))
    blocks = int(batch.block_tables_GSB[0].max()) + 1
    memory = torch.randn(2, blocks, PAGE, heads[1], size, generator=draw).to(dtype)
    tokens = sum(batch.query_lens)
    q, k, v = (
        torch.randn(tokens, count, size, generator=draw).to(dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    return batch, (q, k, v), KVLayer(memory[0], memory[1], 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", STEPS)
def test_it_says_what_the_reference_says(name, rule, heads, dtype):
    """Two layers over one plan: MHA, GQA, MQA; a decode that is cut into parts; writes first."""
    batch, (q, k, v), layer = step(name, heads, 64, dtype)
    one = AttentionRule(scale=0.3, **RULES[rule])
    other = KVLayer(layer.v.clone(), layer.k.clone(), 0)
    expected = [
        ReferenceAttention().attend(q, k, v, KVLayer(x.k.clone(), x.v.clone(), 0), batch, one)
        for x in (layer, other)
    ]
    batch.views.clear()
    with installed() as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr("headway.runtime.attention.flashinfer.SPLIT_TOKENS", 3 * PAGE)
        backend = FlashInferAttention()
        with_lens(batch)
        found = [backend.attend(q, k, v, x, batch, one) for x in (layer, other)]
    close = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {"atol": 2e-2, "rtol": 2e-2}
    for mine, its in zip(found, expected, strict=True):
        assert_close(mine, its, **close)
    kinds = 2 if name == "mixed" else 1
    assert [(len(wrapper.plans), wrapper.num_runs) for wrapper in made] == [(1, 2)] * kinds


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_workspace_holds_the_parts(size, monkeypatch):
    """One that is too small gives way to a larger one; wrappers of the old one are not planned."""
    batch, (q, k, v), layer = step("decodes", (32, 1), size, torch.bfloat16)
    monkeypatch.setattr("headway.runtime.attention.flashinfer.SPLIT_TOKENS", PAGE)
    monkeypatch.setattr("headway.runtime.attention.flashinfer.WORKSPACE_STEP_BYTES", 16)
    rule = AttentionRule(scale=0.1)
    with installed() as made:
        backend = FlashInferAttention()
        for _ in range(3):
            backend.attend(q, k, v, layer, replace(with_lens(batch), views={}), rule)
        before = len(made)
        longer = make_batch([1] * 9, [300] * 9, PAGE, random.Random(1))
        blocks = int(longer.block_tables_GSB[0].max()) + 1
        wide = KVLayer(*torch.zeros(2, blocks, PAGE, 1, size, dtype=torch.bfloat16), 0)
        q = torch.zeros(9, 32, size, dtype=torch.bfloat16)
        backend.attend(q, None, None, wide, with_lens(longer), rule)
    assert before == 2 and len(made) == 3
    assert len(made[2].workspace) > len(made[0].workspace)
    assert len(made[2].workspace) >= workspace_bytes(32, size, 1, 9 * 38)


def test_decodes_have_one_tile_and_fixed_parts_whoever_is_beside_them():
    """The tile follows the mean of what is planned together; chunks are planned apart."""
    seen = []
    with installed() as made:
        backend = FlashInferAttention()
        for name in ("decodes", "mixed", "chunks"):
            batch, (q, k, v), layer = step(name, (8, 2), 64, torch.float16)
            backend.attend(q, k, v, layer, with_lens(batch), AttentionRule(scale=0.1, window=9))
        seen = [(len(plan["contexts"]), plan) for wrapper in made for plan in wrapper.plans]
    decodes = [plan for rows, plan in seen if plan["starts"] == [*range(rows + 1)]]
    chunks = [plan for _, plan in seen if plan not in decodes]
    assert {(plan["tile"], plan["split"]) for plan in decodes} == {(16, SPLIT_TOKENS)}
    assert [plan["contexts"] for plan in decodes] == [[1, 17, 64, 200], [40, 3]]
    assert {plan["split"] for plan in chunks} == {float("inf")}
    assert {plan["window_left"] for plan in decodes + chunks} == {8}


def test_two_wrappers_take_turns():
    """What a step in flight was planned with is not written again by the next step's plan."""
    with installed() as made:
        backend = FlashInferAttention()
        used = []
        for _ in range(4):
            batch, (q, k, v), layer = step("decodes", (8, 2), 64, torch.float16)
            backend.attend(q, k, v, layer, with_lens(batch), AttentionRule(scale=0.1))
            used.append([len(wrapper.plans) for wrapper in made])
    assert used == [[1], [1, 1], [2, 1], [2, 2]]


def test_pages_are_found_without_the_host():
    """The worked example: contexts of 41 and 3 in pages of 16, tables of 4."""
    table = torch.tensor([[5, 2, 7, 99], [3, 99, 99, 99]], dtype=torch.int32)
    found = page_ids(table, torch.tensor([41, 3], dtype=torch.int32), 16, 4)
    assert found.tolist() == [5, 2, 7, 3] and found.dtype == torch.int32


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_reads_nothing_back(name):
    """Over `meta`: lengths come from the host, and what goes up is what a plan sends."""
    batch, (q, k, v), layer = step(name, (8, 2), 64, torch.bfloat16)
    q, k, v = (x.to("meta") for x in (q, k, v))
    layer = KVLayer(layer.k.to("meta"), layer.v.to("meta"), 0)
    batch, rule = with_lens(batch, "meta"), AttentionRule(scale=0.1)
    with installed(), NoReadBacks("meta", may_send=False):
        out = FlashInferAttention().attend(q, k, v, layer, batch, rule)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "meta")


def test_the_probe_calls_it_as_it_calls_the_others():
    with installed():
        found = differing_attention(
            FlashInferAttention().attend_paged, "cpu", torch.bfloat16, (4, 2, 64), (2, 3), 40
        )
    assert found == []


def kind_of(plan: dict[str, Any]) -> str:
    """What was planned."""
    return "chunks" if plan["split"] == float("inf") else "decodes"


def with_library(
    name: str, folder: Path, _: Any, spec: Any, settings: Any, machine: Any, __: Any
) -> CudaExecutor:
    """A `make` of `drive.engine_for`."""
    return cuda_executor(folder, spec, replace(settings, attention_backend=name), machine)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_an_engine_says_the_same(tmp_path, family, overlap):
    """In fp32: windows, soft caps, chunks beside decodes, steps ahead; the start tells of bits."""
    sizes = {"head_dim": 64, "max_position_embeddings": 64, "vocab_size": 61}
    folder = save(tiny_model(family, **sizes), tmp_path)
    room = {"block_size": 8, "max_num_batched_tokens": 9, "max_num_seqs": 3, "dtype": "float32"}
    few = partial(differing_attention, counts=(2, 3), longest=40)
    requests = [greedy(i, [5 + i, 9, 13, 2, 8] * (1 + i % 3), 6) for i in range(5)]
    expected = finish(engine_for(folder, attention_backend="reference", **room), requests)
    with installed(torch.float32) as made, patch(f"{EXECUTOR}.differing_attention", few):
        engine = engine_for(
            folder, make=partial(with_library, "flashinfer"), overlap=overlap, **room
        )
        assert finish(engine, requests) == expected
    assert {"chunks", "decodes"} == {kind_of(plan) for one in made for plan in one.plans}
    said = engine.executor.describe().kernels["attention"]
    assert said[0] == "flashinfer" and said[1].startswith("a row has")


def fails(*_: Any, **__: Any) -> None:
    """A plan where nothing can be compiled."""
    raise RuntimeError("Ninja build failed:\nnvcc was not found")


@pytest.mark.parametrize(("name", "cause"), [("flashinfer", "nvcc was not found"), ("varlen", "")])
def test_a_library_that_does_not_run_is_refused_at_the_start(tmp_path, name, cause):
    """What it said, and what to use; no request has to fail for it. Torch's has no CPU kernel."""
    make = partial(with_library, name)
    folder, said = small_model(tmp_path), f"{name} does not run here: .*{cause}"
    with (
        installed(),
        patch.object(BatchPrefillWithPagedKVCacheWrapper, "plan", fails),
        pytest.raises(UsageError, match=said) as caught,
    ):
        engine_for(folder, make=make, dtype="bfloat16")
    assert "--attention-backend triton" in str(caught.value)


# ── the package ─────────────────────────────────────────────────────────────────────────────


def signature_in(tree: ast.Module, method: str) -> tuple[list[str], list[str]]:
    """(positional parameters, those by keyword alone) of the last definition, "name=default"."""
    owner = BatchPrefillWithPagedKVCacheWrapper.__name__
    body = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == owner).body
    of = [x for x in body if isinstance(x, ast.FunctionDef) and x.name == method][-1].args
    defaults = [None] * (len(of.args) - len(of.defaults)) + of.defaults
    parts = zip(of.args, defaults, strict=True), zip(of.kwonlyargs, of.kw_defaults, strict=True)
    positional, by_keyword = (
        [name.arg + ("" if value is None else f"={ast.unparse(value)}") for name, value in part]
        for part in parts
    )
    return positional, by_keyword


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_stand_in_has_the_signatures_of_an_installed_one(method):
    """Read from the source: it needs a GPU to be imported."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        pytest.skip("FlashInfer is not installed")
    source = Path(found.submodule_search_locations[0], "prefill.py").read_text()
    stand_in = ast.parse(inspect.getsource(BatchPrefillWithPagedKVCacheWrapper))
    assert signature_in(stand_in, method) == signature_in(ast.parse(source), method)
