"""The matrices of a layer by their names in the checkpoint, and their inputs."""

from dataclasses import dataclass

from torch import nn

from headway.compress.statistics import Place
from headway.runtime.experts import ExpertLinear
from headway.runtime.layers import Linear
from headway.runtime.models.decoder import Architecture
from headway.spec import ModelSpec

ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix of the checkpoint, such as `model.layers.0.self_attn.q_proj`, within the model.

    `module` is `layers.0.attention.qkv` and `part` is q; `place` is the key of its input
    statistics.
    """

    name: str
    module: str
    part: str | None
    place: Place

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def unit(self) -> str:
        """Name of what has its own format, `layers.0.attention.qkv.v`: a layer's experts share
        one."""
        alone = self.part is None or self.place[1] is not None
        return self.module if alone else f"{self.module}.{self.part}"

    @property
    def bias(self) -> str:
        return f"{self.name}.bias"


def layer_matrices(architecture: Architecture, layer: nn.Module, index: int) -> list[Matrix]:
    """Return all linear layers of layer `index`, with routers, in the order of the family's
    table."""
    modules = dict(layer.named_modules())
    matrices = []
    for pattern, (module, part) in architecture.weights.items():
        name = module.format(i=index)
        own = name.removeprefix(f"layers.{index}.")
        linear = modules.get(own)
        sparse = "{e}" in pattern
        if "{i}" not in pattern or not isinstance(linear, ExpertLinear if sparse else Linear):
            continue
        count = len(linear.shapes) if isinstance(linear, ExpertLinear) else 1
        for e in range(count):
            place = (own, e if sparse else None)
            full = pattern.format(i=index, e=e)
            matrices.append(Matrix(name=full, module=name, part=part, place=place))
    return matrices


def is_router(matrix: Matrix) -> bool:
    """Whether the matrix is a router, which is never quantized."""
    return matrix.module.endswith(f".{ROUTER}")


def source_rows(matrix: Matrix, part: str, spec: ModelSpec, outputs: int) -> slice | None:
    """Return the rows of `part` (v, up) within a matrix of the checkpoint; None if it has none.

    A checkpoint with fused matrices (Phi-3) has v after q and k, and up after gate.
    """
    if matrix.part is not None:
        return slice(0, outputs) if matrix.part == part else None
    if part == "v" and matrix.module.endswith(".qkv"):
        return slice(spec.q_size + spec.kv_size, outputs)
    if part == "up" and matrix.module.endswith(".gate_up"):
        return slice(outputs // 2, outputs)
    return None
