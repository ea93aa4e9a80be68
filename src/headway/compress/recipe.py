"""The settings of a quantization: formats, method, transform; and the rounding of matrices."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.compress.gptq import gptq
from headway.compress.grid import GridRule, grid_for
from headway.core.errors import UsageError
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec
from headway.spec.formats import INT8, PLAIN, Format

DAMPING = 0.05
"""For moments in which all tokens have equal weight: 6% less loss than 0.01 (docs/lab-log.md)."""
Method = Literal["gptq", "nearest"]
Transform = Literal["none", "awq", "smooth", "rotate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a folder is quantized; with several `formats`, each module gets one of them."""

    formats: tuple[Format, ...] = (Format("int4", 64),)
    head: Format = INT8
    method: Method = "gptq"
    transform: Transform = "none"
    rule: GridRule = GridRule(searched=True)
    smooth_alpha: float = 0.5
    seed: int = 0
    fused: bool = False
    """Whether matrices that are multiplied as one (q, k and v; gate and up) share a format."""
    ignore: tuple[str, ...] = ()
    """Matrices of the checkpoint that stay plain, in compressed-tensors' syntax."""

    @property
    def summary(self) -> str:
        """`gptq, int4 in groups of 64, head int8`."""
        transform = "" if self.transform == "none" else f"{self.transform}, "
        formats = " or ".join(map(str, self.formats))
        ignored = f", {' '.join(self.ignore)} left as they are" if self.ignore else ""
        return f"{transform}{self.method}, {formats}, head {self.head}{ignored}"

    @property
    def key(self) -> str:
        """A string that changes with any setting."""
        return repr(sorted(asdict(self).items()))

    def rounds(self, name: str) -> bool:
        """Whether a matrix of the checkpoint is rounded, i.e. no --ignore matches it."""
        return not any(fits(pattern, name) for pattern in self.ignore)


def fits(pattern: str, name: str) -> bool:
    """Whether a name equals `pattern`, or its beginning matches a regular expression after
    `re:`."""
    expression = pattern.removeprefix("re:")
    return bool(re.match(expression, name)) if expression != pattern else pattern == name


def check_groups(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise UsageError if a group does not divide the inputs of a layer: no file format allows
    it."""
    inner = [spec.intermediate_size] if spec.num_sparse < spec.num_layers else []
    if spec.experts is not None:
        inner.append(spec.experts.intermediate_size)
    sizes = {"hidden_size": [spec.hidden_size], "heads": [spec.q_size], "intermediate_size": inner}
    for format in (*recipe.formats, recipe.head):
        for name, widths in sizes.items():
            for width in widths:
                if format.group and width % format.group:
                    raise UsageError(
                        f"A group of {format.group} does not divide {width} inputs ({name}).",
                        "Give another group: 32, 64 or 128.",
                    )


def round_matrices(
    weights: Sequence[Tensor], hessian_II: Tensor | None, format: Format, recipe: Recipe
) -> list[RoundedWeight]:
    """Round matrices that read the same inputs as one; without statistics to the nearest level."""
    whole = torch.cat([weight.float() for weight in weights])
    importance = None if hessian_II is None else hessian_II.diagonal()
    grid = grid_for(whole, format, recipe.rule, importance)
    if hessian_II is None or recipe.method == "nearest":
        rounded = grid.nearest(whole)
    else:
        rounded = gptq(whole, hessian_II, grid, damping=DAMPING)
    sizes = [len(weight) for weight in weights]
    parts = zip(rounded.levels_OH.split(sizes), rounded.scales_OG.split(sizes), strict=True)
    return [RoundedWeight(levels, scales, format.group) for levels, scales in parts]


def stored_dtype(spec: ModelSpec) -> str:
    """Return the type of scales in the file: the model's; fp16 if that is fp32."""
    return "float16" if spec.dtype == "float32" else spec.dtype


__all__ = [
    "PLAIN",
    "Method",
    "Recipe",
    "Transform",
    "check_groups",
    "round_matrices",
    "stored_dtype",
]
