"""The small files of a model, wherever it comes from: a Hugging Face folder, or one GGUF file.

config.json and tokenizer.json come as parsed JSON: a folder's own, or what the metadata of a GGUF
file say, in the same keys.
"""

import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from headway.core.errors import ModelError, RequestError
from headway.core.regular_file import read_text
from headway.core.request import SamplingParams
from headway.spec.gguf.config import config_of, generation_config_of
from headway.spec.gguf.header import Header, is_gguf, read_header
from headway.spec.gguf.tokenizer import tokenizer_config_of, tokenizer_of

TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FROM_GGUF: dict[str, Callable[[Header], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": generation_config_of,
    TOKENIZER_FILE: tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}


def read_json(path: Path, missing: ModelError | None = None) -> dict[str, Any]:
    """Parse a JSON object from `path`; raises ModelError that names the file."""
    try:
        value = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing or ModelError(f"{path} is missing.", "Copy the whole folder.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not valid JSON ({str(error)[:200]}).",
            "Copy the file again from its source.",
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", "Check the file.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "Copy the file again.")
    return value


def read_document(model: Path, name: str) -> dict[str, Any] | None:
    """The parsed file `name` of a model, None where it has none; ModelError where it is broken."""
    if is_gguf(model):
        translate = FROM_GGUF.get(name)
        return None if translate is None else translate(read_header(model))
    path = model / name
    return read_json(path) if path.exists() else None


def has_document(model: Path, name: str) -> bool:
    """Whether a model has a file `name`; what a GGUF file says is not translated for it."""
    return name in FROM_GGUF if is_gguf(model) else (model / name).exists()


def sampling_defaults(model: Path) -> dict[str, Any]:
    """The sampling parameters that generation_config.json sets: {"temperature": 0.7, …}.

    `do_sample: false` is temperature 0: what transformers does with the model. Raises ModelError
    for a value that no request may have.
    """
    generation = read_document(model, "generation_config.json") or {}
    defaults = {
        name: generation[name]
        for name in GENERATION_CONFIG_FIELDS
        if generation.get(name) is not None
    }
    for name, value in defaults.items():
        check_default(name, value)
    return defaults | ({"temperature": 0.0} if generation.get("do_sample") is False else {})


def check_default(name: str, value: Any) -> None:
    """Raise ModelError unless generation_config.json may set the parameter `name` to `value`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    why = f"{name} must be a number, not {str(value)[:80]!r}"
    try:
        if is_number and isfinite(value):
            SamplingParams(**{name: value})
            return
    except (RequestError, OverflowError) as error:
        why = str(error).splitlines()[0].rstrip(".") if isinstance(error, RequestError) else why
    raise ModelError(
        f"generation_config.json: {why}.",
        f"Correct {name} there, or leave it out: the default is used then.",
    )
