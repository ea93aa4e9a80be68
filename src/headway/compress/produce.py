"""Quantize a folder by a recipe: the steps in order, and their cost.

rows → layers, one at a time (`quantize`) → formats by module (`search`) → files (`write`)
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from headway.compress.calibration import CalibrationRows
from headway.compress.estimate import file_bytes
from headway.compress.matrices import is_router, layer_matrices
from headway.compress.mixed import MixedFormats, mix, split
from headway.compress.packing import FileFormat
from headway.compress.partial import Partial, QuantizedLayer, format_named
from headway.compress.quantize import calibrate
from headway.compress.recipe import Recipe, check_groups, fits
from headway.compress.rotate import RotatedTensors
from headway.compress.rows import HEAD_NAME, RowModel
from headway.compress.search import Budget
from headway.compress.timing import no_seconds
from headway.compress.write import (
    FolderContent,
    copy_rest,
    source_names,
    write_config,
    write_weights,
)
from headway.core.errors import UsageError
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import PLAIN, Format

Advance = Callable[[], None]
Seconds = Callable[[int, int, Format], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """The written files: format and loss of each matrix of the checkpoint, bytes of all files."""

    formats: Mapping[str, Format]
    losses: Mapping[str, float]
    uncalibrated: list[str]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """The result of a quantization, as its card describes it."""

    name: str
    source: str
    recipe: Recipe
    calibration: CalibrationRows
    produced: Produced
    mixture: MixedFormats | None
    bits: float
    seconds: float


def open_model(folder: Path, recipe: Recipe) -> RowModel:
    """Open the model of `folder` for quantization, rotated if the recipe says so."""
    model = RowModel(folder)
    check_groups(recipe, model.spec)
    check_ignored(model, recipe)
    if recipe.transform == "rotate":
        model.tensors = RotatedTensors(folder, model.spec, recipe.seed)
    return model


def check_ignored(model: RowModel, recipe: Recipe) -> None:
    """Raise UsageError for an --ignore that matches nothing, or only parts of a fused matrix."""
    modules = all_modules(model)
    for pattern in recipe.ignore:
        if not any(fits(pattern, name) for name in modules):
            raise UsageError(
                f"--ignore {pattern} fits no matrix of {model.folder.name}.",
                f"Names are such as {next(iter(modules))}; expressions begin with re:",
            )
    by_module: dict[str, set[bool]] = {}
    for name, (module, _) in modules.items():
        by_module.setdefault(module, set()).add(recipe.rounds(name))
    for module, both in by_module.items():
        if len(both) > 1:
            names = [name.rpartition(".")[2] for name, (of, _) in modules.items() if of == module]
            raise UsageError(
                f"--ignore leaves some of {', '.join(names)} of {module} alone.",
                "Name all of them: engines multiply them as one matrix.",
            )


def all_modules(model: RowModel) -> dict[str, tuple[str, bool]]:
    """Return checkpoint matrix → (the model's module, whether it is rounded), the head last."""
    modules = {}
    for index in range(model.spec.num_layers):
        layer = model.skeleton(index)
        for matrix in layer_matrices(model.architecture, layer, index):
            modules[matrix.name] = (matrix.module, not is_router(matrix))
    return modules | {HEAD_NAME: ("head", True)}


def num_steps(model: RowModel, searches: bool = False) -> int:
    """Return the number of `advance` calls: per layer rounded, searched twice, written; head,
    rest."""
    return (4 if searches else 2) * model.spec.num_layers + 2


def make(
    model: RowModel,
    calibration: CalibrationRows,
    recipe: Recipe,
    partial: Partial,
    *,
    budget: Budget | None = None,
    seconds: Seconds = no_seconds,
    file_format: FileFormat = "compressed-tensors",
    w8a8: bool = False,
    advance: Advance = lambda: None,
) -> QuantizationResult:
    """Quantize under a temporary name: every candidate, with a budget a selection, then files."""
    began = time.perf_counter()
    mixture = None
    if budget is None:
        calibrate(model, calibration.rows, recipe, partial, advance)
        formats = uniform(model, recipe)
    else:
        rows, search_rows = split(calibration.rows)
        calibrate(model, rows, recipe, partial, advance)
        mixture = mix(model, recipe, partial, search_rows, budget, seconds, advance)
        formats = dict(mixture.formats)
    produced = write_folder(
        model, recipe, partial, formats, file_format=file_format, w8a8=w8a8, advance=advance
    )
    return QuantizationResult(
        name=partial.out.name,
        source=model.folder.resolve().name,
        recipe=recipe,
        calibration=calibration,
        produced=produced,
        mixture=mixture,
        bits=file_bytes(model, formats)[1],
        seconds=time.perf_counter() - began,
    )


def write_folder(
    model: RowModel,
    recipe: Recipe,
    partial: Partial,
    formats: Mapping[str, Format],
    *,
    file_format: FileFormat = "compressed-tensors",
    w8a8: bool = False,
    advance: Advance = lambda: None,
) -> Produced:
    """Write the folder, still under its temporary name; `formats` are by checkpoint matrix."""
    reader = PartialReader(model, partial, recipe)
    content = FolderContent(
        formats=formats,
        rounded=lambda name: reader.rounded(name, formats[name]),
        plain=reader.plain,
        names=source_names(model),
        dtype=recipe.rule.dtype,
        file_format=file_format,
        w8a8=w8a8,
    )
    write_weights(content, partial.folder, advance)
    copy_rest(model.folder, partial.folder, heads=recipe.transform != "rotate")
    write_config(model.folder, content, partial.folder)
    losses, uncalibrated = reader.losses(formats)
    size = sum(path.stat().st_size for path in partial.folder.glob("model*.safetensors"))
    return Produced(
        formats=formats,
        losses=losses,
        uncalibrated=uncalibrated,
        num_bytes=size,
    )


class PartialReader:
    """Reads the layers of a `Partial`, one at a time in memory."""

    def __init__(self, model: RowModel, partial: Partial, recipe: Recipe) -> None:
        self._model, self._partial, self._recipe = model, partial, recipe
        self._name, self._layer = "", QuantizedLayer()

    def layer_of(self, name: str) -> QuantizedLayer:
        """Return the saved layer that contains this tensor of the checkpoint."""
        _, dot, rest = name.partition(".layers.")
        file = f"layer-{rest.split('.')[0]}" if dot else "head"
        if file != self._name:
            self._name = file
            self._layer = self._partial.load(file) if self._partial.has(file) else QuantizedLayer()
        return self._layer

    def rounded(self, name: str, format: Format) -> RoundedWeight:
        """Return the levels of a matrix in one of the tried formats."""
        return self.layer_of(name).matrices[name, format]

    def plain(self, name: str) -> Tensor:
        """Return any other tensor, as changed by a transform or as in the source."""
        changed = self.layer_of(name).plain.get(name)
        if changed is not None:
            return changed
        tensor = self._model.tensors.read(name)
        return tensor.to(self._model.dtype) if self._recipe.transform == "rotate" else tensor

    def losses(self, formats: Mapping[str, Format]) -> tuple[dict[str, float], list[str]]:
        """Return (share of the outputs lost, by matrix; matrices that no token reached)."""
        losses: dict[str, float] = {}
        uncalibrated: list[str] = []
        for index in range(self._model.spec.num_layers):
            layer = self.layer_of(f"model.layers.{index}.")
            uncalibrated += layer.uncalibrated
            for key, loss in layer.losses.items():
                kind, group, name = key.split("|")
                if formats[name] == format_named(kind, group):
                    losses[name] = loss
        return losses, uncalibrated


def uniform(model: RowModel, recipe: Recipe) -> dict[str, Format]:
    """Return one format for all layers (the recipe's first), the head's own, plain for ignored
    ones."""
    formats = {}
    for name, (_, rounds) in all_modules(model).items():
        formats[name] = recipe.formats[0] if rounds and recipe.rounds(name) else PLAIN
    return formats | {HEAD_NAME: recipe.head}
