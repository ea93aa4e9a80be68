"""Quantization layer by layer: input statistics, a transform, rounding, a file.

The result is a file per layer, and one for the head, in a `Partial`. The inputs of each layer are
those of the unquantized model, so the files do not depend on where an earlier run was interrupted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headway.compress.awq import awq_scale, output_error
from headway.compress.folds import LayerState, apply_scale, layer_folds
from headway.compress.grid import grid_for
from headway.compress.matrices import Matrix, is_router, layer_matrices
from headway.compress.partial import Partial, QuantizedLayer
from headway.compress.recipe import Recipe, round_matrices
from headway.compress.rows import HEAD_NAME, RowModel
from headway.compress.smooth import smooth_scale
from headway.compress.statistics import Moments, Place, collect_moments
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import PLAIN, Format

HEAD_ROWS = 8192
"""Rows of the head that are rounded together."""
Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Matrices that read the same inputs and are rounded as one: q, k and v."""

    module: str
    place: Place
    matrices: tuple[Matrix, ...]


def calibrate(
    model: RowModel,
    rows: Sequence[Sequence[int]],
    recipe: Recipe,
    partial: Partial,
    advance: Advance = lambda: None,
) -> None:
    """Write the files `layer-0` …, and `head`; existing files stay.

    `advance` is called after each layer, and after the head.
    """
    lens = [len(row) for row in rows]
    x_TH = model.embed(rows)
    for index in range(model.spec.num_layers):
        name = f"layer-{index}"
        layer = model.layer(index)
        if partial.has(name):
            x_TH = model.run(layer, x_TH, lens)
        else:
            with collect_moments(layer, normalized=True) as moments:
                x_TH = model.run(layer, x_TH, lens)
            partial.save(name, round_layer(model, layer, index, moments, recipe))
        advance()
    if not partial.has("head") and recipe.head != PLAIN:
        partial.save("head", round_head(model, x_TH, recipe))
    advance()


def round_layer(
    model: RowModel,
    layer: nn.Module,
    index: int,
    moments: dict[Place, Moments],
    recipe: Recipe,
) -> QuantizedLayer:
    """Round every matrix of the layer in every format of the recipe."""
    matrices = layer_matrices(model.architecture, layer, index)
    prefix = f"model.layers.{index}."
    weights = {n: model.tensors.read(n).float() for n in model.tensors if n.startswith(prefix)}
    work = LayerState(
        index=index, matrices=matrices, weights=weights, moments=moments, changed=set()
    )
    transform(model, layer, work, recipe)
    rounded = QuantizedLayer()
    for group in groups_of(matrices):
        if not all(recipe.rounds(matrix.name) for matrix in group.matrices):
            continue
        inputs = moments.get(group.place)
        hessian_II = inputs.hessian() if inputs is not None and inputs.count else None
        if hessian_II is None:
            rounded.uncalibrated += [matrix.name for matrix in group.matrices]
        for format in recipe.formats:
            round_group(group, hessian_II, format, work, recipe, rounded)
        moments.pop(group.place, None)
    written = {f"{name}.weight" for name, _ in rounded.matrices}
    dtype = getattr(torch, model.spec.dtype)
    for name in (n for n in work.weights if n not in written):
        if name in work.changed or recipe.transform == "rotate":
            rounded.plain[name] = work.weights[name].to(dtype)
    return rounded


def transform(model: RowModel, layer: nn.Module, work: LayerState, recipe: Recipe) -> None:
    """Apply AWQ's or SmoothQuant's scales fold by fold; each fold sees the changes before it."""
    if recipe.transform not in ("awq", "smooth"):
        return
    spec, dtype = model.spec, getattr(torch, model.spec.dtype)

    rule = replace(recipe.rule, searched=False)

    def nearest(weight_OI: Tensor) -> Tensor:
        return grid_for(weight_OI, recipe.formats[0], rule).nearest(weight_OI).plain()

    for fold in layer_folds(model.architecture, spec, layer, work.index):
        if recipe.transform == "awq":
            scale = awq_scale(work, fold, nearest)
        else:
            scale = smooth_scale(work, fold, recipe.smooth_alpha)
        if scale is not None:
            apply_scale(work, fold, scale, spec.norm_offset, dtype)


def groups_of(matrices: list[Matrix]) -> Iterator[MatrixGroup]:
    """Yield the matrices to round, grouped by their inputs; routers are skipped."""
    places: dict[Place, list[Matrix]] = {}
    for matrix in matrices:
        if not is_router(matrix):
            places.setdefault(matrix.place, []).append(matrix)
    for place, group in places.items():
        yield MatrixGroup(group[0].module, place, tuple(group))


def round_group(
    group: MatrixGroup,
    hessian_II: Tensor | None,
    format: Format,
    work: LayerState,
    recipe: Recipe,
    rounded: QuantizedLayer,
) -> None:
    """Round these matrices in one format, and record the share of the outputs that is lost."""
    weights = [work.weights[matrix.weight] for matrix in group.matrices]
    if format == PLAIN:
        return
    parts = round_matrices(weights, hessian_II, format, recipe)
    for matrix, weight, part in zip(group.matrices, weights, parts, strict=True):
        rounded.matrices[matrix.name, format] = part
        lost = 0.0
        if hessian_II is not None:
            whole = output_error(weight, hessian_II)
            lost = output_error(part.plain() - weight, hessian_II) / whole if whole else 0.0
        rounded.losses[f"{format.kind}|{format.group}|{matrix.name}"] = lost


def round_head(model: RowModel, x_TH: Tensor, recipe: Recipe) -> QuantizedLayer:
    """Round the head, HEAD_ROWS at a time, for inputs after the last norm."""
    norm = model.norm()
    moments = Moments(model.spec.hidden_size, normalized=True)
    for part_TH in x_TH.split(HEAD_ROWS):
        moments.add(norm(part_TH))
    hessian_II = moments.hessian() if moments.count else None
    weight_VH = model.tensors.read(model.head_name)
    parts = [
        round_matrices([rows], hessian_II, recipe.head, recipe)[0]
        for rows in weight_VH.split(HEAD_ROWS)
    ]
    rounded = QuantizedLayer()
    rounded.matrices[HEAD_NAME, recipe.head] = RoundedWeight.joined(parts)
    return rounded
