"""What is asked of a quantization: formats, method, transform; and one matrix rounded by it."""

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
"""Of moments in which all tokens count alike: 6% less loss than with 0.01 (docs/lab-log.md)."""
Method = Literal["gptq", "nearest"]
Transform = Literal["none", "awq", "smooth", "rotate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a folder is quantized; several `formats` mean that each module gets one of them."""

    formats: tuple[Format, ...] = (Format("int4", 64),)
    head: Format = INT8
    method: Method = "gptq"
    transform: Transform = "none"
    rule: GridRule = GridRule(searched=True)
    smooth_alpha: float = 0.5
    seed: int = 0
    fused: bool = False
    """Whether matrices that are multiplied as one (q, k and v; gate and up) have one format."""
    ignore: tuple[str, ...] = ()
    """Matrices of the checkpoint that stay as they are, as compressed-tensors names them."""

    @property
    def told(self) -> str:
        """`gptq, int4 in groups of 64, head int8`."""
        transform = "" if self.transform == "none" else f"{self.transform}, "
        formats = " or ".join(map(str, self.formats))
        kept = f", {' '.join(self.ignore)} left as they are" if self.ignore else ""
        return f"{transform}{self.method}, {formats}, head {self.head}{kept}"

    @property
    def key(self) -> str:
        """What changes when anything of it does."""
        return repr(sorted(asdict(self).items()))

    def rounds(self, name: str) -> bool:
        """Whether a matrix of the checkpoint is rounded: no name and no expression leaves it."""
        return not any(fits(pattern, name) for pattern in self.ignore)


def fits(pattern: str, name: str) -> bool:
    """A name, or a regular expression behind `re:`, which fits from the first letter."""
    expression = pattern.removeprefix("re:")
    return bool(re.match(expression, name)) if expression != pattern else pattern == name


def check_groups(recipe: Recipe, spec: ModelSpec) -> None:
    """UsageError where a group does not divide the inputs of a layer: no format of files has it."""
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
    """Matrices that read the same inputs, rounded as one; without statistics to the nearest."""
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
    """The type of scales in the file: that of the model; fp16 for fp32, as our int4 keeps them."""
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
