"""Mixed precision: a format for each matrix, by its cost and its loss on held-back rows.

Losses come from `sensitivity` with the rounded matrices, times from `timing`, the selection from
`search`; then the KL of the whole model is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from headway.compress.divergence import KlMeter
from headway.compress.estimate import matrix_bytes
from headway.compress.matrices import Matrix, is_router, layer_matrices
from headway.compress.partial import Partial, QuantizedLayer
from headway.compress.recipe import Recipe
from headway.compress.rows import HEAD_NAME, RowModel
from headway.compress.search import Allocation, Budget, FormatOption, choose, within_budget
from headway.compress.sensitivity import measure
from headway.spec.formats import GROUPS, INT8, PLAIN, Format
from headway.spec.quantization import q4_k_m_budget

MAX_FLOPS, FLOPS_PER_PARAMETER = 3e13, 16
"""FLOP budget of the search (three minutes on two cores), and FLOPs per token and parameter: two
forward passes, a backward pass, and a product for each format.
"""
MIN_TOKENS, MAX_TOKENS = 512, 4096
SEARCH_ROW_STRIDE = 8
"""One of so many rows is for the search."""

Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFormats:
    """The format of each unit and each checkpoint matrix, with predicted and measured KL.

    A unit has one format: it is a matrix, or all matrices that engines multiply as one
    (`Recipe.fused`).
    """

    chosen: Mapping[str, FormatOption]
    formats: Mapping[str, Format]
    units: Mapping[str, str]
    """Checkpoint matrix → its unit."""
    predicted_kl: float
    kl: float
    allocation: Allocation
    bits: float
    by_seconds: bool


def candidates(group: int) -> tuple[Format, ...]:
    """Return the candidate formats: int4 by this group and by finer ones, and int8."""
    sizes = [size for size in reversed(GROUPS) if size <= group]
    return (*(Format("int4", size) for size in sizes), INT8)


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Split into (rows for statistics, rows for the search): formats are judged on unused rows."""
    search_rows = rows[::SEARCH_ROW_STRIDE] if len(rows) > 1 else rows
    return [row for at, row in enumerate(rows) if at % SEARCH_ROW_STRIDE] or rows, search_rows


def mix(
    model: RowModel,
    recipe: Recipe,
    partial: Partial,
    rows: Rows,
    budget: Budget,
    seconds: Callable[[int, int, Format], float],
    advance: Callable[[], None] = lambda: None,
) -> MixedFormats:
    """Select the formats; `seconds` is the time of one row through (outputs, inputs, format)."""
    rows = select_rows(rows, model)
    units: dict[str, list[Matrix]] = {}
    for matrix in rounded_matrices(model):
        units.setdefault(matrix.module if recipe.fused else matrix.unit, []).append(matrix)
    losses = matrix_losses(model, recipe, partial, rows, advance)
    choices = {
        unit: [
            option_of(model, own, format, sum(losses[m.name].get(format, 0) for m in own), seconds)
            for format in ((*recipe.formats, PLAIN) if recipe.rounds(own[0].name) else (PLAIN,))
        ]
        for unit, own in units.items()
    }
    routers = dict.fromkeys((m.name for m in all_matrices(model) if is_router(m)), PLAIN)

    def formats_of(chosen: Mapping[str, FormatOption]) -> dict[str, Format]:
        own = {m.name: chosen[unit].format for unit, of in units.items() for m in of}
        return routers | own | {HEAD_NAME: recipe.head}

    judge = KlMeter(model, rows, partial)
    allocation = choose(choices, budget)
    chosen, kl = within_budget(
        choices, allocation, budget, lambda by: judge.kl_of_formats(formats_of(by))
    )
    return MixedFormats(
        chosen=chosen,
        formats=formats_of(chosen),
        units={m.name: unit for unit, own in units.items() for m in own},
        predicted_kl=sum(choice.kl for choice in chosen.values()),
        kl=kl,
        allocation=allocation,
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
    """Return the loss in nats per token of each checkpoint matrix in each format."""

    @lru_cache(maxsize=1)
    def layer_of(index: str) -> QuantizedLayer:
        return partial.load(f"layer-{index}")

    def rounding(matrix: Matrix, weight_OI: Tensor, format: Format, power_I: Tensor) -> Tensor:
        rounded = layer_of(matrix.module.split(".")[1]).matrices.get((matrix.name, format))
        return weight_OI if rounded is None else rounded.plain()

    profile = measure(model, rows, recipe.formats, advance, rounding)
    return {name: one.losses for name, one in profile.items()}


def option_of(
    model: RowModel,
    matrices: Sequence[Matrix],
    format: Format,
    kl: float,
    seconds: Callable[[int, int, Format], float],
) -> FormatOption:
    """Return one unit in one format; only a part of the experts is read per token."""
    size, time = 0, 0.0
    for matrix in matrices:
        outputs, inputs = model.tensors.shape(matrix.weight)
        size += matrix_bytes(format, outputs, inputs, model.spec.dtype)
        experts = model.spec.experts
        share = experts.active / experts.count if experts and matrix.place[1] is not None else 1.0
        time += share * seconds(outputs, inputs, format)
    return FormatOption(format=format, kl=max(kl, 0.0), num_bytes=size, seconds=time)


def weight_count(model: RowModel, matrix: Matrix) -> int:
    outputs, inputs = model.tensors.shape(matrix.weight)
    return outputs * inputs


def all_matrices(model: RowModel) -> list[Matrix]:
    """Return the matrices of all layers, with routers."""
    return [
        matrix
        for index in range(model.spec.num_layers)
        for matrix in layer_matrices(model.architecture, model.skeleton(index), index)
    ]


def rounded_matrices(model: RowModel) -> list[Matrix]:
    """Return the matrices of all layers without routers."""
    return [matrix for matrix in all_matrices(model) if not is_router(matrix)]


def layer_weights(model: RowModel) -> int:
    """Return the number of weights of the layers that may be rounded."""
    return sum(weight_count(model, matrix) for matrix in rounded_matrices(model))


def q4_k_m_bytes(model: RowModel, recipe: Recipe) -> float:
    """Return the default budget in bytes: llama.cpp's Q4_K_M, or the smallest formats if they take
    more, and matrices that stay plain.
    """
    spec, parts, smallest_bytes, plain_bytes = model.spec, [], 0, 0
    for matrix in rounded_matrices(model):
        outputs, inputs = model.tensors.shape(matrix.weight)
        if recipe.rounds(matrix.name):
            parts.append((matrix.module, matrix.part, (outputs, inputs)))
            smallest_bytes += matrix_bytes(recipe.formats[0], outputs, inputs, spec.dtype)
        else:
            plain_bytes += matrix_bytes(PLAIN, outputs, inputs, spec.dtype)
    return plain_bytes + max(q4_k_m_budget(spec, parts), smallest_bytes)


def select_rows(rows: Rows, model: RowModel) -> Rows:
    """Return as many rows as the search has time for, with at least MIN_TOKENS tokens."""
    allowed = int(MAX_FLOPS / (FLOPS_PER_PARAMETER * model.spec.active_parameters))
    max_tokens = min(max(allowed, MIN_TOKENS), MAX_TOKENS)
    selection: Rows = []
    for row in rows:
        room = max_tokens - sum(map(len, selection))
        if room > 1:
            selection.append(row[:room])
    return selection
