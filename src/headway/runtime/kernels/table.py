"""Which version of each operation runs here, and why. Adding a kernel is adding a row."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from headway.core.machine import Machine
from headway.runtime.kernels import reference
from headway.runtime.kernels.upcast import UpcastLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The chosen functions; `reasons` maps an operation to (name, why)."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = reference.linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    silu_mul: Callable[[Tensor], Tensor] = reference.silu_mul
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)


def choose_kernels(device: str, dtype: str, machine: Machine) -> Kernels:
    """The kernels for this device, weight type and CPU."""
    torch_why = "torch's own is the fastest there is here"
    reasons = dict.fromkeys(("rms_norm", "silu_mul", "rope"), ("torch", torch_why))
    if device == "cpu" and not machine.multiplies(dtype):
        reasons["linear"] = ("upcast", f"this CPU does not multiply {dtype} itself")
        return Kernels(linear=UpcastLinear(), reasons=reasons)
    reasons["linear"] = ("torch", torch_why)
    return Kernels(reasons=reasons)
