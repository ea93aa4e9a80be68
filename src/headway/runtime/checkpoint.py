"""Weights from safetensors files into a model, one tensor at a time.

Given a folder (one file, or shards with an index) and a model it fills every weight, converting to
the model's type, and promises that nothing is missing and nothing left over. Headers are checked
before anything is read. A module whose weights are complete is told at once, so that it can pack
them: in memory lie the packed weights and one plain matrix, never the whole checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.core.model_spec import ModelSpec
from headway.runtime.checkpoint_files import find_files, shown
from headway.runtime.models import Decoder

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The place of one tensor of the checkpoint, a view of a weight, and the module it is of."""

    place: Tensor
    module: str


def open_tensors(files: list[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, function that reads it) of every tensor; valid until the next is asked for."""
    for path in files:
        with readable(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, partial(read_tensor, file, path, name)


def read_tensor(file: Any, path: Path, name: str) -> Tensor:
    """One tensor of an open file."""
    with readable(path):
        tensor: Tensor = file.get_tensor(name)
        return tensor


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of the file system or the format inside are CheckpointErrors."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {shown(error)}.", "Copy the file again."
        ) from error


def stream_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every file, each read when it is asked for."""
    return ((name, read()) for name, read in open_tensors(files))


def load_weights(
    model: Decoder,
    spec: ModelSpec,
    folder: Path,
    progress: Progress | None = None,
    ready: Callable[[str], None] = lambda module: None,
    held: Collection[str] = (),
) -> None:
    """Fill `model` from `folder`; raises CheckpointError when a weight is missing or left over.

    `ready` hears of each module that is complete. Modules in `held` have their weights already:
    theirs are not read.
    """
    files = find_files(folder)
    total = sum(file.stat().st_size for file in files)
    missing = targets(model, spec)
    parts = Counter(target.module for target in missing.values())
    tied = "lm_head.weight" if spec.tied else None
    left_over, done = [], 0
    for name, read in open_tensors(files):
        target = missing.pop(name, None)
        if target is None:
            if name != tied and not name.endswith(IGNORED_SUFFIXES):
                left_over.append(name)
            continue
        if target.module not in held or not name.endswith(".weight"):
            tensor = read()
            fill(name, target.place, tensor)
            done += tensor.nbytes
        parts[target.module] -= 1
        if not parts[target.module]:
            ready(target.module)
        if progress is not None:
            progress(done, total)
    if missing or left_over:
        raise incomplete(sorted(missing), left_over)
    if progress is not None:
        progress(total, total)


def fill(name: str, target: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into its place; CheckpointError when the shapes or the type do not fit."""
    if target.shape != tensor.shape:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}; config.json implies {list(target.shape)}.",
            "Check that config.json and the weights are of the same model.",
        )
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise CheckpointError(
            f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}, which is not read yet.",
            "Give the unquantized folder (bf16, fp16 or fp32) of the same model.",
        )
    target.copy_(tensor)


def incomplete(missing: list[str], left_over: list[str]) -> CheckpointError:
    """The error that names the first weights missing or left over."""
    parts = []
    for label, names in (("are missing", missing), ("are left over", left_over)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(map(shown, names[:3]))}{more} {label}")
    return CheckpointError(
        f"The checkpoint does not fit its config.json: {'; '.join(parts)}.",
        "Check that all shards are there and belong to this config.json.",
    )


def targets(model: Decoder, spec: ModelSpec) -> dict[str, Target]:
    """Checkpoint name → where it is copied to.

    q, k and v are row ranges of one matrix: with 8 query and 2 KV heads of 64, rows 0 … 511,
    512 … 639 and 640 … 767 of `qkv`. Expert e is the e-th matrix of its layer's.
    """
    parameters = dict(model.named_parameters())
    q, kv = spec.q_size, spec.kv_size
    found: dict[str, Target] = {}
    for pattern, (module, part) in model.weights.items():
        for i in range(spec.num_layers if "{i}" in pattern else 1):
            for suffix in (".weight", ".bias"):
                owner = module.format(i=i)
                parameter = parameters.get(owner + suffix)
                if parameter is None:
                    continue
                experts = spec.experts.count if spec.experts and "{e}" in pattern else 0
                if bool(experts) != (parameter.dim() == 3):
                    continue  # a dense layer of a sparse model, or the other way round
                for e in range(experts or 1):
                    place = parameter.data[e] if experts else parameter.data
                    inner = place.shape[0] // 2
                    parts = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
                    parts |= {"gate": (0, inner), "up": (inner, inner)}
                    rows = place.narrow(0, *parts[part]) if part else place
                    found[pattern.format(i=i, e=e) + suffix] = Target(rows, owner)
    if spec.tied:
        found.pop("lm_head.weight", None)
    return found


def fill_randomly(model: Decoder, seed: int) -> None:
    """Random weights of a trained size: normal, 0.02; norms scale by one, biases are zero."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0 - model.spec.norm_offset)
        elif name.endswith("bias"):
            parameter.data.zero_()
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        seed += 1
