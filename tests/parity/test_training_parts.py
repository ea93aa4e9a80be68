"""The parts of training that runs are made of: rows, checkpoints, zeros, heads, texts."""

import json
from pathlib import Path

import pytest
import torch
from recipes.tiny import eagle
from recipes.tiny.medusa import Foresight, Heads
from recipes.tiny.model import Llama, Shape
from safetensors import safe_open
from torch import Tensor, nn
from torch.testing import assert_close

from headway.compress.train import checkpoint
from headway.compress.train.data import Mixture, TokenSource
from headway.compress.train.distill import Distillation, mean
from headway.compress.train.fake import FakeRounding, fake_inputs
from headway.compress.train.loop import check_same_settings
from headway.compress.train.model import TrainedModel
from headway.compress.train.run import identity
from headway.compress.train.student import keep_zeros, make_optimizer, round_layers
from headway.core.errors import UsageError
from headway.runtime.rounding import round_weight
from headway.spec.formats import INT8
from headway.spec.quantization import Quantization
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.tensor(prompts([30] * 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("mistral"), tmp_path_factory.mktemp("mistral") / "m")


@pytest.fixture
def model(folder: Path) -> TrainedModel:
    return TrainedModel.open(folder)


@torch.no_grad()
def said(model: TrainedModel, rows: Tensor) -> Tensor:
    return model.logits(model(rows))


def test_rows_do_not_see_each_other_nor_what_comes(model: TrainedModel):
    """A row alone says the same; another last token changes the last position alone."""
    whole = said(model, ROWS)
    assert_close(said(model, ROWS[1:2]), whole[1:2], atol=1e-5, rtol=1e-5)
    other = ROWS.clone()
    other[:, -1] = (other[:, -1] + 1) % 211
    assert_close(said(model, other)[:, :-1], whole[:, :-1], atol=1e-5, rtol=1e-5)
    assert not torch.equal(said(model, other)[:, -1], whole[:, -1])


def test_a_window_ends(model: TrainedModel):
    """Of two layers with a window of 17 the last token sees 33 back, and no token more."""
    rows = torch.tensor(prompts([40]))
    other = rows.clone()
    other[0, 0] = (other[0, 0] + 1) % 211
    before, after = said(model, rows), said(model, other)
    assert_close(after[0, 33:], before[0, 33:], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[0, 32], before[0, 32], atol=1e-6)


def test_inputs_are_rounded_by_block():
    """The largest of a block is level 127; the gradient is that of the plain input."""
    x = torch.tensor([[1.27, 0.004, -0.5], [0.0, 0.0, 0.0]], requires_grad=True)
    rounded = fake_inputs(x, INT8)
    assert_close(rounded.detach(), torch.tensor([[1.27, 0.0, -0.5], [0.0, 0.0, 0.0]]))
    (rounded * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1.0, 2.0, 3.0]] * 2


def test_a_group_of_zeros_is_no_division(model: TrainedModel):
    """Its scale is zero: forward gives zeros, and no gradient is NaN."""
    weight = torch.zeros(2, 64, requires_grad=True)
    fake = FakeRounding(round_weight(weight, 32))
    x, rounded = fake(torch.ones(1, 64), weight)
    (x @ rounded.T).sum().backward()
    assert not bool(rounded.any())
    assert weight.grad is not None and bool(torch.isfinite(weight.grad).all())
    assert fake.stretch_OG.grad is not None and bool(torch.isfinite(fake.stretch_OG.grad).all())


def test_scales_learn_faster_than_weights(model: TrainedModel):
    plain = make_optimizer(model)
    assert [group["factor"] for group in plain.param_groups] == [1.0]
    round_layers(model, Quantization.of("int4", 32))
    weights, scales = make_optimizer(model).param_groups
    assert scales["factor"] > weights["factor"] == 1.0
    assert len(scales["params"]) == len(model.linears)
    everything = {id(p) for p in model.parameters()}
    assert {id(p) for g in (weights, scales) for p in g["params"]} == everything


def test_a_few_zeros_are_chance_and_many_are_held(model: TrainedModel):
    down, out = model.linears["layers.0.mlp.down"], model.linears["layers.0.attention.out"]
    down.weight.data[0, 0] = 0.0
    out.weight.data[:, ::2] = 0.0
    count, settle = keep_zeros(model)
    assert count == out.weight.numel() // 2
    for linear in (down, out):
        linear.weight.data.add_(1.0)
    settle()
    assert bool((out.weight[:, ::2] == 0).all()) and bool((out.weight[:, 1::2] != 0).all())
    assert float(down.weight[0, 0].detach()) == 1.0


def test_a_checkpoint_holds_moments_and_is_of_its_module(tmp_path: Path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    module, optimizer = made()
    module(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save(path, module, [optimizer], 7)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with safe_open(path, "pt") as file:
        assert {"model.0.weight", "exp_avg/0.weight", "step/1.bias"} <= set(file.keys())
    other, others = made()
    assert checkpoint.load(path, other, [others]) == 7
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    for mine, loaded in zip(module.parameters(), other.parameters(), strict=True):
        own, its = optimizer.state[mine], others.state[loaded]
        assert own.keys() == its.keys() and all(torch.equal(own[key], its[key]) for key in own)
    with pytest.raises(KeyError):
        checkpoint.load(path, nn.Linear(3, 2), [])


def test_heads_see_the_same_positions_after_a_stop():
    """Draws come one behind the other: asked for step 3 alone, those before it are skipped."""
    states = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    wanted = torch.randint(11, (50, 2), generator=torch.Generator().manual_seed(1))
    heads, output = Heads(8, 2, 1), torch.randn(11, 8)
    whole, resumed = (Foresight(heads, output, states, wanted, 16, 4) for _ in range(2))
    losses = [float(whole(step)[0].detach()) for step in range(4)]
    assert float(resumed(3)[0].detach()) == losses[3] != losses[2]


def test_a_layer_learns_the_states_of_a_model():
    """Its guesses become the model's, from its own states too; a step sees what its number says."""
    torch.manual_seed(0)
    shape = Shape(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
    )
    model = Llama(shape).eval().requires_grad_(False)
    rows = [((7 * row + torch.arange(12 + row) * (1 + row % 3)) % 60).tolist() for row in range(40)]
    given = [(tokens, 4) for tokens in rows]
    losses = eagle.Foresight(eagle.Eagle(shape), model, given[4:], 256, 3)
    before = eagle.right(losses, given[:4])
    optimizer = torch.optim.AdamW(losses.eagle.parameters(), lr=0.01)
    for step in range(150):
        loss, shown = losses(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert min(eagle.right(losses, given[:4])) > 0.5 > max(before)
    assert list(shown) == [f"{what} {depth}" for depth in range(3) for what in ("guess", "off")]
    again = eagle.Foresight(losses.eagle, model, given[4:], 256, 3)
    assert float(again(7)[0].detach()) == float(losses(7)[0].detach())


def test_a_layer_learns_what_is_guessed_in_answers():
    """Behind the prompt's two tokens 1 comes, and from it the first guess, of 2."""
    rows = [([7, 8, 1, 2, 3], 2), ([9, 1, 2], 1)]
    tokens_BT, counts_BT = eagle.padded(rows)
    assert tokens_BT.tolist() == [[7, 8, 1, 2, 3], [9, 1, 2, 0, 0]]
    assert counts_BT.nonzero().tolist() == [[0, 2], [0, 3], [1, 1]]
    assert eagle.padded(rows, 1)[1].nonzero().tolist() == [[0, 3]]
    assert eagle.shifted(torch.tensor([[[1.0], [2.0]]])).tolist() == [[[0.0], [1.0]]]


def test_the_text_itself_may_have_a_share_of_the_loss(model: TrainedModel):
    """All of it is the cross entropy of the next tokens, and the teacher is not asked."""
    documents = [[(row.tolist() * 3, 1.0)] for row in ROWS]
    mixture = Mixture(sources=[TokenSource.of("a", 1, documents)], num_rows=2, length=20, seed=0)
    losses = Distillation(teacher=model, student=model, mixture=mixture, mix=1.0)
    inputs, targets, _ = mixture.batch(0)
    expected = nn.functional.cross_entropy(said(model, inputs).flatten(0, 1), targets.flatten())
    assert float(losses(0)[0].detach()) == pytest.approx(float(expected), rel=0.02)
    same = Distillation(teacher=model, student=model, mixture=mixture)
    assert float(same(0)[0].detach()) == pytest.approx(0.0, abs=1e-5)
    assert float(mean(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0]))) == 1.75


def test_a_run_knows_its_folders_by_what_is_in_them(folder: Path, tmp_path: Path):
    name, digest = identity(folder)
    assert name == "m" and identity(folder) == [name, digest]
    other = save(tiny_model("mistral", rms_norm_eps=1e-3), tmp_path / "m")
    assert identity(other)[1] != digest
    (tmp_path / "training.json").write_text(json.dumps({"asked": {"student": [name, digest]}}))
    check_same_settings(tmp_path, {"student": [name, digest]})
    with pytest.raises(UsageError, match="a run with student"):
        check_same_settings(tmp_path, {"student": identity(other)})
