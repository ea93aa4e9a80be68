"""The files of a checkpoint: one, or shards with an index, and what their headers promise.

Nothing here needs torch or reads weights. An index cannot name a file outside the folder, and every
tensor's bytes lie inside its file.
"""

import json
import struct
from pathlib import Path

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.core.gguf.header import is_gguf
from headway.core.model_spec import read_json

MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
MEDUSA_FILE = "medusa.safetensors"
"""Heads that lie beside a model's weights and are none of them (`medusa_file`)."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`, in order; raises CheckpointError without any."""
    if is_gguf(folder):
        raise UnsupportedModelError(
            f"The weights of {folder.name} are not read yet.", "Give the folder of the same model."
        )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} names no weights.", "Copy the file again.")
        files = [checked_path(folder, name) for name in sorted({*map(str, names.values())})]
    else:
        files = sorted(p for p in folder.glob("*.safetensors") if p.name != MEDUSA_FILE)
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
