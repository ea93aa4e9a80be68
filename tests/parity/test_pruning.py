"""What pruning takes away is what was asked, and what nobody uses goes without a trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.compress.folder import new_folder, write_model
from headway.compress.prune.masks import METHODS, TWO_OF_FOUR, Pattern, sparsegpt, wanda
from headway.compress.prune.promise import memory, size_rows, smaller_spec
from headway.compress.prune.prune import PruneSettings, check, choose_layers, prune
from headway.compress.prune.structure import remove_units
from headway.compress.train.model import TrainedModel
from headway.core.errors import HeadwayError, UsageError
from headway.spec import read_json, read_model_spec
from headway.spec.formats import INT8
from parity.tiny import SIZES, prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite"),
    "smollm3",
)
ROWS = torch.tensor(prompts([40] * 6))
ALIKE = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
"""The second moments of two inputs that always have the same value."""


# ── single weights ──────────────────────────────────────────────────────────────────────────


def test_sparsegpt_gives_what_goes_to_what_stays():
    """0.4x + 0.6x is 1.0x: with the smaller weight at zero the other says it alone."""
    pruned = sparsegpt(torch.tensor([[0.4, 0.6]]), ALIKE, Pattern(0.5))
    assert pruned[0, 0] == 0
    assert float(pruned[0, 1]) == pytest.approx(1.0, abs=0.01)


def test_sparsegpt_without_correlation_changes_no_other_weight():
    weight = torch.tensor([[0.4, -0.6, 0.1, 0.9]])
    pruned = sparsegpt(weight, torch.eye(4), Pattern(0.5))
    assert_close(pruned, torch.tensor([[0.0, -0.6, 0.0, 0.9]]))


def test_wanda_weighs_weights_with_their_inputs():
    """0.5 of an input of size 1 moves the output less than 0.4 of one of size 3."""
    hessian = torch.diag(torch.tensor([1.0, 9.0]))
    assert wanda(torch.tensor([[0.5, 0.4]]), hessian, Pattern(0.5)).tolist() == [
        [0.0, pytest.approx(0.4)]
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inputs", [256, 270])
def test_two_of_each_four_are_zero(method: str, inputs: int):
    """Whatever the blocks; neighbours that are fewer than four stay."""
    weight, hessian = correlated(24, inputs)
    pruned = METHODS[method](weight, hessian, TWO_OF_FOUR)
    whole = inputs - inputs % 4
    zeros = (pruned[:, :whole].unflatten(1, (-1, 4)) == 0).sum(-1)
    assert (zeros == 2).all()
    if method != "sparsegpt":  # which has prune its tail nothing, but may change it
        assert_close(pruned[:, whole:], weight[:, whole:])
    assert (pruned[:, whole:] != 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_share_that_was_asked_is_zero(method: str):
    weight, hessian = correlated(16, 300)
    assert float((METHODS[method](weight, hessian, Pattern(0.3)) == 0).float().mean()) == (
        pytest.approx(0.3, abs=0.01)
    )


def test_making_good_is_worth_it():
    """What the outputs lose, by second moments: SparseGPT less than half of Wanda."""
    weight, hessian = correlated(24, 256)

    def lost(pruned: Tensor) -> float:
        gone = pruned - weight
        return float((gone @ hessian * gone).sum())

    found = {name: lost(method(weight, hessian, TWO_OF_FOUR)) for name, method in METHODS.items()}
    assert found["sparsegpt"] < 0.5 * found["wanda"] < 0.5 * found["magnitude"] * 1.2


def correlated(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(weights, second moments of inputs that mostly repeat some others)."""
    generator = torch.Generator().manual_seed(3)
    few = torch.randn(2000, 40, generator=generator) @ torch.randn(40, inputs, generator=generator)
    x = few + torch.randn(2000, inputs, generator=generator)
    x = x * torch.rand(inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator), x.T @ x / len(x)


# ── units ───────────────────────────────────────────────────────────────────────────────────


def test_of_two_neurons_that_are_alike_one_does_the_work_of_both():
    stay, weight = remove_units(torch.tensor([[0.4, 0.6], [2.0, 1.0]]), ALIKE, 1, 1)
    assert len(stay) == 1
    assert_close(weight.sum(1), torch.tensor([1.0, 3.0]), atol=0.02, rtol=0)


def test_the_same_number_goes_of_each_class():
    """Four heads of two dims over two KV heads; both heads of the first are weaker."""
    weight = torch.ones(3, 8) * torch.tensor([1.0, 1, 2, 2, 9, 9, 8, 8])
    stay, _ = remove_units(weight, torch.eye(8), 2, 1, classes=2)
    assert stay.tolist() == [1, 2]
    stay, _ = remove_units(weight, torch.eye(8), 2, 2)
    assert stay.tolist() == [2, 3]


def test_what_was_never_active_goes_first():
    """However large its weights are."""
    hessian = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    stay, weight = remove_units(torch.tensor([[0.1, 100.0, 0.1]]), hessian, 1, 1)
    assert stay.tolist() == [0, 2]
    assert_close(weight, torch.tensor([[0.1, 0.0, 0.1]]))


@pytest.mark.parametrize(("size", "count", "classes"), [(1, 60, 1), (4, 6, 2)])
def test_units_together_give_what_they_give_one_by_one(
    size: int, count: int, classes: int, monkeypatch: pytest.MonkeyPatch
):
    """H⁻¹ without one unit after the other: a row at a time, or so many at once."""
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(400, 96, generator=drawn) @ torch.randn(96, 96, generator=drawn)
    weight = torch.randn(20, 96, generator=drawn)
    stay, left = remove_units(weight, x.T @ x / 400, size, count, classes)
    monkeypatch.setattr("headway.compress.prune.structure.PENDING_ROWS", 1)
    one, each = remove_units(weight, x.T @ x / 400, size, count, classes)
    assert torch.equal(stay, one) and len(stay) == 96 // size - count * classes
    assert_close(left, each, atol=1e-4, rtol=1e-4)


# ── whole models ────────────────────────────────────────────────────────────────────────────


def with_dead(model: PreTrainedModel, settings: PruneSettings) -> PreTrainedModel:
    """Parts that no output depends on: every third neuron, KV head 1 or the first head of each KV
    head, layer 1."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(model.model.layers):
        out, down = layer.self_attn.o_proj, layer.mlp.down_proj
        heads = out.weight.data.unflatten(1, (config.num_key_value_heads, group, -1))
        if settings.neurons:
            down.weight.data[:, ::3] = 0
        if settings.kv_heads:
            heads[:, 1] = 0
        if settings.heads:
            heads[:, :, 0] = 0
        if settings.layers and index == 1:
            for linear in (out, down):
                linear.weight.data.zero_()
                if linear.bias is not None:
                    linear.bias.data.zero_()
    return model


def wanted_of(family: str, heads: bool) -> PruneSettings:
    """A third of the neurons and a layer; heads or KV heads where they can go."""
    neurons, both = 18 / 52, family != "olmo2"  # which norms all heads together
    return PruneSettings(neurons=neurons, layers=1, heads=heads * both, kv_heads=(not heads) * both)


def pruned_folder(folder: Path, out: Path, settings: PruneSettings) -> dict[str, Any]:
    """Prune `folder` into `out`; returns the new config."""
    generation = folder / "generation_config.json"
    found = prune(
        TrainedModel.open(folder, trainable=False),
        read_json(folder / "config.json"),
        read_json(generation) if generation.exists() else {},
        ROWS,
        settings,
    )
    with new_folder(out) as partial:
        write_model(partial, found.config, found.model.tensors(), found.model.spec.dtype)
    return found.config


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model(ROWS).logits


@pytest.mark.parametrize(
    ("family", "heads"), [*((family, False) for family in DENSE), ("llama", True), ("qwen2", True)]
)
def test_what_nobody_uses_goes_without_a_trace(family: str, heads: bool, tmp_path: Path):
    """transformers gives the smaller folder's logits, and they are the whole model's."""
    settings = wanted_of(family, heads)
    changes = {"hidden_size": 72} if family.startswith("gemma") else {}  # 8, 6 and 4 divide it
    model = with_dead(tiny_model(family, **changes), settings)
    config = pruned_folder(save(model, tmp_path / "whole"), tmp_path / "out", settings)
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert_close(logits_of(smaller), logits_of(model), atol=2e-4, rtol=1e-4)
    num_parameters = sum(p.numel() for p in smaller.parameters())
    assert num_parameters < sum(p.numel() for p in model.parameters())
    assert read_model_spec(tmp_path / "out").num_parameters == num_parameters
    assert config["head_dim"] == model.model.layers[0].self_attn.head_dim


def test_everything_at_once(tmp_path: Path):
    """Layers, heads, neurons and zeros together; the folder has the sizes that were promised."""
    folder = save(tiny_model("llama", num_hidden_layers=4, intermediate_size=96), tmp_path / "all")
    settings = PruneSettings(layers=1, kv_heads=1, heads=1, neurons=0.33, pattern=TWO_OF_FOUR)
    pruned_folder(folder, tmp_path / "out", settings)
    spec, before = read_model_spec(tmp_path / "out"), read_model_spec(folder)
    promise = smaller_spec(before, settings)
    for name in ("num_layers", "num_heads", "num_kv_heads", "intermediate_size", "num_parameters"):
        assert getattr(spec, name) == getattr(promise, name)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (3, 3, 3)
    assert spec.intermediate_size == 64
    model = TrainedModel.open(tmp_path / "out")
    for name, linear in model.linears.items():
        share = float((linear.weight == 0).float().mean())
        assert share == (0 if name == "head" else pytest.approx(0.5, abs=0.01))


def test_the_layer_that_says_least_goes():
    torch.manual_seed(0)
    folderless = TrainedModel(spec_of(num_hidden_layers=4))
    for parameter in folderless.decoder.parameters():
        parameter.data.normal_(0, 0.3)
    folderless.decoder.layers[2].mlp.down.weight.data.mul_(1e-3)
    folderless.decoder.layers[2].attention.out.weight.data.mul_(1e-3)
    folderless.make_ready()
    heard: list[int] = []
    assert choose_layers(folderless, ROWS, 1, lambda: heard.append(1)) == [0, 1, 3]
    assert len(heard) == 4


def spec_of(**changes: object) -> Any:
    from headway.spec.read import spec_from_config

    config = {**SIZES, "architectures": ["LlamaForCausalLM"], **changes}
    return spec_from_config(config, {})


# ── what is said and what is refused ────────────────────────────────────────────────────────


def test_what_is_promised_is_no_more_than_bytes_and_products_allow():
    before = spec_of(intermediate_size=512, hidden_size=192, tie_word_embeddings=True)
    settings = PruneSettings(neurons=0.375)
    rows = {row[0]: row for row in size_rows(before, smaller_spec(before, settings), settings)}
    assert rows["neurons of an MLP"][1:3] == ("512", "320")
    assert "at most" in rows["bytes of a decode step"][3]
    assert "at most" in rows["FLOPs of a prefill"][3]
    whole, zeroed = (
        memory(before, smaller_spec(before, settings), settings),
        PruneSettings(pattern=TWO_OF_FOUR),
    )
    assert (
        whole - memory(before, before, zeroed) == 4 * smaller_spec(before, settings).num_parameters
    )
    zeros = size_rows(before, before, PruneSettings(pattern=TWO_OF_FOUR))
    assert [row[0] for row in zeros] == ["bytes, compressed"]
    assert "no faster here" in zeros[0][3]


@pytest.mark.parametrize(
    ("family", "settings", "word"),
    [
        ("llama", PruneSettings(), "Nothing is to be removed"),
        ("llama", PruneSettings(layers=2), "--layers 2"),
        ("llama", PruneSettings(kv_heads=4), "--kv-heads 4"),
        ("llama", PruneSettings(heads=2), "--heads 2"),
        ("llama", PruneSettings(neurons=0.001), "--neurons 0.001"),
        ("olmo2", PruneSettings(heads=1), "norms all of its heads together"),
        ("gemma2", PruneSettings(kv_heads=1), "6 heads would be left"),
        ("qwen3moe", PruneSettings(layers=1), "experts"),
    ],
)
def test_what_cannot_be_removed_is_refused_by_name(
    family: str, settings: PruneSettings, word: str, tmp_path: Path
):
    spec = read_model_spec(save(tiny_model(family), tmp_path / "m"))
    with pytest.raises(HeadwayError, match=word) as caught:
        check(spec, settings)
    assert caught.value.fix


def test_a_quantized_folder_is_refused(tmp_path: Path):
    """Its levels are no weights in 16 bits, in which the smaller folder would be written."""
    spec = read_model_spec(save(tiny_model("llama"), tmp_path / "m"))
    with pytest.raises(HeadwayError, match="quantized"):
        check(replace(spec, formats=(("layers.0.mlp.down", INT8),)), PruneSettings(layers=1))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="not empty"), new_folder(tmp_path / "taken"):
        pass
    with pytest.raises(UsageError, match="No such file"), new_folder(tmp_path / "out") as partial:
        (partial / "no folder" / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    with new_folder(tmp_path / "out") as partial:
        (partial / "config.json").write_text("{}")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "config.json").exists()
