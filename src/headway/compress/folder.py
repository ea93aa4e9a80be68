"""Output of a model folder that is complete or absent.

Files go to a temporary folder beside it, which is renamed at the end and removed on failure.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.core.errors import UsageError

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "NOTICE",
)
"""Files of the tokenizer, its settings and the licence, which are copied unchanged."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield the temporary folder to write to; it becomes `out` unless the block fails.

    If the caller removes the temporary folder, no `out` is made. Raises UsageError if `out` exists
    and is not empty, or cannot be made.
    """
    check_free(out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be made: {error.strerror}.", "Name another.") from None
    try:
        yield partial
        if not partial.exists():
            return
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}.", "Name another.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise UsageError unless `out` does not exist or is an empty folder."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder that does not exist yet.")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty.", "Name a folder that does not exist yet.")


def copy_text_files(folder: Path, out: Path) -> None:
    """Copy tokenizer, chat template, generation settings and licence."""
    for name in TEXT_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def write_model(out: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> None:
    """Write config.json and model.safetensors, the weights in `dtype`."""
    kind = getattr(torch, dtype)
    converted = {name: value.detach().to(kind).contiguous() for name, value in tensors.items()}
    save_file(converted, out / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
