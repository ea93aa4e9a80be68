"""A format for each matrix, by what it costs and what it loses on rows held back from calibration.

Losses are those of `sensitivity` with the matrices that were rounded, seconds those of `timing`,
the choice is that of `search`; then the whole is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from headway.compress.divergence import Judge
from headway.compress.estimate import matrix_bytes
from headway.compress.matrices import Matrix, is_router, layer_matrices
from headway.compress.partial import Partial, Rounded
from headway.compress.quantize import HEAD_NAME
from headway.compress.recipe import Recipe
from headway.compress.rows import RowModel
from headway.compress.search import Budget, Choice, Found, checked, choose
from headway.compress.sensitivity import measure
from headway.spec.formats import GROUPS, INT8, PLAIN, Format
from headway.spec.quantization import q4_k_m_budget

MAX_FLOPS, FLOPS_PER_PARAMETER = 3e13, 16
"""Of the search, some three minutes of two cores; of one token, for each parameter: a forward pass
twice, a backward pass, and a product for each format."""
MIN_TOKENS, MAX_TOKENS = 512, 4096
EVERY = 8
"""One row of so many is kept for the search."""

Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The choice for each unit, its formats by checkpoint matrix; KL predicted and measured.

    A unit is what has one format: a matrix, or all that engines multiply as one (`Recipe.fused`).
    """

    chosen: Mapping[str, Choice]
    formats: Mapping[str, Format]
    units: Mapping[str, str]
    """Checkpoint matrix → its unit."""
    predicted_kl: float
    kl: float
    found: Found
    bits: float
    by_seconds: bool


def candidates(group: int) -> tuple[Format, ...]:
    """The formats that are tried: int4 by this group and finer ones, and int8."""
    sizes = [size for size in reversed(GROUPS) if size <= group]
    return (*(Format("int4", size) for size in sizes), INT8)


def split(rows: Rows) -> tuple[Rows, Rows]:
    """(rows for statistics, rows for the search), so that no format is judged on what it fits."""
    kept = rows[::EVERY] if len(rows) > 1 else rows
    return [row for at, row in enumerate(rows) if at % EVERY] or rows, kept


def mix(
    model: RowModel,
    recipe: Recipe,
    partial: Partial,
    rows: Rows,
    budget: Budget,
    seconds: Callable[[int, int, Format], float],
    advance: Callable[[], None] = lambda: None,
) -> Mixture:
    """Choose; `seconds` tells the time of one row through a matrix (outputs, inputs, format)."""
    rows = some(rows, model)
    units: dict[str, list[Matrix]] = {}
    for matrix in rounded_matrices(model):
        units.setdefault(matrix.module if recipe.fused else matrix.unit, []).append(matrix)
    losses = matrix_losses(model, recipe, partial, rows, advance)
    choices = {
        unit: [
            choice_of(model, own, format, sum(losses[m.name].get(format, 0) for m in own), seconds)
            for format in ((*recipe.formats, PLAIN) if recipe.rounds(own[0].name) else (PLAIN,))
        ]
        for unit, own in units.items()
    }
    routers = dict.fromkeys((m.name for m in all_matrices(model) if is_router(m)), PLAIN)

    def formats_of(chosen: Mapping[str, Choice]) -> dict[str, Format]:
        own = {m.name: chosen[unit].format for unit, of in units.items() for m in of}
        return routers | own | {HEAD_NAME: recipe.head}

    judge = Judge(model, rows, partial)
    found = choose(choices, budget)
    chosen, kl = checked(choices, found, budget, lambda by: judge.whole(formats_of(by)))
    return Mixture(
        chosen=chosen,
        formats=formats_of(chosen),
        units={m.name: unit for unit, own in units.items() for m in own},
        predicted_kl=sum(choice.kl for choice in chosen.values()),
        kl=kl,
        found=found,
        bits=8 * sum(choice.num_bytes for choice in chosen.values()) / layer_weights(model),
        by_seconds=budget.by_seconds,
    )


def matrix_losses(
    model: RowModel,
    recipe: Recipe,
    partial: Partial,
    rows: Rows,
    advance: Callable[[], None],
) -> dict[str, Mapping[Format, float]]:
    """Nats a token that each matrix of the checkpoint loses in each format."""

    @lru_cache(maxsize=1)
    def layer_of(index: str) -> Rounded:
        return partial.load(f"layer-{index}")

    def rounding(matrix: Matrix, weight_OI: Tensor, format: Format, power_I: Tensor) -> Tensor:
        rounded = layer_of(matrix.module.split(".")[1]).matrices.get((matrix.name, format))
        return weight_OI if rounded is None else rounded.plain()

    profile = measure(model, rows, recipe.formats, advance, rounding)
    return {name: one.losses for name, one in profile.items()}


def choice_of(
    model: RowModel,
    matrices: Sequence[Matrix],
    format: Format,
    kl: float,
    seconds: Callable[[int, int, Format], float],
) -> Choice:
    """One unit in one format; of experts a token reads some alone."""
    size, time = 0, 0.0
    for matrix in matrices:
        outputs, inputs = model.tensors.shape(matrix.weight)
        size += matrix_bytes(format, outputs, inputs, model.spec.dtype)
        experts = model.spec.experts
        share = experts.active / experts.count if experts and matrix.place[1] is not None else 1.0
        time += share * seconds(outputs, inputs, format)
    return Choice(format=format, kl=max(kl, 0.0), num_bytes=size, seconds=time)


def weight_count(model: RowModel, matrix: Matrix) -> int:
    outputs, inputs = model.tensors.shape(matrix.weight)
    return outputs * inputs


def all_matrices(model: RowModel) -> list[Matrix]:
    """Of all layers, routers too."""
    return [
        matrix
        for index in range(model.spec.num_layers)
        for matrix in layer_matrices(model.architecture, model.skeleton(index), index)
    ]


def rounded_matrices(model: RowModel) -> list[Matrix]:
    """All matrices of the layers but routers."""
    return [matrix for matrix in all_matrices(model) if not is_router(matrix)]


def layer_weights(model: RowModel) -> int:
    """Weights of all matrices of the layers that may be rounded."""
    return sum(weight_count(model, matrix) for matrix in rounded_matrices(model))


def q4_k_m_bytes(model: RowModel, recipe: Recipe) -> float:
    """The default budget: what llama.cpp's Q4_K_M takes, or the smallest formats where they take
    more, and matrices that are left as they are."""
    spec, parts, least, plain = model.spec, [], 0, 0
    for matrix in rounded_matrices(model):
        outputs, inputs = model.tensors.shape(matrix.weight)
        if recipe.rounds(matrix.name):
            parts.append((matrix.module, matrix.part, (outputs, inputs)))
            least += matrix_bytes(recipe.formats[0], outputs, inputs, spec.dtype)
        else:
            plain += matrix_bytes(PLAIN, outputs, inputs, spec.dtype)
    return plain + max(q4_k_m_budget(spec, parts), least)


def some(rows: Rows, model: RowModel) -> Rows:
    """As many of the rows as the search has time for, at least MIN_TOKENS tokens of them."""
    allowed = int(MAX_FLOPS / (FLOPS_PER_PARAMETER * model.spec.active_parameters))
    most = min(max(allowed, MIN_TOKENS), MAX_TOKENS)
    found: Rows = []
    for row in rows:
        room = most - sum(map(len, found))
        if room > 1:
            found.append(row[:room])
    return found
