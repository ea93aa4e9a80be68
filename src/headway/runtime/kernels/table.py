"""Which version of each operation runs here, and why. Adding a kernel is adding a row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from headway.core.machine import Machine
from headway.core.resolve import Settings
from headway.runtime.kernels import onednn, reference
from headway.runtime.kernels.upcast import FEW_ROWS, UpcastLinear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


GATED = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
"""The middle of a gated MLP, by its activation."""


class LinearKernel(Protocol):
    """A linear layer: `prepare` once, after loading, then call with what it returned.

    Up to `few_rows` rows the layer keeps its plain weight and torch multiplies it.
    """

    few_rows: int

    def prepare(self, weight_OH: Tensor) -> Tensor:
        """The weight as the product reads it."""
        ...

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        """x · weightᵀ + bias, (T, O), in the type of x."""
        ...


class PlainLinear:
    """A product that reads weights as the checkpoint has them."""

    few_rows = 0

    def __init__(self, product: Product) -> None:
        self._product = product

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        return self._product(x_TH, weight_OH, bias_O)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The chosen functions; `reasons` maps an operation to (name, why)."""

    linear: LinearKernel
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor] = reference.rms_norm
    gated: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=lambda: dict(GATED))
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)


def choose_kernels(settings: Settings, machine: Machine) -> Kernels:
    """The kernels for this device, weight type and CPU."""
    torch_why = "torch's own is the fastest there is here"
    reasons = dict.fromkeys(("rms_norm", "gated", "rope"), ("torch", torch_why))
    linear, reasons["linear"] = choose_linear(settings, machine)
    return Kernels(linear=linear, reasons=reasons)


def choose_linear(settings: Settings, machine: Machine) -> tuple[LinearKernel, tuple[str, str]]:
    """(the kernel, (its name, why))."""
    dtype = settings.dtype
    if settings.device != "cpu":
        return PlainLinear(reference.linear), ("torch", "torch's own is the fastest there is here")
    if settings.pack_weights and onednn.available():
        why = f"this CPU does not multiply {dtype} itself, and the weights fit in fp32"
        if dtype == "float32":
            why = "faster than torch's choice, MKL, for few rows"
            return onednn.PackedLinear(), ("onednn-packed", why)
        return onednn.PackedLinear(FEW_ROWS), ("onednn-packed", why)
    wide = onednn.linear if onednn.available() else reference.linear
    if not machine.multiplies(dtype):
        why = f"this CPU does not multiply {dtype} itself, and the weights do not fit in fp32"
        return PlainLinear(UpcastLinear(wide)), ("upcast", why)
    if dtype == "float32":
        return PlainLinear(wide), ("onednn", "packed weights do not fit beside the rest")
    return PlainLinear(reference.linear), ("torch", f"this CPU multiplies {dtype} itself")
