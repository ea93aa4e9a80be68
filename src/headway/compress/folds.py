"""Places where channels can be scaled without a change of the model's function.

    norm → qkv, norm → gate and up     the norm's weight ÷ s, the columns that read it · s
    v → out                            rows of v ÷ s, columns of out · s, by KV head
    up → down                          rows of up ÷ s, columns of down · s

They follow from the family's table: without a norm before attention (OLMo 2) there is no such fold,
and a router that reads a norm is scaled with the experts.

C channels that are scaled, I inputs of the readers (of out: q_size, each KV head several times).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.compress.matrices import Matrix, is_router, layer_matrices, source_rows
from headway.compress.statistics import Moments, Place
from headway.runtime.models.decoder import Architecture
from headway.spec import ModelSpec

NORMS = {"attention_norm": ("attention.qkv",), "mlp_norm": ("mlp.gate_up", "mlp.router")}
"""A norm of a layer → the linear layers that read it."""
MIN_SCALE, MAX_SCALE = 1e-4, 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One fold: `norm` or rows of `sources` are divided by the scale, columns of `readers`
    multiplied."""

    place: Place
    norm: str | None
    sources: tuple[tuple[Matrix, slice], ...]
    readers: tuple[Matrix, ...]
    channels_I: Tensor

    @property
    def quantized(self) -> tuple[Matrix, ...]:
        """The readers that are quantized."""
        return tuple(matrix for matrix in self.readers if not is_router(matrix))


@dataclass(slots=True, kw_only=True)
class LayerState:
    """A layer in progress: its plain tensors in fp32, and the moments of its linear layers."""

    index: int
    matrices: list[Matrix]
    weights: dict[str, Tensor]
    moments: dict[Place, Moments]
    changed: set[str]
    """Tensors that differ from the checkpoint."""


def layer_folds(
    architecture: Architecture, spec: ModelSpec, layer: nn.Module, index: int
) -> list[Fold]:
    """Return the folds of layer `index`, norms first."""
    matrices = layer_matrices(architecture, layer, index)
    names = {module: pattern for pattern, (module, _) in architecture.weights.items()}
    folds = []
    for norm, modules in NORMS.items():
        readers = tuple(m for m in matrices if m.place[0] in modules)
        pattern = names.get(f"layers.{{i}}.{norm}")
        if pattern and readers:
            place = next(m.place for m in readers if not is_router(m))
            name = pattern.format(i=index) + ".weight"
            channels = torch.arange(spec.hidden_size)
            folds.append(
                Fold(place=place, norm=name, sources=(), readers=readers, channels_I=channels)
            )
    return folds + row_folds(matrices, spec)


def row_folds(matrices: list[Matrix], spec: ModelSpec) -> list[Fold]:
    """Return the folds v → out and up → down, for each expert separately."""
    folds = []
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    by_head = heads[:, None] * spec.head_dim + torch.arange(spec.head_dim)
    inner = spec.experts.intermediate_size if spec.experts else 0
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for reader in matrices:
        own, expert = reader.place
        part = {"attention.out": "v", "mlp.down": "up"}.get(own)
        if part is None:
            continue
        width = spec.intermediate_size if expert is None else inner
        channels = by_head.flatten() if part == "v" else torch.arange(width)
        before = "attention.qkv" if part == "v" else "mlp.gate_up"
        sources = []
        for matrix in matrices:
            if matrix.place != (before, expert):
                continue
            outputs = sizes.get(matrix.part or "", width)
            if matrix.part is None:
                outputs = sum(sizes.values()) if part == "v" else 2 * width
            rows = source_rows(matrix, part, spec, outputs)
            if rows is not None:
                sources.append((matrix, rows))
        folds.append(
            Fold(
                place=reader.place,
                norm=None,
                sources=tuple(sources),
                readers=(reader,),
                channels_I=channels,
            )
        )
    return folds


def apply_scale(
    work: LayerState, fold: Fold, scale_C: Tensor, offset: float, dtype: torch.dtype
) -> None:
    """Divide the inputs of the readers by s, multiply the readers by s, and adapt their moments.

    A norm is stored in `dtype`, and its rounding error is moved to the readers. `offset` is the
    number that the family adds to norm weights.
    """
    scale_C = scale_C.float().clamp(MIN_SCALE, MAX_SCALE)
    if fold.norm is not None:
        old = work.weights[fold.norm]
        new = ((old + offset) / scale_C - offset).to(dtype).float()
        exact = (old + offset) / (new + offset)
        usable = exact.isfinite() & (exact > 0)
        new, scale_C = torch.where(usable, new, old), torch.where(usable, exact, 1.0)
        work.weights[fold.norm] = new
        work.changed.add(fold.norm)
    for matrix, rows in fold.sources:
        for name in (matrix.weight, matrix.bias):
            if name in work.weights:
                tensor = work.weights[name]
                tensor[rows] /= scale_C[:, None] if tensor.dim() == 2 else scale_C
                work.changed.add(name)
    scale_I = scale_C[fold.channels_I]
    for matrix in fold.readers:
        work.weights[matrix.weight] *= scale_I
        work.changed.add(matrix.weight)
    for place in {matrix.place for matrix in fold.readers} & work.moments.keys():
        work.moments[place].rescale(scale_I)


def by_channel(values_I: Tensor, fold: Fold, channels: int) -> Tensor:
    """Return the maximum over the inputs that share a channel, (C)."""
    zeros = torch.zeros(channels)
    return zeros.scatter_reduce(0, fold.channels_I, values_I.float(), "amax")


def num_channels(fold: Fold) -> int:
    return int(fold.channels_I.max()) + 1


def column_extremes(work: LayerState, fold: Fold) -> Tensor:
    """Return the largest magnitude of the weights that read each input, (I)."""
    sizes = [work.weights[matrix.weight].abs().amax(0) for matrix in fold.quantized]
    return torch.stack(sizes).amax(0)
