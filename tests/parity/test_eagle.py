"""A layer that drafts from the model's states guesses what its numbers say; bad files are refused.

The reference is the layer drawn in plain torch over states of transformers, each sequence alone.
"""

import random
from pathlib import Path

import pytest
import torch
from recipes.tiny.eagle import Eagle, shifted
from recipes.tiny.medusa import load_exported
from recipes.tiny.model import Shape
from safetensors.torch import load_file, save_file
from torch import Tensor

from drive import engine_for, finish
from headway.config.options import EngineOptions
from headway.config.speculation_config import EagleSpec
from headway.core.errors import CheckpointError, UsageError
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.planning import plan_settings
from headway.spec.embedded import model_folder
from parity.drafting import COUNT, Foreknowing, Proposals, some_requests
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FILE = "eagle.safetensors"
SHAPE = Shape(vocab_size=4096)
EXACT = {"max_model_len": 256, "dtype": "float32"}


def random_layer() -> Eagle:
    """It says something else than the model, and what it says depends on all that it reads."""
    torch.manual_seed(5)
    layer = Eagle(SHAPE)
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return layer.requires_grad_(False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """headway-tiny with a layer of random weights."""
    path = tmp_path / "model"
    path.mkdir()
    for file in model_folder(None).iterdir():
        if file.suffix != ".safetensors" or file.name == "model.safetensors":
            (path / file.name).symlink_to(file)
    write(path, draft_batch(random_layer()))
    return path


def draft_batch(layer: Eagle) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in layer.named_parameters()}


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / FILE)


def asking_engine(
    folder: Path, proposals: Proposals | None = None, **options: object
) -> tuple[Engine, Proposals]:
    """An engine whose layer is asked for guesses in every step."""
    engine = engine_for(folder, speculative_method="eagle", **options)
    asked = proposals or Proposals()
    engine.scheduler.drafts.speculator = asked
    return engine, asked


@torch.inference_mode()
def worst_rank(layer: Eagle, told: list[tuple[list[int], list[int]]]) -> float:
    """By how much of a logit a guess is behind the likeliest, at most.

    The states of tokens that were guessed are those that the layer guessed.
    """
    model, worst = load_exported(model_folder(None)), 0.0
    for known, guesses in told:
        tokens = torch.tensor([known])
        before = shifted(model(tokens))
        for guess in guesses:
            length = tokens.shape[1]
            embedded = model.embed_tokens(tokens)
            states = layer(embedded, before, model.cos[:length], model.sin[:length])
            logits_V = model.logits(states[0, -1])
            worst = max(worst, float(logits_V.max() - logits_V[guess]))
            tokens = torch.cat((tokens, torch.tensor([[guess]])), 1)
            before = torch.cat((before, states[:, -1:]), 1)
    return worst


@pytest.mark.parametrize(
    ("options", "most_off"),
    [
        (EXACT | {"kernels": "torch"}, 1e-3),
        (EXACT, 1e-3),
        ({"num_blocks": 40, "block_size": 4, "max_num_seqs": 6}, 0.5),
        ({"num_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 4}, 0.5),
        ({"max_model_len": 256, "quantization": "int4", "kv_cache_dtype": "int8"}, None),
        ({"max_model_len": 256, "kv_cache_dtype": "int4"}, None),
        ({"num_blocks": 14, "max_num_seqs": 4, "kv_host_memory": 2**24}, None),
        ({"max_model_len": 256, "draft_vocab_size": 1024}, None),
    ],
    ids=[
        "torch",
        "native",
        "short blocks",
        "little room",
        "int4",
        "int4 KV",
        "host memory",
        "some tokens",
    ],
)
@pytest.mark.parametrize("knows", [False, True], ids=["wrong", "right"])
def test_it_guesses_what_its_numbers_say(
    folder: Path, options: dict[str, object], most_off: float | None, knows: bool
):
    """After shared, found, copied and preempted blocks, and after guesses that were wrong or right.

    A guess may be less likely than the likeliest by `most_off` of its logit, for rounding.
    """
    drafting = ("num_blocks", "draft_vocab_size")
    plain = {key: value for key, value in options.items() if key not in drafting}
    requests = some_requests(random.Random(3), 14, kernels=options.get("kernels"))
    wanted = finish(engine_for(model_folder(None), **plain), requests)
    answers = {key: answer.token_ids for key, answer in wanted.items()}
    asked = Foreknowing(answers) if knows else Proposals()
    engine, proposals = asking_engine(folder, asked, **options)
    found = finish(engine, requests)
    assert {key: answer.token_ids for key, answer in found.items()} == answers
    assert proposals.num_guessed > 100 and len(proposals.told) > 30
    assert proposals.num_kept > 50 if knows else proposals.num_kept < 20
    assert max(len(guesses) for _, guesses in proposals.told) >= COUNT - 1
    if most_off is not None:
        chosen = random.Random(1).sample(proposals.told, 30)
        assert worst_rank(random_layer(), chosen) < most_off


def test_blocks_from_elsewhere_have_no_states(folder: Path):
    """Their entries are computed anew, with zeros for states."""
    engine, _ = asking_engine(folder, **EXACT)
    finish(engine, some_requests(random.Random(4), 2))
    drafter = engine.executor.drafter  # type: ignore[attr-defined]
    written = drafter.states_BSH.flatten(1).any(1).nonzero().flatten().tolist()
    assert len(written) > 3 and 0 not in written and drafter._valid[written].any()
    drafter.invalidate(written)
    assert not drafter.states_BSH.any() and not drafter._valid[written].any()


def bigrams(folder: Path) -> None:
    """A model whose next token depends on the last one alone, and a layer that knows its states."""
    model = tiny_model("llama", intermediate_size=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = model.model.embed_tokens.weight
        rows /= rows.square().mean(-1, keepdim=True).sqrt()
    save(model, folder)
    size, scale = model.config.hidden_size, model.model.norm.weight.detach()
    shape = Shape(vocab_size=211, hidden_size=size, intermediate_size=20, head_dim=8)
    tensors = draft_batch(Eagle(shape))
    tensors["fc.weight"] = torch.cat((scale.diag(), torch.zeros(size, size)), 1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    write(folder, tensors)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_it_knows_is_kept(tmp_path: Path, temperature: float):
    """Greedy and drawn with the model's numbers, every guess is right and the tokens the same."""
    bigrams(tmp_path / "model")
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    requests = [Request(i, [7 + i, 9, 11][: 1 + i], sampling) for i in range(3)]
    options = {"dtype": "float32", "skip_tokenizer_init": True}
    engine, proposals = asking_engine(tmp_path / "model", **options)
    assert finish(engine, requests) == finish(engine_for(tmp_path / "model", **options), requests)
    assert proposals.num_kept == proposals.num_guessed > 80


def test_who_is_asked(folder: Path):
    """`auto` takes a layer before heads; a drafting model that is given before either."""

    def speculation(**options: object):
        return plan_settings(folder, EngineOptions(device="cpu", **options))[1].speculation

    (folder / "medusa.safetensors").symlink_to(model_folder(None) / "medusa.safetensors")
    found = speculation(speculative_method="auto", num_speculative_tokens=6)
    assert found.sources[-1] == found.drafter == "eagle" and found.max_proposed == 6
    assert found.eagle == EagleSpec(
        num_heads=3,
        num_kv_heads=1,
        intermediate_size=512,
        qkv_bias=False,
        fc_bias=False,
        num_parameters=sum(value.numel() for value in draft_batch(random_layer()).values()),
    )
    assert speculation(speculative_method="medusa").eagle is None
    assert speculation(speculative_method="auto", draft_model="headway-draft").drafter == "draft"
    for options in (
        {"speculative_method": "eagle,medusa"},
        {"speculative_method": "ngram, eagle ,draft"},
    ):
        with pytest.raises(UsageError, match="only one of them"):
            speculation(**options, draft_model="headway-draft" if "draft" in str(options) else "")
    (folder / FILE).unlink()
    assert speculation(speculative_method="auto").drafter == "medusa"
    with pytest.raises(UsageError, match=r"needs eagle\.safetensors"):
        speculation(speculative_method="ngram,eagle")


def test_its_memory_is_planned(folder: Path):
    """192 numbers of a state, a key and a value of 64, of two bytes, for each token."""
    with_it, without = (
        plan_settings(
            folder, EngineOptions(device="cpu", kv_memory=2**22, speculative_method=named)
        )
        for named in ("eagle", "off")
    )
    per_token = 6 * 2 * 64 * 2
    expected = 2**22 // (16 * (per_token + 2 * 192 + 2 * 64 * 2))
    assert with_it[1].cache.num_blocks == (expected,)
    assert without[1].cache.num_blocks == (2**22 // (16 * per_token),)
    engine = engine_for(folder, speculative_method="eagle", kv_memory=2**22, max_model_len=256)
    assert engine.executor.describe().kv_bytes <= 2**22
    chosen = {reason.name: reason for reason in with_it[2]}
    assert "a layer, 467,136 parameters" in chosen["eagle_weights"].why


def test_numbers_that_are_not_finite_cost_guesses_alone(folder: Path):
    """They reach neither the model nor the layer's own memory, in which others' entries lie."""
    requests = some_requests(random.Random(4), 5)
    wanted = finish(engine_for(model_folder(None), max_model_len=256), requests)
    tensors = draft_batch(random_layer())
    tensors["fc.weight"][3, 7] = float("nan")
    write(folder, tensors)
    engine, _ = asking_engine(folder, max_model_len=256)
    answers = finish(engine, requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in wanted.items()
    }
    (layer,) = engine.executor.drafter.forward.kv  # type: ignore[attr-defined]
    assert bool(layer.k.isfinite().all()) and bool(layer.v.isfinite().all())


def test_it_is_no_weight_of_the_model(folder: Path):
    """Whatever lies there, it is not read unless somebody asks for it."""
    (folder / FILE).write_bytes(b"no layer at all")
    requests = some_requests(random.Random(6), 2)
    answers = finish(engine_for(folder, max_model_len=256), requests)
    assert answers == finish(engine_for(model_folder(None), max_model_len=256), requests)


Q, K, V = (f"layers.0.self_attn.{name}_proj" for name in "qkv")
BAD = {
    "nothing": (None, "is missing"),
    "a matrix that is missing": ({"layers.0.mlp.up_proj.weight": None}, "up_proj.weight is miss"),
    "no queries": ({f"{Q}.weight": None}, "q_proj.weight is missing"),
    "a bias alone": ({f"{K}.bias": torch.zeros(64)}, "q_proj.bias is missing"),
    "a norm that EAGLE has not": (
        {"layers.0.input_layernorm.weight": torch.ones(192)},
        "input_layernorm.weight is left over",
    ),
    "two layers": ({"layers.1.mlp.up_proj.weight": torch.ones(2, 192)}, "layers.1.*left over"),
    "EAGLE-3's tokens": ({"d2t": torch.zeros(9, dtype=torch.int64)}, r"EAGLE-3 \(d2t\)"),
    "EAGLE-3's layer": ({"midlayer.self_attn.q_proj.weight": torch.zeros(2, 2)}, "is of EAGLE-3"),
    "EAGLE-3's states": ({"fc.weight": torch.zeros(192, 576)}, "fc.weight of three states"),
    "another hidden size": ({"fc.weight": torch.zeros(64, 128)}, r"\[64, 128\]; this model has"),
    "half a head": ({f"{Q}.weight": torch.zeros(32, 192)}, "q_proj has 32 rows and k_proj 64"),
    "heads without groups": (
        {f"{K}.weight": torch.zeros(128, 192), f"{V}.weight": torch.zeros(128, 192)},
        "no heads of 64 in groups",
    ),
    "a scalar": ({f"{Q}.weight": torch.zeros(())}, "q_proj.weight has no rows"),
    "no neurons": (
        {
            "layers.0.mlp.gate_proj.weight": torch.zeros(0, 192),
            "layers.0.mlp.up_proj.weight": torch.zeros(0, 192),
            "layers.0.mlp.down_proj.weight": torch.zeros(192, 0),
        },
        "gate_proj.weight has no rows",
    ),
    "another vocabulary": ({"embed_tokens.weight": torch.zeros(61, 192)}, r"\[61, 192\]"),
    "whole numbers": ({"fc.weight": torch.zeros(192, 384, dtype=torch.int64)}, "type I64"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_is_refused(folder: Path, case: str):
    other, words = BAD[case]
    tensors = {} if other is None else draft_batch(random_layer()) | other
    write(folder, {name: value for name, value in tensors.items() if value is not None})
    for method in ("eagle", "auto"):
        with pytest.raises(CheckpointError, match=words):
            plan_settings(folder, EngineOptions(device="cpu", speculative_method=method))


def test_a_file_that_is_cut_off_is_refused(folder: Path):
    whole = (folder / FILE).read_bytes()
    cut = [whole[:length] for length in (0, 7, 100, len(whole) - 1)]
    for spoiled in (*cut, whole.replace(b'"shape"', b'"sharp"', 1)):
        (folder / FILE).write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=r"eagle\.safetensors"):
            plan_settings(folder, EngineOptions(device="cpu", speculative_method="eagle"))


def test_a_published_file_is_read(folder: Path):
    """With biases, in fp16, and with a copy of the model's embedding, which is left where it is."""
    layer = random_layer()
    generator = torch.Generator().manual_seed(1)
    biases = {
        name: torch.randn(size, generator=generator)
        for name, size in (
            ("fc.bias", 192),
            *((f"{Q}.bias", 192), (f"{K}.bias", 64), (f"{V}.bias", 64)),
        )
    }
    tensors = draft_batch(layer) | biases
    tensors["embed_tokens.weight"] = load_file(model_folder(None) / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    write(folder, {name: value.half() for name, value in tensors.items()})
    engine, proposals = asking_engine(folder, **EXACT)
    finish(engine, some_requests(random.Random(3), 4))
    attention = layer.layers[0].self_attn
    layer.fc.bias = torch.nn.Parameter(biases["fc.bias"], requires_grad=False)
    for name, projection in zip("qkv", (attention.q_proj, attention.k_proj, attention.v_proj)):
        bias = biases[f"layers.0.self_attn.{name}_proj.bias"]
        projection.bias = torch.nn.Parameter(bias, requires_grad=False)
    assert len(proposals.told) > 20 and worst_rank(layer, proposals.told[:20]) < 0.1
