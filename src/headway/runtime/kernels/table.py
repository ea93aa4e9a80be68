"""Select the version of each operation for this machine, with the reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.config.attention_choice import OWN_KERNELS
from headway.config.resolve import Settings
from headway.core.machine import Machine
from headway.runtime.kernels import onednn, reference
from headway.runtime.kernels.fp8_cuda import Fp8Linear
from headway.runtime.kernels.grouped import GroupedLinear
from headway.runtime.kernels.int4_cuda import Int4Linear
from headway.runtime.kernels.parts import PartsLinear
from headway.runtime.kernels.quantized import RoundedLinear
from headway.runtime.kernels.triton_linear import TritonLinear, WideningLinear
from headway.runtime.kernels.upcast import FEW_ROWS, UpcastLinear
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.layers import NativeLayers
from headway.runtime.native.library import NativeLibrary
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.load import load
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.spec import ModelSpec
from headway.spec.formats import PLAIN, Format
from headway.spec.quantization import Quantization

Gemm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


GATED = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
"""The gated activations of MLPs by name."""
LAYERS = ("rms_norm", "gated", "rope")
"""The operations between the GEMMs of a layer."""


class LinearKernel(Protocol):
    """A linear kernel: call `prepare` once, after loading, and pass its result to each call.

    For up to `few_rows` rows the layer keeps its plain weight, and torch multiplies it.
    """

    few_rows: int

    def prepare(self, weight_OH: Tensor) -> Any:
        """Return the weight in the form of the GEMM: a tensor, or an object with `nbytes`."""
        ...

    def __call__(self, x_TH: Tensor, weight: Any, bias_O: Tensor | None, /) -> Tensor:
        """Return x · weightᵀ + bias, (T, O), in the type of x; `weight` is prepared."""
        ...


class PlainLinear:
    """A GEMM on plain weights."""

    few_rows = 0

    def __init__(self, gemm: Gemm) -> None:
        self._gemm = gemm

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        return self._gemm(x_TH, weight_OH, bias_O)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The selected functions; `reasons` maps an operation to (name, reason).

    `linear` multiplies weights of the model's type, `quantized` those of each other format.
    """

    linear: LinearKernel
    quantization: Quantization = Quantization()
    quantized: dict[Format, LinearKernel] = field(default_factory=dict)
    library: NativeLibrary | None = None
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor] = reference.rms_norm
    gated: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=lambda: dict(GATED))
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]] | None = (
        None
    )
    """A sum and its norm, where that is one kernel."""
    choose: Callable[..., Tensor] | None = None
    """Sampling behind the edits of logits, where that is one kernel: `cuda.sampling.choose`."""
    are_finite: Callable[[Tensor], bool] = reference.are_finite
    scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor] = reference.scan
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def drafter_linear(self) -> LinearKernel:
        """The kernel of a drafter's matrices, in the format of the output matrix.

        Without native kernels it is a plain one, so that single outputs can be replaced too.
        """
        if self.library is None:
            return PlainLinear(reference.linear)
        return self.quantized.get(self.quantization.format_of("head").at_load, self.linear)

    def for_draft_model(self, settings: Settings, draft: ModelSpec) -> "Kernels":
        """Return the kernels of a draft model, which has formats of its own."""
        quantization = self.quantization.of_draft(draft.formats)
        settings = replace(settings, quantization=quantization)
        quantized, _ = choose_quantized(settings, self.library, "")
        return replace(self, quantization=quantization, quantized=quantized)

    def linear_for(self, module: str, parts: Sequence[int] = ()) -> LinearKernel:
        """Return the kernel of one linear layer: `layers.0.mlp.down`, `head`.

        `parts` are the outputs of each matrix in it; with several formats the kernel is a
        `PartsLinear`.
        """
        formats = self.quantization.formats_of(module)
        kernels = [self.quantized.get(format, self.linear) for format, _ in formats]
        if len(kernels) == 1:
            return kernels[0]
        remaining = iter(parts)
        return PartsLinear(kernels, [sum(next(remaining) for _ in range(n)) for _, n in formats])

    def experts_for(self, module: str, parts: Sequence[int]) -> LinearKernel:
        """Return the kernel of the experts of a layer: on a GPU one that multiplies all at once."""
        kernel = self.linear_for(module, parts)
        kinds = GroupedLinear | Fp8Linear
        return kernel.for_experts() if isinstance(kernel, kinds) else kernel


def choose_kernels(settings: Settings, machine: Machine) -> Kernels:
    """Return the kernels for this device, weight type and CPU."""
    torch_why = "torch's own is the fastest there is here"
    reasons = dict.fromkeys((*LAYERS, "sampling"), ("torch", torch_why))
    library, why = None, ""
    if settings.kernels == "native":
        torch.set_num_threads(1)  # without native kernels the caller sets more
        library, why = load(settings.threads)
    linear, reasons["linear"] = choose_linear(settings, machine, library)
    if settings.kernels == "native" and library is None:
        reasons["linear"] = (reasons["linear"][0], why)
    quantized: dict[Format, LinearKernel] = {}
    if settings.quantization.rounded:
        quantized, reasons["quantized"] = choose_quantized(settings, library, why)
    kernels = Kernels(
        linear=linear,
        quantization=settings.quantization,
        quantized=quantized,
        library=library,
        reasons=reasons,
    )
    if settings.kernels in OWN_KERNELS:
        return with_triton(kernels, settings.kernels)
    if library is None:
        return kernels
    layers, name = NativeLayers(library), library.instruction_set
    reasons |= dict.fromkeys(LAYERS, ("native", f"{name}, one pass each"))
    reasons["sampling"] = ("native", f"{name}, no sort; the same tokens as torch")
    return replace(
        kernels,
        rms_norm=layers.rms_norm,
        gated=layers.gated,
        rope=layers.rope,
        are_finite=layers.are_finite,
    )


def with_triton(kernels: Kernels, name: str = "cuda") -> Kernels:
    """Return `kernels` with the Triton kernels, imported here because a CPU has no Triton.

    With `name` cublas, torch multiplies 16-bit weights of all but experts.
    """
    from headway.runtime.cuda.triton import layers
    from headway.runtime.cuda.triton.draw import draw
    from headway.runtime.cuda.triton.fused import add_rms_norm

    why = ("triton", "one pass each")
    linear = ("triton", "one tile for every number of rows; cublas may be faster")
    if name == "cublas":
        linear = ("torch", "by option; the bits of a row may depend on the number of rows")
    sampling = ("triton", "filters and the draw in one kernel, nothing is read back")
    return replace(
        kernels,
        linear=TritonLinear(reference.linear if name == "cublas" else None),
        rms_norm=layers.rms_norm,
        gated={"silu": layers.silu_mul, "gelu_tanh": layers.gelu_tanh_mul},
        rope=layers.rope,
        add_rms_norm=add_rms_norm,
        choose=draw,
        reasons=kernels.reasons
        | dict.fromkeys(LAYERS, why)
        | {"sampling": sampling, "linear": linear},
    )


def device_kernel(format: Format, dtype: torch.dtype, fp8: str = "exact") -> LinearKernel | None:
    """Return a GPU's kernel of a format in a model of `dtype`, None without one."""
    if fp8 == "scaled" and Fp8Linear.supports(format):
        return Fp8Linear(format, dtype)
    return next((kind(format, dtype) for kind in DEVICE_KERNELS if kind.supports(format)), None)


DEVICE_KERNELS: tuple[type[Int4Linear] | type[WideningLinear], ...] = Int4Linear, WideningLinear
"""The first that supports a format multiplies it."""


def choose_quantized(
    settings: Settings, library: NativeLibrary | None, why: str
) -> tuple[dict[Format, LinearKernel], tuple[str, str]]:
    """Return (the kernel of each format, (name, reason)); native kernels where they support it."""
    kernels: dict[Format, LinearKernel] = {}
    rounded = settings.quantization.rounded
    for format in dict.fromkeys((*rounded, *(one.at_load for one in rounded))):
        if format == PLAIN:
            continue
        if library is not None and NativeQuantizedLinear.supports(format):
            kernels[format] = NativeQuantizedLinear(library, format)
        elif library is not None and NativeFp8Linear.supports(format):
            kernels[format] = NativeFp8Linear(library, format)
        else:
            fp8, dtype = settings.quantization.fp8, getattr(torch, settings.dtype)
            own = device_kernel(format, dtype, fp8) if settings.kernels in OWN_KERNELS else None
            kernels[format] = own or RoundedLinear(format)
    slow = "plain torch, which saves memory and no time"
    if settings.kernels in OWN_KERNELS:
        name = "scaled FP8 by torch, all else by Triton"
        rest = [format for format, kernel in kernels.items() if isinstance(kernel, RoundedLinear)]
        name += f"; {', '.join(map(str, rest))}: {slow}" if rest else ""
        return kernels, ("cuda", f"{settings.quantization}: {name}")
    if library is None:
        return kernels, ("torch", f"{slow}: {why}" if why else slow)
    name = f"{library.instruction_set}, {settings.quantization}"
    unknown = [format for format, kernel in kernels.items() if isinstance(kernel, RoundedLinear)]
    if unknown:
        name += f"; {', '.join(map(str, unknown))}: {slow}"
    return kernels, ("torch" if len(unknown) == len(kernels) else "native", name)


def choose_linear(
    settings: Settings, machine: Machine, library: NativeLibrary | None = None
) -> tuple[LinearKernel, tuple[str, str]]:
    """Return (the kernel, (name, reason))."""
    dtype = settings.dtype
    if library is not None:
        why = f"{library.instruction_set}, {dtype} as it is"
        return NativeLinear(library, getattr(torch, dtype)), ("native", why)
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
