"""From a checkpoint to a model whose linear layers are packed, one matrix at a time.

Each layer is packed, and its plain weight let go, as soon as the last of its tensors is read:
Qwen2.5-0.5B in int4 takes its 0.6 GiB and one matrix on the way, not 0.92 GiB more. Where a cache
of packed weights has them, they are not read at all.
"""

from pathlib import Path

import torch
from torch import Tensor

from headway.core.model_spec import ModelSpec
from headway.core.resolve import Settings
from headway.runtime.checkpoint import Progress, fill_randomly, load_weights
from headway.runtime.experts import ExpertLinear
from headway.runtime.kernels import Kernels
from headway.runtime.layers import Linear
from headway.runtime.models import Decoder
from headway.runtime.native.quantized import NativeQuantizedLinear, PackedLevels
from headway.runtime.weight_cache import Blobs, Lookup

LinearLike = Linear | ExpertLinear
EMBEDDING = "embedding.weight"


def load_model(
    model: Decoder,
    spec: ModelSpec,
    settings: Settings,
    kernels: Kernels,
    folder: Path,
    progress: Progress | None = None,
    lookup: Lookup | None = None,
) -> list[LinearLike]:
    """Fill `model` and pack its linear layers; returns those. Raises CheckpointError."""
    linears: dict[str, LinearLike] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            module.kernel = kernels.linear_for(name)
            linears[name] = module
    if settings.load_format == "dummy":
        fill_randomly(model, settings.seed)
        for module in linears.values():
            module.prepare()
        return list(linears.values())
    packed = {} if lookup is None else cached_weights(model, linears, kernels, lookup)

    def ready(name: str) -> None:
        for each in (name, "head") if spec.tied and name == "embedding" else (name,):
            if each in packed:
                linears[each].restore(packed[each])
            elif each in linears:
                linears[each].prepare()

    load_weights(model, spec, folder, progress, ready, {*packed, "embedding"} if packed else ())
    if lookup is not None and not packed:
        lookup.store(blobs_of(model, linears))
    return list(linears.values())


def cached_weights(
    model: Decoder, linears: dict[str, LinearLike], kernels: Kernels, lookup: Lookup
) -> dict[str, list[PackedLevels]]:
    """Module → its packed matrices, from the cache; {} where it does not have exactly them.

    With them the embedding is taken from there.
    """
    found = lookup.result()
    library = kernels.library
    if found is None or library is None or library.instruction_set != lookup.instruction_set:
        return {}
    embedding = model.embedding.weight
    if len(found.get(EMBEDDING, b"")) != embedding.nbytes:
        return {}
    packed: dict[str, list[PackedLevels]] = {}
    expected = 1
    for name, module in linears.items():
        kernel = module.kernel
        if not isinstance(kernel, NativeQuantizedLinear):
            continue
        packed[name] = []
        for index, (outputs, inputs) in enumerate(module.shapes):
            blob = found.get(f"{name}.{index}")
            if blob is None or len(blob) != kernel.blob_bytes(outputs, inputs):
                return {}
            numbers = torch.frombuffer(blob, dtype=torch.uint8)
            packed[name].append(kernel.from_blob(numbers, outputs, inputs))
            expected += 1
    if expected != len(found):
        return {}
    embedding.data = torch.frombuffer(found[EMBEDDING], dtype=embedding.dtype).view_as(embedding)
    return packed


def blobs_of(model: Decoder, linears: dict[str, LinearLike]) -> Blobs:
    """What a cache keeps: `layers.0.mlp.down.0` → its bytes, in parts, and the embedding's."""
    blobs: Blobs = {EMBEDDING: [bytes_of(model.embedding.weight)]}
    for name, module in linears.items():
        for index, weight in enumerate(module.matrices):
            if isinstance(weight, PackedLevels):
                parts = [weight.panels] if weight.scales is None else [weight.panels, weight.scales]
                blobs[f"{name}.{index}"] = [bytes_of(part) for part in parts]
    return blobs


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(torch.uint8).numpy().data
