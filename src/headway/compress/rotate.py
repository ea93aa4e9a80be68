"""Rotation of the residual stream (QuaRot, Ashkboos et al. 2024), which removes outlier channels.

Norm weights move into the matrices that read them. One orthogonal matrix then turns every matrix
that reads the stream, and its inverse every matrix that writes it, embedding and head included.
RMSNorm without weights commutes with the rotation, so the model's function is unchanged. A tied
head becomes untied, since it contains the last norm's weight.
"""

from pathlib import Path

import torch
from torch import Tensor

from headway.compress.rows import EMBEDDING, HEAD, NORM, Tensors
from headway.core.errors import UnsupportedModelError
from headway.runtime.models import MODELS
from headway.spec import ModelSpec

READS = {"attention.qkv": "attention_norm", "mlp.gate_up": "mlp_norm", "mlp.router": "mlp_norm"}
"""Linear layers that read the stream → the norm before them."""
WRITES = ("attention.out", "mlp.down")
NORMS = ("attention_norm", "mlp_norm")


class RotatedTensors(Tensors):
    """The tensors of a folder, rotated on read; fp32."""

    own_head = True

    def __init__(self, folder: Path, spec: ModelSpec, seed: int) -> None:
        super().__init__(folder)
        check_rotatable(spec)
        self._spec = spec
        self.rotation_HH = rotation(spec.hidden_size, seed)
        self._modules: dict[str, str] = {}
        for pattern, (module, _) in MODELS[spec.architecture].weights.items():
            for i in range(spec.num_layers if "{i}" in pattern else 1):
                for e in range(spec.experts.count if spec.experts and "{e}" in pattern else 1):
                    self._modules[pattern.format(i=i, e=e)] = module.format(i=i)
        self._norms = {module: name for name, module in self._modules.items()}

    def __contains__(self, name: str) -> bool:
        return name == HEAD or super().__contains__(name)

    def __iter__(self):  # type: ignore[no-untyped-def]
        names = list(super().__iter__())
        return iter(names if HEAD in names else [*names, HEAD])

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(EMBEDDING if name == HEAD and self._spec.tied else name)

    def read(self, name: str) -> Tensor:
        """Return the rotated tensor."""
        stored = EMBEDDING if name == HEAD and self._spec.tied else name
        tensor = super().read(stored).float()
        module, _, kind = name.rpartition(".")
        ours = self._modules.get(module, "")
        own = ours.split(".", 2)[2] if ours.startswith("layers.") else ours
        if own in NORMS or name == NORM:
            return torch.full_like(tensor, 1.0 - self._spec.norm_offset)
        turn_HH: Tensor = self.rotation_HH
        if name == HEAD:
            head_VH: Tensor = self._weighted(tensor, NORM) @ turn_HH
            return head_VH
        if name == EMBEDDING:
            rows_VH: Tensor = tensor @ turn_HH
            return rows_VH
        turned = tensor
        if own in READS and kind == "weight":
            norm = self._norms[f"{ours.rsplit('.', 2)[0]}.{READS[own]}"]
            turned = self._weighted(tensor, f"{norm}.weight") @ turn_HH
        elif own in WRITES:
            turned = turn_HH.T @ tensor
        return turned

    def _weighted(self, tensor_OH: Tensor, norm: str) -> Tensor:
        """Return the columns of a reader times the weight of the norm before it."""
        weight_H: Tensor = super().read(norm).float() + self._spec.norm_offset
        return tensor_OH * weight_H


def rotation(size: int, seed: int) -> Tensor:
    """Return a random orthogonal matrix that is determined by the seed."""
    draw = torch.Generator().manual_seed(seed)
    gaussian = torch.empty(size, size, dtype=torch.float64).normal_(generator=draw)
    factor, upper = torch.linalg.qr(gaussian)
    turned: Tensor = (factor * upper.diagonal().sign()).float()
    return turned


def can_rotate(spec: ModelSpec) -> bool:
    """Whether all norms are before attention and MLP; a norm behind them weights channels of the
    stream, which then cannot be rotated.
    """
    modules = {module for module, _ in MODELS[spec.architecture].weights.values()}
    layers = {f"layers.{{i}}.{norm}" for norm in NORMS}
    return layers <= modules and spec.norms == len(NORMS)


def check_rotatable(spec: ModelSpec) -> None:
    """Raise UnsupportedModelError for a model that cannot be rotated."""
    if not can_rotate(spec):
        raise UnsupportedModelError(
            f"{spec.architecture} has norms behind its layers and cannot be rotated.",
            "Use --transform smooth or awq.",
        )
