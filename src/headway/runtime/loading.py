"""Load a checkpoint into a model and pack its linear layers, one matrix at a time.

Each layer is packed, and its plain weight freed, as soon as the last of its tensors is read:
Qwen2.5-0.5B in int4 needs its 0.6 GiB and one plain matrix, not 0.92 GiB more. Packed weights that
are in the cache on disk are not read from the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch

from headway.config.resolve import Settings
from headway.runtime.checkpoint import (
    Progress,
    Rounded,
    fill_randomly,
    head_is_rounded,
    load_weights,
)
from headway.runtime.experts import ExpertLinear
from headway.runtime.kernels import Kernels
from headway.runtime.latent import KVUp
from headway.runtime.layers import Linear
from headway.runtime.models import Decoder
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.packed_blobs import blob_sizes, bytes_of, from_blobs, kernels_of
from headway.runtime.parallel.shard import Shard
from headway.runtime.shared_weights import SharedWeights
from headway.runtime.sharing import WeightSharing
from headway.runtime.weight_cache import EMBEDDING, Blobs, Lookup
from headway.spec import ModelSpec

LinearLike = Linear | ExpertLinear


def load_model(
    model: Decoder,
    spec: ModelSpec,
    settings: Settings,
    kernels: Kernels,
    folder: Path,
    progress: Progress | None = None,
    lookup: Lookup | None = None,
    shard: Shard | None = None,
    shared: SharedWeights | None = None,
) -> list[LinearLike]:
    """Fill `model` and pack its linear layers; returns those. Raises CheckpointError.

    `shard` says what a rank reads, where `model` and `spec` are its part of the whole model. With
    `shared` the weights are placed in memory that several engines map, where the kernels can do
    that; raises OSError where memory is short.
    """
    linears: dict[str, LinearLike] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            experts = isinstance(module, ExpertLinear)
            choose = kernels.experts_for if experts else kernels.linear_for
            module.kernel = choose(name, module.parts)
            linears[name] = module
    if settings.load_format == "dummy":
        fill_randomly(model, settings.seed)
        for module in linears.values():
            module.prepare()
        return list(linears.values())
    sharing = WeightSharing.of(model, linears, shared)
    if sharing is not None and sharing.is_whole:
        sharing.load()
        return list(linears.values())
    packed = {} if lookup is None else cached_weights(model, linears, kernels, lookup)

    head_follows = spec.tied and not head_is_rounded(spec)

    def ready(name: str, rounded: Rounded) -> None:
        for each in (name, "head") if head_follows and name == "embedding" else (name,):
            module = linears.get(each)
            if module is None:
                load_plain(model, each, rounded)
                continue
            if each in packed:
                module.restore(packed[each])
            elif not rounded:
                module.prepare()
            elif isinstance(module, ExpertLinear):
                module.prepare_rounded(rounded)
            else:
                module.prepare_rounded(rounded[0])
            if sharing is not None:
                sharing.store(each)

    filled = {*packed, "embedding"} if packed else ()
    load_weights(model, spec, folder, progress, ready, filled, shard)
    if sharing is not None:
        sharing.seal()
    if lookup is not None and not packed:
        lookup.store(blobs_of(model, linears))
    return list(linears.values())


def load_plain(model: Decoder, name: str, rounded: Rounded) -> None:
    """Dequantize a rounded weight of the checkpoint for a module that is no linear layer."""
    if rounded:
        module = model.get_submodule(name)
        (part,) = rounded[0]
        assert isinstance(module, KVUp) and part is not None
        module.fill(part)


def cached_weights(
    model: Decoder, linears: dict[str, LinearLike], kernels: Kernels, lookup: Lookup
) -> dict[str, list[Any]]:
    """Return module → its packed matrices from the cache; {} where the cache does not fit.

    The embedding is set from the cache too.
    """
    cached = lookup.result()
    library = kernels.library
    if cached is None or library is None or library.instruction_set != lookup.instruction_set:
        return {}
    embedding = model.embedding.weight
    if len(cached.get(EMBEDDING, b"")) != embedding.nbytes:
        return {}
    packed: dict[str, list[Any]] = {}
    expected = 1
    for name, module in linears.items():
        if not is_cacheable(module.kernel):
            continue
        sizes = blob_sizes(module.kernel, module.shapes)
        blobs = [cached.get(f"{name}.{index}", memoryview(b"")) for index in range(len(sizes))]
        if [len(blob) for blob in blobs] != sizes:
            return {}
        packed[name] = from_blobs(module.kernel, module.shapes, blobs)
        expected += len(sizes)
    if expected != len(cached):
        return {}
    embedding.data = torch.frombuffer(cached[EMBEDDING], dtype=embedding.dtype).view_as(embedding)
    return packed


def is_cacheable(kernel: Any) -> bool:
    """Return whether the cache on disk stores what the kernel has packed."""
    kinds = NativeQuantizedLinear | NativeFp8Linear
    return all(isinstance(one, kinds) for one, _ in kernels_of(kernel, 0))


def blobs_of(model: Decoder, linears: dict[str, LinearLike]) -> Blobs:
    """Return the blobs for the cache, in parts: those of packed layers, and the embedding."""
    blobs: Blobs = {EMBEDDING: [bytes_of(model.embedding.weight)]}
    for name, module in linears.items():
        if is_cacheable(module.kernel):
            for index, weight in enumerate(module.matrices):
                blobs[f"{name}.{index}"] = [bytes_of(part) for part in weight.tensors]
    return blobs
