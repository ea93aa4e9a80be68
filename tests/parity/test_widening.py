"""A widened model says what the small one says: logits, tokens, and never a padding token.

The shapes are made up so that they are quick, with the peculiarities of the real ones: a hidden
size that is no power of two of the small one's, wider groups, longer heads, biases or none.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from recipes.tiny.eagle import Eagle
from recipes.tiny.model import Shape as RecipeShape
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drive import engine_for, finish, greedy
from headway import LLM, SamplingParams
from headway.core.errors import CheckpointError, HeadwayError, UsageError
from headway.spec import read_model_spec
from parity.drafting import Proposals
from parity.tiny import edit_config, prompts
from widening import SHAPES, Shape, Widening, find_shape, plan_widening, widen
from widening.tensors import ROWS_AT_ONCE, entries

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
QWEN = Shape(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    hidden_size=112,
    num_layers=4,
    num_heads=14,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=300,
    qkv_bias=True,
)
LLAMA = dataclasses.replace(
    QWEN, architecture="LlamaForCausalLM", model_type="llama", qkv_bias=False
)
TOYS = {
    "qwen": QWEN,
    "qwen-longer-heads": dataclasses.replace(QWEN, hidden_size=228, num_heads=6, head_dim=32),
    "llama": LLAMA,
    "llama-two-parts": dataclasses.replace(LLAMA, hidden_size=84),
    "llama-narrow-groups": dataclasses.replace(
        LLAMA, hidden_size=120, num_heads=10, num_kv_heads=5
    ),
    "llama-no-padding": dataclasses.replace(LLAMA, vocab_size=96),
}
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}
"""As published."""
TINY = {
    **SMALL,
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "initializer_range": 0.07,
}
"""The sizes of headway-tiny."""


def small_folder(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """A random Llama whose norms are not one."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", params=TOYS)
def pair(request: pytest.FixtureRequest, small: Path, tmp_path_factory) -> tuple[Path, Path]:
    """(the small folder, the widened one), in bf16."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    widen(small, TOYS[request.param], out)
    return small, out


@torch.inference_mode()
def logits_of(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' logits, (T, V)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model(torch.tensor([ids])).logits[0].float()


def test_logits_are_the_small_models(pair: tuple[Path, Path]):
    """In fp32 within 1e-4, through transformers; padding tokens are out of reach."""
    small, wide = pair
    ids = prompts([200], SMALL["vocab_size"])[0]
    expected, found = logits_of(small, ids), logits_of(wide, ids)
    assert expected.abs().max() > 3, "the test model hardly decides"
    assert_close(found[:, : expected.shape[1]], expected, rtol=0, atol=1e-4)
    assert (found[:, expected.shape[1] :] < -1000).all()


def test_greedy_tokens_and_logprobs_through_headway(pair: tuple[Path, Path]):
    """In fp32, several prompts together; log-probabilities of prompts and answers too."""
    asked = SamplingParams(temperature=0, max_tokens=40, logprobs=3, prompt_logprobs=0)
    answers = []
    for folder in pair:
        llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, kv_memory="16MiB")
        given = prompts([1, 5, 33, 90], SMALL["vocab_size"])
        answers.append(llm.generate(given, asked, use_tqdm=False))
    for ours, theirs in zip(*answers, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for one, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert {i: p.logprob for i, p in one.items()} == pytest.approx(
                {i: p.logprob for i, p in other.items()}, abs=1e-4
            )
        for one, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            (mine,), (its,) = one.values(), other.values()
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def with_heads(small: Path, folder: Path) -> Path:
    """A copy of the small model, with two random heads of two blocks."""
    shutil.copytree(small, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{head}.{block}.linear.{name}": torch.randn(shape, generator=generator)
        for head, block in itertools.product(range(2), range(2))
        for name, shape in (("weight", (36, 36)), ("bias", (36,)))
    }
    told = {"medusa_num_heads": "2", "medusa_num_layers": "2", "head": "shared"}
    save_file(tensors, folder / "medusa.safetensors", metadata=told)
    return folder


def with_layer(small: Path, folder: Path) -> Path:
    """A copy of the small model, with a random layer of its sizes that drafts."""
    shutil.copytree(small, folder)
    torch.manual_seed(0)
    shape = RecipeShape(**{name: SMALL[name] for name in SMALL if hasattr(RecipeShape, name)})
    tensors = {name: value.detach() for name, value in Eagle(shape).named_parameters()}
    for value in tensors.values():
        if value.dim() > 1:
            value.normal_(std=value.shape[1] ** -0.5)
    tensors["fc.bias"] = torch.randn(36)
    save_file(tensors, folder / "eagle.safetensors")
    return folder


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(("source", "made"), [("medusa", with_heads), ("eagle", with_layer)])
def test_what_drafts_guesses_as_beside_the_small_model(
    toy: str, source: str, made: Callable[[Path, Path], Path], small: Path, tmp_path: Path
):
    folder, out = made(small, tmp_path / "small"), tmp_path / "wide"
    widen(folder, TOYS[toy], out)
    told = []
    for each in (folder, out):
        engine = engine_for(each, speculative_method=source, dtype="float32", kernels="torch")
        proposals = Proposals()
        engine.scheduler.drafts.speculator = proposals
        finish(engine, [greedy(i, ids, 12) for i, ids in enumerate(prompts([1, 5, 33, 90], 96))])
        told.append(proposals.told)
    assert len(told[0]) > 20 and told[0] == told[1]
    assert len({tuple(guesses) for _, guesses in told[0]}) > 5


def test_in_bf16_it_errs_no_more_than_the_small_model(pair: tuple[Path, Path]):
    """Rounding on the way is of the small model's own size, not larger by the norms' scale."""
    small, wide = pair
    ids = prompts([200], SMALL["vocab_size"])[0]
    exact = logits_of(small, ids)
    own = (logits_of(small, ids, torch.bfloat16) - exact).norm()
    its = (logits_of(wide, ids, torch.bfloat16)[:, : exact.shape[1]] - exact).norm()
    assert its < 1.5 * own


@pytest.mark.parametrize("toy", ["qwen", "llama"])
def test_a_padding_token_in_the_prompt_does_no_harm(toy: str, small: Path, tmp_path: Path):
    """Numbers stay finite, what follows is sane, and it still chooses no padding token."""
    widen(small, TOYS[toy], tmp_path / "out")
    ids = prompts([50], SMALL["vocab_size"])[0]
    for dtype in (torch.float32, torch.bfloat16):
        found = logits_of(tmp_path / "out", [*ids, 250, *ids], dtype)
        assert torch.isfinite(found).all()
        assert (found.argmax(-1) < SMALL["vocab_size"]).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_sample_no_padding_token(quantization: str, pair: tuple[Path, Path]):
    """The floor survives a scale a row: hot samples are tokens of the small model."""
    llm = LLM(pair[1], quantization=quantization, skip_tokenizer_init=True, kv_memory="16MiB")
    hot = SamplingParams(temperature=2, seed=1, max_tokens=60, ignore_eos=True)
    answers = llm.generate(prompts([1, 5, 33, 90], SMALL["vocab_size"]), hot, use_tqdm=False)
    sampled = [token for answer in answers for token in answer.outputs[0].token_ids]
    assert len(sampled) == 240
    assert max(sampled) < SMALL["vocab_size"]


@pytest.mark.parametrize("toy", ["qwen", "qwen-longer-heads"])
def test_float32_is_one_part(toy: str, tmp_path: Path):
    """A float32 folder stays float32, and its norm weights need no second part."""
    small = small_folder(tmp_path / "small", torch.float32)
    plan = widen(small, TOYS[toy], tmp_path / "out")
    assert (plan.dtype, plan.parts) == ("float32", 1)
    assert plan.num_copies == (2 if toy == "qwen-longer-heads" else 1)
    ids = prompts([100], SMALL["vocab_size"])[0]
    expected, found = logits_of(small, ids), logits_of(tmp_path / "out", ids)
    assert_close(found[:, : expected.shape[1]], expected, rtol=0, atol=1e-4)


def test_weights_cost_what_real_ones_cost(pair: tuple[Path, Path]):
    """Every number is finite and none denormal; spare rows are noise; two runs agree."""
    _, wide = pair
    with safe_open(wide / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all(), name
        size = tensor.float().abs()
        assert (size[size > 0] > torch.finfo(torch.bfloat16).tiny).all(), name
        if "layers.2." in name and name.endswith(("q_proj.weight", "up_proj.weight")):
            assert tensor.float().std() == pytest.approx(0.02, rel=0.1)


def test_two_runs_write_the_same_bytes(small: Path, tmp_path: Path):
    for name in ("a", "b"):
        widen(small, QWEN, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_real_shape_has_its_published_size(name: str, tmp_path: Path):
    """Counted from what would be written for headway-tiny, which fits into every row."""
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    )
    plan = plan_widening(read_model_spec(tmp_path), find_shape(name.upper()))
    written = entries(plan, {})
    assert sum(prod(entry.shape) for entry in written) == PARAMETERS[name]
    assert plan.floor < plan.large.hidden_size
    assert plan.parts == (2 if name == "smollm2-135m" else 3)


def test_progress_counts_every_byte_in_small_pieces(small: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    large = dataclasses.replace(QWEN, vocab_size=2 * ROWS_AT_ONCE + 200)
    widen(small, large, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    steps = [after - before for (before, _), (after, _) in itertools.pairwise(seen)]
    assert max(steps) == ROWS_AT_ONCE * QWEN.hidden_size * 2
    assert seen[-1][0] == seen[-1][1] < (tmp_path / "out" / "model.safetensors").stat().st_size


# ── what is refused ─────────────────────────────────────────────────────────────────────────

UNLIKE = {
    "mlp_bias": {"mlp_bias": True},
    "attention_bias": {"attention_bias": True},
    "lm_head": {"tie_word_embeddings": False},
    "rope_scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    },
    "Qwen2ForCausalLM": {"architectures": ["Qwen2ForCausalLM"]},
    "vocab_size 301": {"vocab_size": 301},
    "hidden_size 56": {"hidden_size": 56},
    "num_hidden_layers 4": {"num_hidden_layers": 4},
    "num_key_value_heads 3": {"num_key_value_heads": 3},
    "intermediate_size 81": {"intermediate_size": 81},
    "85 are needed": {"hidden_size": 42},
    "head_dim 10": {"head_dim": 10},
}


@pytest.mark.parametrize("word", UNLIKE)
def test_what_does_not_fit_is_refused_by_name(word: str, small: Path, tmp_path: Path):
    """Before anything is written."""
    (tmp_path / "small").mkdir()
    for file in small.iterdir():
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path / "small", **UNLIKE[word])
    with pytest.raises(HeadwayError) as caught:
        widen(tmp_path / "small", QWEN, tmp_path / "out")
    assert word in str(caught.value)
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


def test_an_unknown_shape_names_the_known():
    for name in ("qwen9", ""):
        with pytest.raises(UsageError) as caught:
            find_shape(name)
        assert all(known in caught.value.fix for known in SHAPES)


def test_a_place_that_is_taken_stays_as_it_is(small: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, word in (("full", "not empty"), ("file", "is a file"), ("file/below", "cannot")):
        with pytest.raises(UsageError, match=word):
            widen(small, QWEN, tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    widen(small, QWEN, tmp_path / "empty")


def test_what_fails_half_way_leaves_nothing(small: Path, tmp_path: Path):
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        widen(small, QWEN, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_before(small: Path, tmp_path: Path):
    endless = dataclasses.replace(QWEN, vocab_size=2**40)
    with pytest.raises(UsageError, match="GiB are free"):
        widen(small, endless, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(small: Path, tmp_path: Path):
    (tmp_path / "small").mkdir()
    for file in small.iterdir():
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path / "small", intermediate_size=44)
    with pytest.raises(CheckpointError, match=r"gate_proj|down_proj|up_proj"):
        widen(tmp_path / "small", QWEN, tmp_path / "out")


# ── where things lie ────────────────────────────────────────────────────────────────────────


def plan_of(small: Path, large: Shape) -> Widening:
    return plan_widening(read_model_spec(small), large)


def test_heads_keep_their_groups(small: Path):
    """6 heads over 2 in groups of 7 and of 2: the second needs two large KV heads for one."""
    plan = plan_of(small, QWEN)
    assert plan.query_heads() == [0, 1, 2, 7, 8, 9]
    assert plan.kv_heads() == {0: 0, 1: 1}
    plan = plan_of(small, TOYS["llama-narrow-groups"])
    assert plan.query_heads() == [0, 1, 2, 4, 5, 6]
    assert plan.kv_heads() == {0: 0, 1: 0, 2: 1, 3: 1}


def test_dims_keep_their_frequencies(small: Path):
    dims = plan_of(small, TOYS["qwen-longer-heads"]).head_dims()
    assert dims == [*range(0, 16, 2), *range(16, 32, 2)]
    assert plan_of(small, QWEN).head_dims() == list(range(16))


# ── the real shape ──────────────────────────────────────────────────────────────────────────


@pytest.mark.hardening
@pytest.mark.parametrize(("name", "atol"), [("qwen2.5-0.5b", 1e-4), ("smollm2-135m", 5e-4)])
def test_the_real_shape(name: str, atol: float, tmp_path: Path):
    """headway-tiny's sizes, random, in a real shape: logits, and greedy tokens through Headway.

    Norm weights have 24 bits where the stream runs in three copies, 17 where it runs in two: twelve
    norms of logits up to 5 may be off by 12 · 5 · 2^-17 = 4.6e-4 there, on any machine.
    """
    small = small_folder(tmp_path / "small", **TINY)
    widen(small, SHAPES[name], tmp_path / "out")
    ids = prompts([60], TINY["vocab_size"])[0]
    expected, found = logits_of(small, ids), logits_of(tmp_path / "out", ids)
    assert expected.abs().max() < 5
    assert_close(found[:, : expected.shape[1]], expected, rtol=0, atol=atol)
    assert (found[:, expected.shape[1] :] < -1000).all()
    asked = SamplingParams(temperature=0, max_tokens=32)
    tokens = []
    for folder in (small, tmp_path / "out"):
        llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, kv_memory="64MiB")
        tokens.append(llm.generate([ids], asked, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]
