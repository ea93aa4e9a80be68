"""Write a model's weights into memory that engines share, or map them from there.

Packed matrices are stored packed, all other parameters as they are: an engine that finds a complete
file neither reads the checkpoint nor packs.
"""

import errno
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.core.machine import memory
from headway.runtime.experts import ExpertLinear
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.layers import Linear
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.packed_blobs import blob_sizes, bytes_of, from_blobs, kernels_of
from headway.runtime.shared_weights import SharedWeights

log = logging.getLogger(__name__)

PACKING_KERNELS = NativeLinear | NativeQuantizedLinear | NativeFp8Linear
LinearLike = Linear | ExpertLinear


class WeightSharing:
    """The shared weights of `module`; its linear layers have kernels and are not packed yet."""

    def __init__(
        self, module: nn.Module, linears: Mapping[str, LinearLike], shared: SharedWeights
    ) -> None:
        self._module, self._linears, self._shared = module, linears, shared
        self._shapes = {name: one.shapes for name, one in linears.items() if can_pack(one.kernel)}

    @staticmethod
    def of(
        module: nn.Module, linears: Mapping[str, LinearLike], shared: SharedWeights | None
    ) -> "WeightSharing | None":
        """Return a `WeightSharing`, where this engine writes the shared weights or finds them.

        Waits while another engine writes them, unless that engine hangs. None: this engine has to
        load weights of its own. Raises OSError.
        """
        if shared is None:
            return None
        if not can_share(one.kernel for one in linears.values()):
            log.info("weights that torch packs lie in the memory of each engine")
            shared.leave()
            return None
        shared.enter()
        sharing = WeightSharing(module, linears, shared)
        sizes = [size for sizes in sharing._sizes().values() for size in sizes]
        if shared.gave_up:
            check_room(sum(sizes))
            return None
        if shared.fills:
            shared.reserve(sizes)
            return sharing
        if shared.is_whole and sharing._fits():
            return sharing
        log.warning("the model's files have changed since the first engine read them")
        return None

    @property
    def is_whole(self) -> bool:
        """Whether the file is complete: call `load`, in place of `store` and `seal`."""
        return self._shared.is_whole

    def _sizes(self) -> dict[str, list[int]]:
        """Return module or parameter → bytes of each of its blobs."""
        sizes = {n: blob_sizes(self._linears[n].kernel, all) for n, all in self._shapes.items()}
        weights = {f"{name}.weight" for name in sizes}
        for name, parameter in self._module.named_parameters():
            if name not in weights:
                sizes[name] = [parameter.nbytes]
        return sizes

    def _fits(self) -> bool:
        """Return whether a complete file has the blobs of this model."""
        blobs = {name: len(blob) for name, blob in self._shared.blobs.items()}
        expected = {
            f"{name}.{i}" if name in self._shapes else name: size
            for name, sizes in self._sizes().items()
            for i, size in enumerate(sizes)
        }
        return blobs == expected

    def load(self) -> None:
        """Set all weights of the module from the file."""
        blobs = self._shared.blobs
        for name, shapes in self._shapes.items():
            count = len(blob_sizes(self._linears[name].kernel, shapes))
            self._restore(name, [blobs[f"{name}.{i}"] for i in range(count)])
        for name, parameter in self._module.named_parameters():
            map_parameter(blobs[name], parameter)
        self._prepare_plain()

    def store(self, name: str) -> None:
        """Move the packed matrices of a layer into the shared memory."""
        if name in self._shapes:
            matrices = self._linears[name].matrices
            self._restore(
                name,
                [
                    self._shared.keep(f"{name}.{i}", [bytes_of(part) for part in one.tensors])
                    for i, one in enumerate(matrices)
                ],
            )

    def seal(self) -> None:
        """Move the remaining weights into the shared memory, and let other engines read it."""
        for name, parameter in self._module.named_parameters():
            map_parameter(self._shared.keep(name, [bytes_of(parameter.contiguous())]), parameter)
        self._prepare_plain()
        self._shared.seal()

    def _restore(self, name: str, blobs: list[memoryview]) -> None:
        module = self._linears[name]
        module.restore(from_blobs(module.kernel, self._shapes[name], blobs))

    def _prepare_plain(self) -> None:
        """Prepare layers that multiply plain weights, with their shared weights."""
        for name, module in self._linears.items():
            if name not in self._shapes:
                module.prepare()


def shared_matrices(
    kernel: Any,
    shapes: Mapping[str, tuple[int, int]],
    read: Callable[[str], Tensor],
    shared: SharedWeights | None,
) -> dict[str, Any]:
    """Return name → matrix of these (outputs, inputs), packed by `kernel`.

    Matrices in shared memory are not read from the checkpoint. Raises OSError.
    """
    sizes: dict[str, int] = {}
    if shared is not None and can_pack(kernel):
        shared.enter()
        sizes = {name: kernel.blob_bytes(*shape) for name, shape in shapes.items()}
    blobs = shared.blobs if shared is not None and shared.is_whole else {}
    if sizes and {name: len(blob) for name, blob in blobs.items()} == sizes:
        return {name: matrix_from_blob(kernel, blobs[name], shapes[name]) for name in shapes}
    if shared is None or not shared.fills or not sizes:
        return {name: kernel.prepare(read(name)) for name in shapes}
    shared.reserve(list(sizes.values()))
    prepared: dict[str, Any] = {}
    for name, shape in shapes.items():
        matrix = kernel.prepare(read(name))
        blob = shared.keep(name, [bytes_of(part) for part in matrix.tensors])
        prepared[name] = matrix_from_blob(kernel, blob, shape)
    shared.seal()
    return prepared


def check_room(num_bytes: int) -> None:
    """Raise OSError unless there is memory for weights that the memory plan counted as shared."""
    if num_bytes > memory()[1]:
        raise OSError(errno.ENOMEM, "an engine that packs them hangs, and there is no room beside")


def matrix_from_blob(kernel: Any, blob: memoryview, shape: tuple[int, int]) -> Any:
    """Return the matrix with these bytes."""
    return from_blobs(kernel, [shape], [blob])[0]


def can_pack(kernel: Any) -> bool:
    """Return whether the kernel packs into bytes that can be stored."""
    return all(isinstance(one, PACKING_KERNELS) for one, _ in kernels_of(kernel, 0))


def can_share(kernels: Iterable[Any]) -> bool:
    """Return whether each kernel packs into bytes that can be stored, or reads plain weights."""
    return all(can_pack(kernel) or isinstance(kernel, PlainLinear) for kernel in kernels)


def map_parameter(blob: memoryview, parameter: nn.Parameter) -> None:
    """Let a parameter view these bytes."""
    if len(blob):
        parameter.data = torch.frombuffer(blob, dtype=parameter.dtype).view_as(parameter)
