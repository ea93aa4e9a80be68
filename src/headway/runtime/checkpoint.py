"""Weights from safetensors files into a model, one tensor at a time.

Given a folder (one file, or shards with an index) and a model it fills every weight, converting to
the model's type, and promises that nothing is missing and nothing left over. Headers are checked
before anything is allocated; an index cannot name a file outside the folder.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.core.model_spec import ModelSpec, read_json
from headway.runtime.models import Decoder

MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`, in order; raises CheckpointError without any."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} names no weights.", "Copy the file again.")
        files = [checked_path(folder, name) for name in sorted({*map(str, names.values())})]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        hint = f" ({others[0]} is a pickle and is never opened)" if others else ""
        raise CheckpointError(
            f"{folder} holds no *.safetensors{hint}.",
            "Convert the weights to safetensors, or use --load-format dummy for random ones.",
        )
    for file in files:
        check_header(file)
    return files


def checked_path(folder: Path, name: str) -> Path:
    """`folder / name`, a plain file name inside the folder."""
    if not name or Path(name).name != name or name.startswith("."):
        raise CheckpointError(
            f"The index names {shown(name)!r}, which is not a file of this folder.",
            "Do not trust it.",
        )
    if name not in {path.name for path in folder.iterdir()}:
        raise CheckpointError(
            f"The shard {shown(name)!r} is missing.", "Copy the whole folder again."
        )
    return folder / name


def shown(text: object) -> str:
    """What a file says, fit for one line of an error: printable and at most 200 characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:200]


def check_header(path: Path) -> None:
    """Raise CheckpointError unless the header and every tensor's bytes lie inside the file."""
    again = f"Copy {path.name} again: it is truncated or not a safetensors file."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name} has {size} bytes, less than a header.", again)
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path.name} claims a header of {header_bytes} bytes in a file of {size}.",
                    again,
                )
            header = json.loads(file.read(header_bytes))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != METADATA]
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.", again) from error
    except MALFORMED as error:
        raise CheckpointError(f"{path.name} has a header that is not valid.", again) from error
    if max(ends, default=0) != size - 8 - header_bytes:
        raise CheckpointError(
            f"{path.name} should hold {max(ends, default=0) + 8 + header_bytes} bytes; "
            f"it holds {size}.",
            again,
        )


def stream_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every file, each read when it is asked for."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path.name} cannot be read: {shown(error)}.", "Copy the file again."
            ) from error


def load_weights(
    model: Decoder, spec: ModelSpec, folder: Path, progress: Progress | None = None
) -> None:
    """Fill `model` from `folder`; raises CheckpointError when a weight is missing or left over."""
    files = find_files(folder)
    total = sum(file.stat().st_size for file in files)
    missing = targets(model, spec)
    tied = "lm_head.weight" if spec.tied else None
    left_over, done = [], 0
    for name, tensor in stream_tensors(files):
        target = missing.pop(name, None)
        if target is not None:
            fill(name, target, tensor)
        elif name != tied and not name.endswith(IGNORED_SUFFIXES):
            left_over.append(name)
        done += tensor.nbytes
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


def targets(model: Decoder, spec: ModelSpec) -> dict[str, Tensor]:
    """Checkpoint name → the place it is copied to, a view of one of the model's weights.

    q, k and v are row ranges of one matrix: with 8 query and 2 KV heads of 64, rows 0 … 511,
    512 … 639 and 640 … 767 of `qkv`. Expert e is the e-th matrix of its layer's.
    """
    parameters = dict(model.named_parameters())
    q, kv = spec.q_size, spec.kv_size
    found: dict[str, Tensor] = {}
    for pattern, (module, part) in model.weights.items():
        for i in range(spec.num_layers if "{i}" in pattern else 1):
            for suffix in (".weight", ".bias"):
                parameter = parameters.get(module.format(i=i) + suffix)
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
                    found[pattern.format(i=i, e=e) + suffix] = rows
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
