"""Write the quantized folder: a shard per layer, index, config, tokenizer files.

Each file is written under a temporary name, so that a file with its final name is complete.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from headway.compress.folder import copy_text_files
from headway.compress.packing import FileFormat, quantization_config, tensors_of
from headway.compress.rows import EMBEDDING, HEAD, HEAD_NAME, RowModel
from headway.core.errors import UsageError
from headway.runtime.checkpoint import IGNORED_SUFFIXES
from headway.runtime.checkpoint_files import DRAFTER_FILES
from headway.runtime.rounding import RoundedWeight
from headway.spec import read_json
from headway.spec.formats import PLAIN, Format


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderContent:
    """The content of a folder: the format of each matrix of the checkpoint, and its numbers.

    `formats` has every linear layer, `lm_head` and plain ones included. `rounded` returns the
    levels of a matrix that is not plain, `plain` any other tensor, in its stored type.
    """

    formats: Mapping[str, Format]
    rounded: Callable[[str], RoundedWeight]
    plain: Callable[[str], Tensor]
    names: list[str]
    """All tensors of the checkpoint; of a tied head the embedding alone."""
    dtype: str
    file_format: FileFormat = "compressed-tensors"
    w8a8: bool = False


def write_weights(
    content: FolderContent, out: Path, advance: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Write shards and index to `out`; return tensor → file. `advance` is called after each
    shard."""
    shards = list(shards_of(content))
    index: dict[str, str] = {}
    size = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= stored_tensors(content, name)
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
        write_file(out / file, partial(save_tensors, tensors))
        advance()
    whole = {"metadata": {"total_size": size}, "weight_map": index}
    write_text(out / "model.safetensors.index.json", json.dumps(whole, indent=2) + "\n")
    return index


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})


def shards_of(content: FolderContent) -> Iterator[list[str]]:
    """Yield names of tensors by shard: those outside layers first, then layer by layer."""
    layers: dict[str, list[str]] = {}
    for name in content.names:
        if not name.endswith(IGNORED_SUFFIXES):
            _, dot, rest = name.partition(".layers.")
            layers.setdefault(rest.split(".")[0] if dot else "", []).append(name)
    if f"{HEAD_NAME}.weight" not in content.names and content.formats[HEAD_NAME] != PLAIN:
        layers.setdefault("", []).append(f"{HEAD_NAME}.weight")
    yield from layers.values()


def stored_tensors(content: FolderContent, name: str) -> dict[str, Tensor]:
    """Return a tensor of the checkpoint as stored: itself, or levels and scales."""
    module = name.removesuffix(".weight")
    format = content.formats.get(module, PLAIN) if name.endswith(".weight") else PLAIN
    if format == PLAIN:
        return {name: content.plain(name).contiguous()}
    return tensors_of(
        module,
        content.rounded(module),
        format.kind,
        content.file_format,
        content.w8a8,
        content.dtype,
    )


def write_config(folder: Path, content: FolderContent, out: Path) -> None:
    """Write the source's config.json with the formats in it."""
    config: dict[str, Any] = read_json(folder / "config.json")
    config["quantization_config"] = quantization_config(
        content.formats, content.file_format, content.w8a8
    )
    apart = f"{HEAD_NAME}.weight" in content.names or content.formats[HEAD_NAME] != PLAIN
    config["tie_word_embeddings"] = not apart
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def copy_rest(folder: Path, out: Path, heads: bool = True) -> None:
    """Copy tokenizer, template, generation settings and licence; draft heads if `heads`."""
    copy_text_files(folder, out)
    for name in DRAFTER_FILES if heads else ():
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def write_text(path: Path, text: str) -> None:
    """Write a text file that is complete or absent."""
    write_file(path, lambda new: new.write_text(text, encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, then rename; raises UsageError if the disk fails."""
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise UsageError(f"{path}: {error.strerror or error}.", "Free some disk.") from error


def source_names(model: RowModel) -> list[str]:
    """Return the tensors that the folder has and the model reads, the embedding first."""
    names = [name for name in model.tensors if name != HEAD or model.head_name == HEAD]
    return sorted(names, key=lambda name: (name != EMBEDDING, name))
