"""A format for each module, by what it costs and what it loses on rows that are kept for this.

Losses are measured here, seconds by `timing`, the choice is `search`'s; then the whole is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.compress.divergence import Judge
from headway.compress.estimate import matrix_bytes
from headway.compress.matrices import Matrix, is_router, layer_matrices
from headway.compress.partial import Partial
from headway.compress.quantize import HEAD_NAME
from headway.compress.recipe import Recipe
from headway.compress.rows import RowModel
from headway.compress.search import Budget, Choice, Found, checked, choose
from headway.core.formats import GROUPS, INT8, PLAIN, Format

MOST_FLOPS = 6e13
"""Of the search: three minutes of two cores."""
LEAST_TOKENS, MOST_TOKENS = 512, 4096
EVERY = 8
"""One row of so many is kept for the search."""

Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The choice for each of our modules, by checkpoint matrix too; KL foretold and measured."""

    chosen: Mapping[str, Choice]
    formats: Mapping[str, Format]
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
    judge = Judge(model, some(rows, model, recipe), partial)
    losses = judge.singles(recipe.formats, advance)
    matrices = [
        matrix
        for index in range(model.spec.num_layers)
        for matrix in layer_matrices(model.architecture, model.skeleton(index), index)
    ]
    modules: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        if not is_router(matrix):
            modules.setdefault(matrix.module, []).append(matrix)
    choices = {
        module: [
            choice_of(model, own, format, losses.get((module, format), 0.0), seconds)
            for format in (*recipe.formats, PLAIN)
        ]
        for module, own in modules.items()
    }
    found = choose(choices, budget)
    head = {"head": recipe.head}
    chosen, kl = checked(
        choices, found, budget, lambda by: judge.whole({m: c.format for m, c in by.items()} | head)
    )
    formats = {m.name: chosen[m.module].format if not is_router(m) else PLAIN for m in matrices}
    weights = sum(weight_count(model, matrix) for own in modules.values() for matrix in own)
    return Mixture(
        chosen=chosen,
        formats=formats | {HEAD_NAME: recipe.head},
        predicted_kl=sum(choice.kl for choice in chosen.values()),
        kl=kl,
        found=found,
        bits=8 * sum(choice.num_bytes for choice in chosen.values()) / weights,
        by_seconds=budget.by_seconds,
    )


def choice_of(
    model: RowModel,
    matrices: Sequence[Matrix],
    format: Format,
    kl: float,
    seconds: Callable[[int, int, Format], float],
) -> Choice:
    """One module in one format; of experts a token reads some alone."""
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


def layer_weights(model: RowModel) -> int:
    """Weights of all matrices of the layers that are rounded."""
    total = 0
    for index in range(model.spec.num_layers):
        for matrix in layer_matrices(model.architecture, model.skeleton(index), index):
            if not is_router(matrix):
                total += weight_count(model, matrix)
    return total


def some(rows: Rows, model: RowModel, recipe: Recipe) -> Rows:
    """As many of the rows as the search has time for, at least LEAST_TOKENS tokens of them."""
    layers = model.spec.num_layers
    runs = 4 * len(recipe.formats) * layers
    a_token = 2 * model.spec.active_parameters * runs / 2
    most = min(max(int(MOST_FLOPS / a_token), LEAST_TOKENS), MOST_TOKENS)
    found: Rows = []
    for row in rows:
        left = most - sum(map(len, found))
        if left > 1:
            found.append(row[:left])
    return found
