"""Read and check the header of `medusa.safetensors` in the folder of a model; needs no torch.

Tensors have the names of the reference implementation: head i, block j.

    i.j.linear.weight, i.j.linear.bias    (hidden, hidden), (hidden)    x + SiLU(linear(x))
    i.LAYERS.weight                       (vocabulary, hidden)          heads with own output matrix

The metadata states the form: `medusa_num_heads`, `medusa_num_layers` (blocks of a head), and
`head`, `own` or `shared`: with `shared` all heads use the output matrix of the model.
"""

import json
import struct
from math import prod
from pathlib import Path

from headway.config.speculation_config import MedusaSpec
from headway.core.errors import CheckpointError
from headway.core.regular_file import open_regular
from headway.runtime.checkpoint_files import MALFORMED, MEDUSA_FILE, METADATA, read_entries, shown
from headway.spec import ModelSpec

MAX_HEADS, MAX_LAYERS = 16, 16
Tensors = dict[str, tuple[str, list[int]]]
"""Name → type, shape."""
FLOATS = ("BF16", "F16", "F32")
TRAIN_AGAIN = "Train the heads for this model, or leave medusa out of --speculative-method."


def read_medusa_spec(folder: Path, spec: ModelSpec) -> MedusaSpec | None:
    """Return the heads in `folder`, None where there are none.

    Raises CheckpointError where they fit neither the model of `spec` nor their metadata.
    """
    path = folder / MEDUSA_FILE
    if not path.exists():
        return None
    read_entries(path)
    metadata, tensors = read_header(path)
    num_heads = read_count(metadata, "medusa_num_heads", MAX_HEADS)
    num_layers = read_count(metadata, "medusa_num_layers", MAX_LAYERS)
    if metadata.get("head") not in ("own", "shared"):
        raise CheckpointError(
            f"{MEDUSA_FILE}: head is {shown(metadata.get('head'))!r} in its metadata.",
            "Write own, or shared where heads use the model's output matrix.",
        )
    medusa = MedusaSpec(
        num_heads=num_heads,
        num_layers=num_layers,
        shares_head=metadata["head"] == "shared",
        num_parameters=sum(prod(shape) for _, shape in tensors.values()),
    )
    check_tensors(tensors, medusa, spec)
    return medusa


def read_header(path: Path) -> tuple[dict[str, str], Tensors]:
    """Return (metadata, types and shapes of tensors) of a file that `read_entries` accepts."""
    try:
        with open_regular(path) as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        metadata = dict(header.pop(METADATA, {}))
        return metadata, {
            name: (e["dtype"], list(map(int, e["shape"]))) for name, e in header.items()
        }
    except MALFORMED as error:
        raise CheckpointError(
            f"{path.name} has a header that is not valid.", "Write the file again."
        ) from error


def read_count(metadata: dict[str, str], name: str, maximum: int) -> int:
    """Return a number of the metadata, where all values are text. Raises CheckpointError."""
    text = str(metadata.get(name))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= maximum):
        raise CheckpointError(
            f"{MEDUSA_FILE}: {name} is {shown(metadata.get(name))!r} in its metadata.",
            f"Write a whole number from 1 to {maximum}.",
        )
    return int(text)


def shapes_of(medusa: MedusaSpec, spec: ModelSpec) -> dict[str, list[int]]:
    """Return name → shape of every tensor of the heads."""
    hidden, layers = spec.hidden_size, medusa.num_layers
    shapes: dict[str, list[int]] = {}
    for head in range(medusa.num_heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = [hidden, hidden]
            shapes[f"{head}.{layer}.linear.bias"] = [hidden]
        if not medusa.shares_head:
            shapes[f"{head}.{layers}.weight"] = [spec.vocab_size, hidden]
    return shapes


def check_tensors(tensors: Tensors, medusa: MedusaSpec, spec: ModelSpec) -> None:
    """Raise CheckpointError unless the tensors are those of the heads and fit the model."""
    shapes = shapes_of(medusa, spec)
    for names, what in (
        (shapes.keys() - tensors.keys(), "is missing"),
        (tensors.keys() - shapes.keys(), "is left over"),
    ):
        if names:
            raise CheckpointError(
                f"{MEDUSA_FILE}: {shown(min(names))} {what}; its metadata says "
                f"{medusa.num_heads} heads of {medusa.num_layers} blocks, "
                f"{'shared' if medusa.shares_head else 'own'} output.",
                "Correct the metadata, or write all the tensors.",
            )
    for name, shape in shapes.items():
        dtype, actual = tensors[name]
        if actual != shape:
            raise CheckpointError(
                f"{MEDUSA_FILE}: {name} has shape {shown(actual)}; this model has {shape} "
                f"(hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}).",
                TRAIN_AGAIN,
            )
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{MEDUSA_FILE}: {name} is of type {shown(dtype)}.", f"Use {', '.join(FLOATS)}."
            )
