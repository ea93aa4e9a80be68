"""Which version of each operation runs here, and why. Adding a kernel is adding a row."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from headway.core.machine import Machine
from headway.runtime.kernels import onednn, reference
from headway.runtime.kernels.upcast import UpcastLinear

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The chosen functions; `reasons` maps an operation to (name, why)."""

    linear: Linear = reference.linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    silu_mul: Callable[[Tensor], Tensor] = reference.silu_mul
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)


def choose_kernels(device: str, dtype: str, machine: Machine) -> Kernels:
    """The kernels for this device, weight type and CPU."""
    torch_why = "torch's own is the fastest there is here"
    reasons = dict.fromkeys(("rms_norm", "silu_mul", "rope"), ("torch", torch_why))
    linear, reasons["linear"] = choose_linear(device, dtype, machine)
    return Kernels(linear=linear, reasons=reasons)


def choose_linear(device: str, dtype: str, machine: Machine) -> tuple[Linear, tuple[str, str]]:
    """(the function, (its name, why))."""
    if device != "cpu":
        return reference.linear, ("torch", "torch's own is the fastest there is here")
    wide: Linear = onednn.linear if onednn.available() else reference.linear
    if not machine.multiplies(dtype):
        return UpcastLinear(wide), ("upcast", f"this CPU does not multiply {dtype} itself")
    if dtype == "float32" and wide is onednn.linear:
        return wide, ("onednn", "faster than torch's choice, MKL, for few rows of fp32")
    return reference.linear, ("torch", f"this CPU multiplies {dtype} itself")
