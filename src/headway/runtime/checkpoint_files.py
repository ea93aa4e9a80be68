"""Find the files of a checkpoint (one, or shards with an index) and check their headers.

This module needs no torch and reads no weights. An index cannot name a file outside the folder, and
the bytes of every tensor lie inside its file.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError
from headway.core.regular_file import check_regular, open_regular
from headway.spec import read_json
from headway.spec.gguf.header import is_gguf, split_files

MAX_HEADER_BYTES = 1 << 24
"""Enough for 140,000 tensors in one file; parsed JSON of this size stays below 512 MB."""
TYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2"), 0),
}
"""Bits of the types of safetensors; 0: packed types below a byte, with no check of lengths."""
MAX_DIMS = 8
METADATA = "__metadata__"
MEDUSA_FILE = "medusa.safetensors"
"""Medusa heads in the folder of a model (`medusa_file`)."""
EAGLE_FILE = "eagle.safetensors"
"""An EAGLE layer in the folder of a model (`eagle_file`)."""
DRAFTER_FILES = (MEDUSA_FILE, EAGLE_FILE)
"""Files in the folder of a model that are not its weights."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def find_files(folder: Path) -> list[Path]:
    """Return the weight files of a model in order: GGUF, or the safetensors of a folder.

    Raises CheckpointError where there are none.
    """
    if is_gguf(folder):
        return split_files(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} names no weights.", "Copy the file again.")
        files = [checked_path(folder, name) for name in sorted({*map(str, names.values())})]
    else:
        files = sorted(p for p in folder.glob("*.safetensors") if p.name not in DRAFTER_FILES)
    if not files:
        others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        hint = f" ({others[0]} is a pickle and is never opened)" if others else ""
        raise CheckpointError(
            f"{folder} holds no *.safetensors{hint}.",
            "Convert the weights to safetensors, or use --load-format dummy for random ones.",
        )
    for file in files:
        read_entries(file)
    return files


def checked_path(folder: Path, name: str) -> Path:
    """Return `folder / name`. Raises CheckpointError unless it is a file of the folder."""
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
    """Return text of a file for one line of an error: printable, at most 200 characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:200]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor according to a header: its file, type (`BF16`, `I32`) and shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Return name → entry of every tensor of a file.

    Raises CheckpointError unless the header is complete and the tensors, with the lengths of their
    types and shapes, fill the rest of the file without gaps.
    """
    again = f"Copy {path.name} again: it is truncated or not a safetensors file."
    try:
        size = check_regular(path).st_size
        with open_regular(path) as file:
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
        header.pop(METADATA, None)
        ranges = sorted(tensor_range(entry) for entry in header.values())
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.", again) from error
    except MALFORMED as error:
        raise CheckpointError(f"{path.name} has a header that is not valid.", again) from error
    end = max((end for _, end in ranges), default=0)
    if end != size - 8 - header_bytes:
        raise CheckpointError(
            f"{path.name} should hold {end + 8 + header_bytes} bytes; it holds {size}.", again
        )
    begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
    if begins != [0, *ends[:-1]][: len(begins)]:
        raise CheckpointError(f"{path.name} has tensors that overlap, or gaps.", again)
    return {name: TensorEntry(path, header[name]["dtype"], shapes[name]) for name in header}


def tensor_range(entry: Any) -> tuple[int, int]:
    """Return where a tensor begins and ends. Raises ValueError or TypeError for a bad entry."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if len(numbers) > 2 + MAX_DIMS or any(
        type(number) is not int or not 0 <= number < 1 << 62 for number in numbers
    ):
        raise ValueError("not a size")
    bits = TYPE_BITS[entry["dtype"]]
    if bits and 8 * (end - begin) != bits * prod(entry["shape"]):
        raise ValueError("not its length")
    return begin, end
