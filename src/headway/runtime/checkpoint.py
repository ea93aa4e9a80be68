"""Load weights of a checkpoint into a model, one tensor at a time.

`load_weights` fills every weight of a model from a folder (one file, or shards with an index),
converts to the model's type, and raises where a weight is missing or left over. Headers are checked
before a tensor is read. A callback is called for each module with complete weights, so that the
module packs them at once: memory holds the packed weights and one plain matrix, never the whole
checkpoint.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.checkpoint_files import find_files, shown
from headway.runtime.models import MODELS, Decoder
from headway.runtime.parallel.shard import Shard
from headway.runtime.quantized.folder import open_quantized
from headway.runtime.quantized.gguf import gguf_formats, open_gguf
from headway.runtime.quantized.profile import round_tensors
from headway.runtime.rounding import RoundedWeight
from headway.runtime.tensor_files import check_finite, readable
from headway.spec import ModelSpec
from headway.spec.formats import PLAIN, Format
from headway.spec.gguf.header import is_gguf

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
SHARED_KV_WEIGHT = r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"
"""Weights in some checkpoints of layers that read the keys and values of other layers."""
MTP_LAYER = r"model\.layers\.{}\."
"""The layer of DeepSeek V3 behind the last, which drafts tokens (multi-token prediction)."""
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""
Rounded = list[list[RoundedWeight | None]]
"""By expert, the rounded parts of a module in a checkpoint; None: a part of its plain weight."""
Source = Iterator[tuple[str, Callable[[], Tensor | RoundedWeight]]]
"""(name, function that reads it) of each weight, by its name in a Hugging Face folder."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The destination of one tensor of the checkpoint: a view of a weight, and its module.

    `row` is the first of its rows there, `expert` its number among the rank's, `part` that of the
    table of weights.
    """

    place: Tensor
    module: str
    row: int = 0
    expert: int = 0
    part: str | None = None
    is_expert: bool = False


def open_model(model: Path, spec: ModelSpec) -> Source:
    """Open the weights of a folder or a GGUF file, plain and quantized."""
    if is_gguf(model):
        return open_gguf(model, spec)
    if spec.profile:
        return round_tensors(open_pieces(model, spec), spec)
    quantized = open_quantized(model, spec)
    return open_pieces(model, spec) if quantized is None else quantized.tensors()


def open_pieces(model: Path, spec: ModelSpec) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the tensors of a folder by the names in the model's table of weights."""
    pieces = MODELS[spec.architecture].pieces_of
    for name, read in open_tensors(find_files(model)):
        for piece, cut in pieces(name, lambda read=read: read().shape):  # type: ignore[misc]
            yield piece, lambda read=read, cut=cut: cut(read())  # type: ignore[misc]


def checkpoint_formats(model: Path, spec: ModelSpec) -> tuple[tuple[str, Format], ...]:
    """Return module → format of each rounded module of a checkpoint. Raises CheckpointError."""
    if is_gguf(model):
        return gguf_formats(model, spec)
    quantized = open_quantized(model, spec)
    return () if quantized is None else quantized.formats()


def open_tensors(files: list[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (name, function that reads it) of every tensor; valid until the next one."""
    for path in files:
        with readable(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, partial(read_tensor, file, path, name)


def read_tensor(file: Any, path: Path, name: str) -> Tensor:
    """Read one tensor of an open file."""
    with readable(path):
        tensor: Tensor = file.get_tensor(name)
        return tensor


def stream_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all files, each read on demand."""
    return ((name, read()) for name, read in open_tensors(files))


def load_weights(
    model: Decoder,
    spec: ModelSpec,
    folder: Path,
    progress: Progress | None = None,
    ready: Callable[[str, Rounded], None] = lambda module, rounded: None,
    filled: Collection[str] = (),
    shard: Shard | None = None,
) -> None:
    """Fill `model` from `folder`; raises CheckpointError when a weight is missing or left over.

    `ready` is called for each complete module with its rounded parts, [] where all are plain. The
    tensors of modules in `filled` are not read: they have their weights. `shard` says what a rank
    reads of the whole model's weights, where `model` and `spec` are its part.
    """
    shard = shard or Shard(spec)
    total = sum(file.stat().st_size for file in find_files(folder))
    missing = targets(model, spec)
    parts = Counter(target.module for target in missing.values())
    rounded: dict[str, dict[tuple[int, int], RoundedWeight]] = defaultdict(dict)
    left_over, done, of_other_ranks = [], 0, names_of_other_ranks(model, spec)
    for name, read in open_model(folder, shard.spec):
        target = missing.pop(name, None)
        if target is None:
            if name not in of_other_ranks and not is_ignorable(name, read, spec):
                left_over.append(name)
            continue
        if target.module not in filled or not name.endswith(".weight"):
            weight = read()
            if not target.is_expert:
                weight = shard.of(weight, target.module, target.part)
            if isinstance(weight, RoundedWeight):
                check_shape(name, target.place, weight.levels_OH)
                rounded[target.module][target.expert, target.row] = weight
            else:
                fill(name, target.place, weight)
            done += bytes_read(weight)
        parts[target.module] -= 1
        if not parts[target.module]:
            pieces = rounded.pop(target.module, {})
            ready(target.module, split_parts(model, target.module, pieces))
        if progress is not None:
            progress(min(done, total), total)
    if missing or left_over:
        raise incomplete(sorted(missing), left_over)
    if progress is not None:
        progress(total, total)


def is_ignorable(name: str, read: Callable[[], Tensor | RoundedWeight], spec: ModelSpec) -> bool:
    """Return whether a tensor without a place in the model can be ignored.

    Early GPTQ writers gave every layer a bias, of zeros where the model has none.
    """
    if name.endswith(IGNORED_SUFFIXES) or (spec.tied and name == "lm_head.weight"):
        return True
    if re.fullmatch(SHARED_KV_WEIGHT, name) and reads_other_kv(spec, name):
        return True
    if spec.states is not None and name.startswith("mtp."):  # layers of multi-token prediction
        return True
    if spec.latent is not None and re.match(MTP_LAYER.format(spec.num_layers), name):
        return True
    if not spec.formats or not name.endswith(".bias"):
        return False
    bias = read()
    return isinstance(bias, Tensor) and not bool(bias.any())


def reads_other_kv(spec: ModelSpec, name: str) -> bool:
    """Return whether the layer of this tensor reads the keys and values of another layer."""
    index = int(name.split(".")[2])
    return index < spec.num_layers and spec.layers[index].kv_from is not None


def bytes_read(weight: Tensor | RoundedWeight) -> int:
    """Return about the bytes of a weight in its file."""
    if isinstance(weight, Tensor):
        return int(weight.nbytes)
    return weight.format.num_bytes(*weight.levels_OH.shape)


def split_parts(
    model: Decoder, module: str, pieces: dict[tuple[int, int], RoundedWeight]
) -> Rounded:
    """Return the parts of each expert of a module, from pieces by (expert, first row).

    A piece with several parts, such as Phi-3's qkv, is split.
    """
    if not pieces:
        return []
    sizes: tuple[int, ...] = model.get_submodule(module).parts  # type: ignore[assignment]
    experts: Rounded = [[] for _ in range(1 + max(expert for expert, _ in pieces))]
    for expert, parts in enumerate(experts):
        row = 0
        for size in sizes:
            inside = [
                piece.rows(slice(row - first, row - first + size))
                for (of, first), piece in pieces.items()
                if of == expert and first <= row < first + len(piece.levels_OH)
            ]
            parts.append(inside[0] if inside else None)
            row += size
    return experts


def fill(name: str, target: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into its place. Raises CheckpointError when shape or type does not fit."""
    check_shape(name, target, tensor)
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} is of type {dtype}, and config.json does not say that it is quantized.",
            "Check its quantization_config, or give the unquantized folder of the same model.",
        )
    target.copy_(tensor)
    check_finite(name, target)


def check_shape(name: str, target: Tensor, tensor: Tensor) -> None:
    """Raise CheckpointError unless both have the same shape."""
    if target.shape != tensor.shape:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}; config.json implies {list(target.shape)}.",
            "Check that config.json and the weights are of the same model.",
        )


def incomplete(missing: list[str], left_over: list[str]) -> CheckpointError:
    """Return the error that names the first weights that are missing or left over."""
    parts = []
    for label, names in (("are missing", missing), ("are left over", left_over)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(map(shown, names[:3]))}{more} {label}")
    return CheckpointError(
        f"The checkpoint does not fit its config.json: {'; '.join(parts)}.",
        "Check that all shards are there and belong to this config.json.",
    )


def targets(model: Decoder, spec: ModelSpec) -> dict[str, WeightTarget]:
    """Return tensor name in the checkpoint → its destination.

    q, k and v are row ranges of one matrix: with 8 query and 2 KV heads of 64, rows 0 … 511,
    512 … 639 and 640 … 767 of `qkv`. Expert e is the e-th matrix of its layer's.
    """
    parameters = dict(model.named_parameters())
    q, kv = spec.q_rows, spec.kv_size
    by_name: dict[str, WeightTarget] = {}
    for pattern, (module, part) in model.weights.items():
        if "{e}" in pattern and spec.experts is None:
            continue
        for i in range(spec.num_layers if "{i}" in pattern else 1):
            for suffix in (".weight", ".bias"):
                owner = module.format(i=i)
                parameter = parameters.get(owner + suffix)
                if parameter is None:
                    continue
                if part in ("k", "v") and spec.layers[i].kv_from is not None:
                    continue
                experts = spec.experts.count if spec.experts and "{e}" in pattern else 0
                if bool(experts) != (parameter.dim() == (3 if suffix == ".weight" else 2)):
                    continue  # a dense layer of a sparse model, or the other way round
                for at, e in enumerate(model.own_experts if experts else (0,)):
                    place = parameter.data[at] if experts else parameter.data
                    inner = place.shape[0] // 2
                    parts = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
                    parts |= {"gate": (0, inner), "up": (inner, inner)}
                    row, count = parts[part] if part else (0, place.shape[0])
                    rows = place.narrow(0, row, count)
                    name = pattern.format(i=i, e=e) + suffix
                    by_name[name] = WeightTarget(rows, owner, row, at, part, bool(experts))
    half = model.stage.half
    if spec.tied and (half is None or not half.has_mlps):
        by_name.pop("lm_head.weight", None)
        holder = model.embedding if model.stage.is_first else model.head
        if head_is_rounded(spec) and model.stage.is_last:
            by_name["lm_head.weight"] = WeightTarget(holder.weight.data, "head")
        elif model.stage.is_last and not model.stage.is_first:
            by_name[name_of(model, "embedding")] = WeightTarget(holder.weight.data, "head")
    return by_name


def name_of(model: Decoder, module: str) -> str:
    """Return the name in the checkpoint of the weight of a module that exists once."""
    (name,) = (name for name, (of, _) in model.weights.items() if of == module)
    return name + ".weight"


def names_of_other_ranks(model: Decoder, spec: ModelSpec) -> set[str]:
    """Return the tensors of other pipeline stages and of experts of other ranks."""
    count, names = spec.experts.count if spec.experts else 0, set[str]()
    half = model.stage.half
    if half is None and model.stage.count == 1 and count == len(model.own_experts):
        return names
    for name, (module, _) in model.weights.items():
        is_here = half is None or half.has(module)
        for i in range(spec.num_layers) if "{i}" in name else (-1,):
            for e in range(count) if "{e}" in name else (-1,):
                here = is_here and (i in model.own or half is not None)
                here = here and (e < 0 or e in model.own_experts)
                names |= set() if here else {name.format(i=i, e=e)}
    return {name + suffix for name in names for suffix in (".weight", ".bias")}


def head_is_rounded(spec: ModelSpec) -> bool:
    """Return whether the checkpoint holds a rounded output matrix, even if the spec says tied."""
    return any(module == "head" and format != PLAIN for module, format in spec.formats)


def fill_randomly(model: Decoder, seed: int) -> None:
    """Fill the model with random weights: normal with deviation 0.02, norms one, biases zero."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0 - model.spec.norm_offset)
        elif name.endswith("bias"):
            parameter.data.zero_()
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        seed += 1
