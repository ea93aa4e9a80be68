"""What calibrates and rounds: each method against what can be worked out by hand, or in fp32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headway.compress.awq import awq_scale, output_error
from headway.compress.calibration import CalibrationRows
from headway.compress.card import as_json, card
from headway.compress.folds import LayerState, apply_scale, layer_folds
from headway.compress.gptq import gptq
from headway.compress.grid import Grid, GridRule, grid_for
from headway.compress.matrices import is_router, layer_matrices
from headway.compress.outliers import keep_outliers
from headway.compress.packing import pack
from headway.compress.partial import Partial
from headway.compress.produce import make, open_model
from headway.compress.recipe import Recipe
from headway.compress.rotate import RotatedTensors
from headway.compress.rows import RowModel, Tensors
from headway.compress.smooth import smooth_scale
from headway.compress.statistics import Moments, collect_moments
from headway.compress.train.model import TrainedModel
from headway.core.errors import UnsupportedModelError
from headway.runtime.rounding import round_weight
from headway.spec.formats import INT8, Format
from parity.tiny import FAMILIES, prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

INT4 = Format("int4", 64)
EXACT = GridRule(dtype="float32")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def moments(inputs: int, tokens: int = 400, seed: int = 2) -> Tensor:
    """Of inputs that depend on each other, as a layer's do."""
    x = drawn(tokens, inputs, seed=seed) @ drawn(inputs, inputs, seed=seed + 1)
    return x.T @ x / tokens


# ── GPTQ ────────────────────────────────────────────────────────────────────────────────────


def test_two_outputs_of_four_inputs_by_hand():
    """Inputs 0 and 1 go together by half, 2 and 3 by a quarter; all scales are 1.

    Output 0: 0.4 → 0, its error 0.4 · 1/2 goes to 0.4: 0.6 → 1. Then 1.3 → 1, and 0.3 · 1/4 goes to
    0.45: 0.525 → 1. Output 1: -0.6 → -1, so 0.4 · 1/2 goes to 0.4: 0.6 → 1; 2.1 → 2, 0.1 / 4 goes
    to -0.51: -0.485 → 0. To the nearest they were [0 0 1 0] and [-1 0 2 -1].
    """
    weight = torch.tensor([[0.4, 0.4, 1.3, 0.45], [-0.6, 0.4, 2.1, -0.51]])
    hessian = torch.tensor(
        [[4.0, 2.0, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0], [0.0, 0.0, 4.0, 1.0], [0.0, 0.0, 1.0, 4.0]]
    )
    grid = Grid(torch.ones(2, 1), Format("int4", 32))
    found = gptq(weight, hessian, grid, by_activation=False, damping=0.0)
    assert found.levels_OH.tolist() == [[0, 1, 1, 1], [-1, 1, 2, 0]]
    assert grid.nearest(weight).levels_OH.tolist() == [[0, 0, 1, 0], [-1, 0, 2, -1]]
    # the other way round: 1 first, then 0; 3 first, then 2
    order = hessian + torch.diag(torch.tensor([0.0, 1e-3, 0.0, 1e-3]))
    found = gptq(weight, order, grid, damping=0.0)
    assert found.levels_OH.tolist() == [[1, 0, 1, 0], [0, 0, 2, -1]]


def test_inputs_that_do_not_correlate_are_rounded_to_the_nearest():
    weight = drawn(24, 256)
    for format in (INT4, INT8):
        grid = grid_for(weight, format, EXACT)
        found = gptq(weight, torch.eye(256), grid)
        assert torch.equal(found.levels_OH, grid.nearest(weight).levels_OH)


@pytest.mark.parametrize("by_activation", [True, False])
@pytest.mark.parametrize("inputs", [192, 320])
def test_outputs_lose_less_than_to_the_nearest(by_activation: bool, inputs: int):
    """And blocks of 128 give what one block gives: 320 inputs are two and a half."""
    weight, hessian = drawn(40, inputs), moments(inputs)
    grid = grid_for(weight, INT4, GridRule())
    found = gptq(weight, hessian, grid, by_activation=by_activation)
    lost = output_error(found.plain() - weight, hessian)
    assert lost < 0.5 * output_error(grid.nearest(weight).plain() - weight, hessian)


def test_blocks_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch):
    weight, hessian = drawn(16, 200), moments(200)
    grid = grid_for(weight, Format("int4", 32), GridRule())
    one = gptq(weight, hessian, grid)
    monkeypatch.setattr("headway.compress.gptq.BLOCK", 1000)
    other = gptq(weight, hessian, grid)
    assert (one.levels_OH != other.levels_OH).float().mean() < 0.01  # sums in another order


def test_dead_inputs_and_a_giant_token():
    """Inputs that were never seen are rounded to the nearest; one token of 1e4 spoils nothing."""
    weight, inputs = drawn(8, 128), 128
    seen = Moments(inputs)
    x = drawn(50, inputs)  # fewer tokens than inputs: no inverse
    x[:, 64:] = 0
    x[0] *= 1e4
    seen.add(x)
    grid = grid_for(weight, Format("int4", 32), GridRule())
    found = gptq(weight, seen.hessian(), grid)
    nearest = grid.nearest(weight)
    assert torch.equal(found.levels_OH[:, 64:], nearest.levels_OH[:, 64:])
    lost = output_error(found.plain() - weight, seen.hessian())
    assert lost <= output_error(nearest.plain() - weight, seen.hessian())
    assert torch.equal(gptq(weight, torch.zeros(128, 128), grid).levels_OH, nearest.levels_OH)


def test_tokens_that_are_not_finite_are_not_counted():
    seen = Moments(4)
    seen.add(torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, float("nan"), 0.0, 0.0]]))
    seen.add(torch.full((2, 4), float("inf")))
    assert seen.count == 1
    assert torch.equal(seen.hessian()[0], torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_moments_of_wide_inputs_are_whole(monkeypatch: pytest.MonkeyPatch):
    """In stripes of the upper triangle, in fp64 beyond so many tokens."""
    monkeypatch.setattr("headway.compress.statistics.COLUMNS_AT_ONCE", 7)
    monkeypatch.setattr("headway.compress.statistics.EXACT_TOKENS", 60)
    seen, x = Moments(20), drawn(90, 20)
    for part in x.split(30):
        seen.add(part)
    assert seen.outer_II.dtype == torch.float64
    torch.testing.assert_close(seen.hessian(), x.T @ x / 90)
    torch.testing.assert_close(seen.amax_I, x.abs().amax(0))
    torch.testing.assert_close(seen.mean_size, x.abs().mean(0))


# ── grids and files ─────────────────────────────────────────────────────────────────────────


def test_grid_of_either_sign_is_that_of_the_load():
    weight = drawn(12, 192).bfloat16()
    for format, group in ((Format("int4", 64), 64), (INT8, 0)):
        found = grid_for(weight, format, EXACT).nearest(weight)
        expected = round_weight(weight, group)
        assert torch.equal(found.levels_OH, expected.levels_OH)
        torch.testing.assert_close(
            found.scales_OG, expected.scales_OG.view(12, -1), rtol=1e-3, atol=0
        )


def test_searched_scales_lose_less_and_positive_ones_stay_positive():
    weight, importance = drawn(12, 192), drawn(192).abs() + 0.1

    def lost(rule: GridRule, weigh: Tensor | None = None) -> float:
        grid = grid_for(weight, INT4, rule, weigh)
        assert not rule.positive or (grid.scales_OG > 0).all()
        assert torch.equal(grid.scales_OG.bfloat16().float(), grid.scales_OG)
        error = (grid.nearest(weight).plain() - weight).square()
        return float((error * (1 if weigh is None else weigh)).sum())

    for positive in (False, True):
        rule = GridRule(positive=positive)
        assert lost(replace(rule, searched=True)) < lost(rule)
        assert lost(replace(rule, searched=True), importance) < lost(rule, importance)


def test_zeros_and_a_group_of_zeros_stay():
    weight = torch.zeros(2, 64)
    weight[1, 32] = -0.5
    found = grid_for(weight, Format("int4", 32), GridRule(searched=True)).nearest(weight)
    assert torch.equal(found.plain(), weight)


def test_levels_are_packed_from_the_lowest_bits():
    levels = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -8, 5]], dtype=torch.int8)
    words = pack(levels, 4)[0].tolist()
    assert [word & 0xFFFFFFFF for word in words] == [0x0BA798F0, 0x0000000D]
    assert pack(torch.tensor([[-128, 127, 0, 1]], dtype=torch.int8), 8).tolist() == [[-2122252544]]


# ── layer by layer, and what may be folded ──────────────────────────────────────────────────


UNREAD = (
    *("gptoss", "deepseekv2", "deepseekv3", "gemma3n", "qwen2moe"),
    *("granitehybrid", "qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe"),
)
"""Families that are served and not quantized: refused by name."""


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in UNREAD])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random folder of each family."""
    return save(tiny_model(request.param), tmp_path_factory.mktemp(request.param))


ROWS = prompts([23, 9])


def logits(model: RowModel) -> Tensor:
    """Of ROWS, layer by layer."""
    lens = [len(row) for row in ROWS]
    x = model.embed(ROWS)
    for index in range(model.spec.num_layers):
        x = model.run(model.layer(index), x, lens)
    return model.logits(model.norm(), model.head(), x)


def test_sink_logits_are_refused_by_name(tmp_path: Path):
    """gpt-oss is neither quantized, nor pruned, nor a teacher or student."""
    folder = save(tiny_model("gptoss"), tmp_path)
    with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM has sink logits"):
        RowModel(folder)
    with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM has experts"):
        TrainedModel.open(folder)


def test_experts_that_every_token_visits_are_refused_by_name(tmp_path: Path):
    """Their inputs are those of the others, which a fold into the norm would change alone."""
    with pytest.raises(UnsupportedModelError, match="Qwen2MoeForCausalLM has experts that every"):
        RowModel(save(tiny_model("qwen2moe"), tmp_path))


def test_layers_one_by_one_are_the_model(family: Path):
    """Every row's logits are those of transformers, though rows run together."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(family, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.cat([theirs(torch.tensor([row])).logits[0] for row in ROWS])
    torch.testing.assert_close(logits(RowModel(family)), expected, rtol=1e-4, atol=1e-4)


class Changed(Tensors):
    """A folder's tensors, some of them replaced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.changes: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        return self.changes[name] if name in self.changes else super().read(name)


def works(model: RowModel) -> list[LayerState]:
    """Every layer with the moments of its inputs."""
    lens, found = [len(row) for row in ROWS], []
    x = model.embed(ROWS)
    for index in range(model.spec.num_layers):
        layer = model.layer(index)
        with collect_moments(layer) as seen:
            x = model.run(layer, x, lens)
        prefix = f"model.layers.{index}."
        weights = {n: model.tensors.read(n).float() for n in model.tensors if n.startswith(prefix)}
        matrices = layer_matrices(model.architecture, layer, index)
        found.append(
            LayerState(index=index, matrices=matrices, weights=weights, moments=seen, changed=set())
        )
    return found


def test_experts_that_nobody_was_routed_to(tmp_path: Path):
    """Their matrices are rounded to the nearest; the card and quantize.json say which."""
    model = tiny_model("qwen3moe", moe_intermediate_size=32)
    router = next(each for name, each in model.named_parameters() if "0.mlp.gate" in name)
    a, b = drawn(2, 64)
    router.data.copy_(torch.stack([a, -a, b, -b, *torch.zeros(4, 64)]))  # two are above zero
    recipe = Recipe(formats=(Format("int4", 32),), rule=EXACT)
    opened = open_model(save(model, tmp_path / "moe"), recipe)
    partial = Partial(tmp_path / "out", recipe.key)
    plan = make(
        opened, CalibrationRows(rows=[list(range(60))], descriptions=["numbers"]), recipe, partial
    )
    uncalibrated = [name for name in plan.produced.uncalibrated if ".layers.0." in name]
    parts = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(4, 8) for part in parts]
    assert sorted(uncalibrated) == sorted(names)
    assert f"No token reached {len(plan.produced.uncalibrated)} matrices" in card(plan)
    assert as_json(plan)["unseen"] == plan.produced.uncalibrated
    rounded = partial.load("layer-0").matrices[names[2], recipe.formats[0]]
    weight = opened.tensors.read(f"{names[2]}.weight").float()
    nearest = grid_for(weight, recipe.formats[0], recipe.rule).nearest(weight)
    assert torch.equal(rounded.levels_OH, nearest.levels_OH)


def test_folds_change_no_logits(family: Path):
    """Random scales at every fold of the family's table; moments follow their inputs."""
    model = RowModel(family)
    before = logits(model)
    changed = Changed(family)
    draw = torch.Generator().manual_seed(5)
    folds = 0
    for work in works(model):
        layer = model.skeleton(work.index)
        for fold in layer_folds(model.architecture, model.spec, layer, work.index):
            scale = torch.empty(int(fold.channels_I.max()) + 1).uniform_(0.5, 2, generator=draw)
            apply_scale(work, fold, scale, model.spec.norm_offset, torch.float32)
            folds += 1
        assert work.changed
        changed.changes |= work.weights
    assert folds
    model.tensors = changed
    after = logits(model)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * float(before.abs().max()))


def test_moments_are_scaled_as_their_inputs(family: Path):
    model = RowModel(family)
    changed = Changed(family)
    foretold = works(model)
    for work in foretold:
        layer = model.skeleton(work.index)
        for fold in layer_folds(model.architecture, model.spec, layer, work.index):
            scale = smooth_scale(work, fold)
            if scale is not None:
                apply_scale(work, fold, scale, model.spec.norm_offset, torch.float32)
        changed.changes |= work.weights
    model.tensors = changed
    for work, counted in zip(foretold, works(model), strict=True):
        for place, seen in work.moments.items():
            expected = counted.moments[place]
            size = float(expected.amax_I.max())
            torch.testing.assert_close(seen.amax_I, expected.amax_I, rtol=1e-3, atol=1e-3 * size)


def test_rotation_changes_no_logits(family: Path):
    """Where norms stand before the layers alone; the others are refused."""
    model = RowModel(family)
    before = logits(model)
    if model.spec.norms != 2 or "olmo" in model.spec.architecture.lower():
        with pytest.raises(UnsupportedModelError, match="cannot be rotated"):
            RotatedTensors(family, model.spec, 0)
        return
    model.tensors = RotatedTensors(family, model.spec, 0)
    rotated = model.tensors.read("model.layers.0.self_attn.o_proj.weight")
    assert not torch.allclose(
        rotated, Tensors(family).read("model.layers.0.self_attn.o_proj.weight")
    )
    torch.testing.assert_close(
        logits(model), before, rtol=1e-4, atol=2e-5 * float(before.abs().max())
    )


def test_smoothing_meets_in_the_middle(tmp_path: Path):
    """After it the largest input and the largest weight of each channel are the same."""
    model = RowModel(save(tiny_model(), tmp_path))
    work = works(model)[0]
    fold = layer_folds(model.architecture, model.spec, model.skeleton(0), 0)[0]
    scale = smooth_scale(work, fold)
    assert scale is not None
    apply_scale(work, fold, scale, 0.0, torch.float32)
    weights = torch.stack([work.weights[m.weight].abs().amax(0) for m in fold.readers]).amax(0)
    torch.testing.assert_close(weights, work.moments[fold.place].amax_I)


def test_awq_loses_no_more_than_no_scale(tmp_path: Path):
    """And less where some inputs are a hundred times the others."""
    model = RowModel(save(tiny_model(), tmp_path))
    work = works(model)[0]
    fold = layer_folds(model.architecture, model.spec, model.skeleton(0), 0)[0]
    seen = work.moments[fold.place]
    seen.rescale(torch.where(torch.arange(64) % 16 == 0, 0.01, 1.0))

    def rounded(weight: Tensor) -> Tensor:
        return grid_for(weight, Format("int4", 32), GridRule()).nearest(weight).plain()

    def lost(scale: Tensor) -> float:
        weights = [work.weights[m.weight] for m in fold.readers if not is_router(m)]
        return sum(output_error(rounded(w * scale) / scale - w, seen.hessian()) for w in weights)

    scale = awq_scale(work, fold, rounded)
    assert scale is not None
    assert lost(scale) < 0.7 * lost(torch.ones(64))


def test_outliers_that_are_kept_leave_fine_steps_to_the_rest():
    """Single weights 30 times as large: a group of 64 has one, and loses ten times as much."""
    weight, hessian = drawn(40, 256), moments(256)
    plain = gptq(weight, hessian, grid_for(weight, INT4, GridRule()))
    lost = output_error(plain.plain() - weight, hessian)
    weight[:, ::64] *= 30
    spoiled = gptq(weight, hessian, grid_for(weight, INT4, GridRule()))
    assert output_error(spoiled.plain() - weight, hessian) > 10 * lost
    kept = keep_outliers(weight, hessian, INT4, GridRule(), share=0.02)
    assert output_error(kept.plain() - weight, hessian) < lost
    assert kept.share == pytest.approx(0.02, abs=1e-3)
    assert (kept.rounded.levels_OH[kept.outputs_K, kept.inputs_K] == 0).all()
    without = keep_outliers(weight, None, INT4, GridRule(), share=0.02)
    places = (without.outputs_K, without.inputs_K)
    assert torch.equal(without.plain()[places], weight[places])


def test_outputs_are_those_of_the_moments():
    """tr(Δ H Δᵀ) is the mean squared error of the outputs, summed over them."""
    x, difference = drawn(70, 24), drawn(5, 24)
    seen = Moments(24)
    seen.add(x)
    expected = functional.linear(x, difference).square().sum(1).mean()
    assert output_error(difference, seen.hessian()) == pytest.approx(float(expected), rel=1e-4)
