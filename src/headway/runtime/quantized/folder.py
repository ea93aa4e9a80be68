"""A folder whose linear layers are quantized: which tensors make a matrix, and what is wrong.

The tensors in the files decide, and the config must agree with them: a tensor that is missing,
unexpected or of another kind is an error that names it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.runtime.checkpoint_files import TensorEntry, find_files, shown
from headway.runtime.models import MODELS
from headway.runtime.quantized import awq, compressed_tensors, fp8, gptq, mxfp4
from headway.runtime.quantized.formats import read_schemes
from headway.runtime.quantized.matrix import Layout, StoredMatrix, common_format
from headway.runtime.quantized.scheme import Scheme, Schemes
from headway.runtime.rounding import RoundedWeight
from headway.runtime.tensor_files import CutFiles, TensorFiles
from headway.spec import ModelSpec
from headway.spec.formats import PLAIN, Format

LAYOUTS = {
    "pack-quantized": compressed_tensors.PACKED,
    "int-quantized": compressed_tensors.BYTES,
    "float-quantized": compressed_tensors.FLOAT,
    "gptq": gptq.GPTQ,
    "awq": awq.AWQ,
    "fp8": fp8.FP8,
    "mxfp4": mxfp4.MXFP4,
    "mxfp4-blocks": mxfp4.BLOCKS,
}
ACTIVATION_SUFFIXES = (
    *("input_scale", "input_zero_point", "input_scale_ub", "activation_scale"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
)
"""Ignored: inputs are rounded token by token, and the KV as the options say."""
QUANTIZED_SUFFIXES = frozenset(
    name for layout in (*LAYOUTS.values(), fp8.FP8_DIRECT) for name in layout.needed
) - {"weight"}
EMBEDDING = "model.embed_tokens"
FLOATS = ("F16", "BF16", "F32", "F64")
LINEAR_MODULES = (
    *("qkv", "q", "q_down", "q_up", "kv_down", "kv_up", "out"),
    *("gate_up", "down", "router", "head"),
)
"""Our modules that multiply, by their last name."""
PER_LAYER_MODULES = ("router", ".shared.gate_up", ".shared.down")
"""Modules of a sparse layer that exist once per layer, not once per expert."""
ONE_MODEL = "Check that quantization_config and all files are of the same model."


class ModulePlace(NamedTuple):
    """The place of a checkpoint's matrix: our module, and which part of its rows."""

    module: str
    part: str | None


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """The quantized matrices by their names in the checkpoint, their places, and all tensors."""

    matrices: dict[str, StoredMatrix]
    places: dict[str, ModulePlace]
    files: TensorFiles

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor | RoundedWeight]]]:
        """Yield (name, reader) of each tensor, and of `NAME.weight` of each matrix."""
        given = set()
        with self.files:
            for name in self.files.entries:
                base, _, suffix = name.rpartition(".")
                if suffix in ACTIVATION_SUFFIXES:
                    continue
                matrix = self.matrices.get(base)
                if matrix is None or suffix == "bias":
                    yield name, partial(self.files.read, name)
                elif base not in given:
                    given.add(base)
                    yield f"{base}.weight", partial(layout_of(matrix).weight, matrix)

    def formats(self) -> tuple[tuple[str, Format], ...]:
        """Return (our module or a part of it, its format); names are exact."""
        by_place: dict[ModulePlace, list[Format]] = defaultdict(list)
        with self.files:
            for name, place in self.places.items():
                if place.module.endswith("kv_up"):
                    continue  # it is dequantized and rounded again
                matrix = self.matrices.get(name)
                by_place[place].append(
                    PLAIN if matrix is None else layout_of(matrix).params(matrix).format
                )
        return tuple(module_formats(by_place))


def module_formats(by_place: dict[ModulePlace, list[Format]]) -> Iterator[tuple[str, Format]]:
    """Yield one row for a module whose parts agree, else one per part. Raises CheckpointError."""
    modules: dict[str, dict[str | None, Format]] = defaultdict(dict)
    for (module, part), formats in by_place.items():
        if len({(format.kind, format.group, format.permuted) for format in formats}) > 1:
            raise CheckpointError(
                f"The experts of {module} are quantized in different ways.",
                "Quantize all experts of a layer alike.",
            )
        modules[module][part] = common_format(formats)
    for module, parts in modules.items():
        alike = {(format.kind, format.group, format.permuted) for format in parts.values()}
        if len(alike) == 1:
            format = common_format(list(parts.values()))
            if format != PLAIN:
                yield module, format
            continue
        for part, format in parts.items():
            yield f"{module}.{part}", format


def layout_of(matrix: StoredMatrix) -> Layout:
    """Return the layout of a matrix; FP8's scales have two names."""
    if matrix.scheme.layout == "fp8" and "weight_scale_inv" not in matrix.tensors:
        return fp8.FP8_DIRECT
    return LAYOUTS[matrix.scheme.layout]


def open_quantized(folder: Path, spec: ModelSpec) -> QuantizedFolder | None:
    """Return the folder's matrices, None if it is not quantized. Raises CheckpointError."""
    schemes = read_schemes(folder)
    if schemes is None:
        return None
    check_family(schemes, spec)
    files = CutFiles(find_files(folder), MODELS[spec.architecture].pieces_of)
    check_embedding(files, schemes)
    places = linear_places(spec)
    for name in schemes.named:
        if name not in places:
            raise CheckpointError(
                f"config.json: quantization_config names {shown(name)}, which is no linear layer "
                "of this model.",
                ONE_MODEL,
            )
    by_module: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in files.entries.items():
        base, _, suffix = name.rpartition(".")
        if suffix not in ACTIVATION_SUFFIXES:
            by_module[base][suffix] = entry
    matrices: dict[str, StoredMatrix] = {}
    for name, place in places.items():
        scheme = scheme_of(schemes, name, place, by_module.get(name, {}), spec)
        if scheme is not None:
            matrices[name] = make_matrix(name, scheme, by_module[name], files)
    return QuantizedFolder(with_zero_shift(matrices, schemes), places, files)


def check_family(schemes: Schemes, spec: ModelSpec) -> None:
    """Raise UnsupportedModelError for a family that is not read with this method."""
    if spec.altup is not None:
        raise UnsupportedModelError(
            f"A {spec.architecture} that is quantized with {schemes.method} is not read.",
            "Give the unquantized folder, and --quantization int8 or int4.",
        )
    if schemes.method == "mxfp4" and spec.architecture != "GptOssForCausalLM":
        raise UnsupportedModelError(
            f"The checkpoint is quantized with mxfp4, which is read for GptOssForCausalLM only, "
            f"and this is a {spec.architecture}.",
            "Give the unquantized folder, or one that compressed-tensors has written in MXFP4.",
        )


def check_embedding(files: TensorFiles, schemes: Schemes) -> None:
    """Raise UnsupportedModelError where the embedding is quantized: lookups need 16 or 32 bits."""
    for name, entry in files.entries.items():
        base, _, suffix = name.rpartition(".")
        quantized = suffix in QUANTIZED_SUFFIXES or (
            suffix == "weight" and entry.dtype not in FLOATS
        )
        if base == EMBEDDING and quantized:
            raise UnsupportedModelError(
                f"The embedding is quantized with {schemes.method} ({shown(name)} is {entry.dtype})"
                ", which is not read.",
                "Quantize the folder again with linear layers as the only targets.",
            )


def linear_places(spec: ModelSpec) -> dict[str, ModulePlace]:
    """Return the place of each linear layer by name: `model.layers.0.mlp.down_proj`."""
    places: dict[str, ModulePlace] = {}
    attention = {name for name, _, _ in spec.attention_matrices}
    for pattern, (module, part) in MODELS[spec.architecture].weights.items():
        last = module.rpartition(".")[2]
        if last not in LINEAR_MODULES or (".attention." in module and last not in attention):
            continue
        if ".shared." in module and not (spec.experts and spec.experts.shared):
            continue
        for i in range(spec.num_layers if "{i}" in pattern else 1):
            sparse = "{i}" in pattern and spec.layers[i].sparse
            of_experts = "{e}" in pattern or module.endswith(PER_LAYER_MODULES)
            if ".mlp." in module and sparse != of_experts:
                continue
            experts = spec.experts.count if spec.experts and "{e}" in pattern else 1
            for e in range(experts):
                places[pattern.format(i=i, e=e)] = ModulePlace(module.format(i=i), part)
    return places


def scheme_of(
    schemes: Schemes,
    name: str,
    place: ModulePlace,
    tensors: dict[str, TensorEntry],
    spec: ModelSpec,
) -> Scheme | None:
    """Return a layer's scheme, None for a plain one. Raises CheckpointError on contradictions."""
    scheme = schemes.scheme_of(name)
    plain = "weight" in tensors and tensors["weight"].dtype in FLOATS
    packed = sorted(QUANTIZED_SUFFIXES & tensors.keys())
    if scheme is None:
        if packed:
            raise CheckpointError(
                f"{shown(name)}.{packed[0]} exists, but quantization_config says that "
                f"{shown(name)} is not quantized.",
                ONE_MODEL,
            )
        return None
    if not tensors and name == "lm_head" and spec.tied:
        return None
    if plain and place.module.endswith("router"):
        return None
    if plain and not packed:
        raise CheckpointError(
            f"{shown(name)}.weight is of type {tensors['weight'].dtype}; quantization_config says "
            f"that it is {scheme.label} of {scheme.bits} bits.",
            "Add it to the modules that the config leaves out, or quantize it.",
        )
    return scheme


def make_matrix(
    name: str, scheme: Scheme, tensors: dict[str, TensorEntry], files: TensorFiles
) -> StoredMatrix:
    """Return a layer's matrix. Raises CheckpointError for missing or unexpected tensors."""
    matrix = StoredMatrix(name, scheme, tensors, files.read)
    layout = layout_of(matrix)
    for suffix in layout.needed:
        if suffix not in tensors:
            raise CheckpointError(
                f"{shown(name)}.{suffix} is missing; {scheme.label} needs it.",
                "Check that all shards are there and belong to this config.json.",
            )
    for suffix in sorted(tensors.keys() - {*layout.needed, *layout.optional, "bias"}):
        raise CheckpointError(
            f"{shown(name)}.{shown(suffix)} is left over: {scheme.label} has no such tensor.",
            ONE_MODEL,
        )
    return matrix


def with_zero_shift(matrices: dict[str, StoredMatrix], schemes: Schemes) -> dict[str, StoredMatrix]:
    """Return the matrices; those of GPTQ with their checkpoint's shift of stored zeros."""
    if schemes.method != "gptq" or not matrices:
        return matrices
    shift = gptq.find_shift(list(matrices.values()), schemes.version)
    return {name: replace(matrix, shift=shift) for name, matrix in matrices.items()}
