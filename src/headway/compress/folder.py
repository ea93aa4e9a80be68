"""A model folder that is written whole or not at all.

It is written under a temporary name beside its place and renamed when all of it is there; what
fails half way goes again.
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
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What belongs to the text, and is copied as it is."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The temporary folder to write to; it becomes `out` unless the writing fails.

    A caller that removes it has changed its mind, and there is no `out`.
    Raises UsageError where `out` is taken or cannot be made.
    """
    refuse_taken(out)
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


def refuse_taken(out: Path) -> None:
    """UsageError unless `out` is free, or an empty folder."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder that does not exist yet.")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty.", "Name a folder that does not exist yet.")


def copy_text_files(folder: Path, out: Path) -> None:
    """Tokenizer, template and what an answer ends with."""
    for name in TEXT_FILES:
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)


def write_model(out: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> None:
    """config.json and model.safetensors, the weights in `dtype`."""
    kind = getattr(torch, dtype)
    written = {name: value.detach().to(kind).contiguous() for name, value in tensors.items()}
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
