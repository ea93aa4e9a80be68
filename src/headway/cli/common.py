"""Helpers of several verbs: the model's folder and name, its options, the dry run."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.packages import models_folder
from headway.config.memory_plan import gib
from headway.config.options import EngineOptions, EvalOptions, to_arguments
from headway.core.errors import UsageError
from headway.spec import embedded
from headway.spec.gguf.header import SPLIT_NAME, is_gguf, split_files

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from headway.cli.main import VerbCall
    from headway.evals.url import UrlModel
    from headway.frontend.shorten.scorer import Scorer
    from headway.frontend.text import Tokenizer

EMBEDDED = embedded.EMBEDDED
GATE_FAILED = 5
"""Exit status where a gate refuses a model: it is significantly worse."""


def model_folder(given: str | Path | None) -> Path:
    """Return the folder or file that a user named, one fetched by that name, or the embedded one.

    `Qwen/Qwen3-0.6B` is a folder where that path exists, else the hub's cached snapshot.
    """
    folder = embedded.model_folder(given)
    if given is None or folder.exists():
        return folder
    from headway.cli.names import find_local

    return find_local(str(given)) or folder


def obtain_model(given: str | None, call: "VerbCall") -> Path:
    """The same, after a model that is named and not here was fetched with the user's consent."""
    from headway.cli.names import obtain

    if given is not None:
        obtain(given, "--yes" in call.switches)
    return model_folder(given)


def only_folder(call: "VerbCall", verb: str, usage: str) -> Path:
    """Return the folder of a verb that takes at most one; UsageError for more."""
    if len(call.positionals) > 1:
        raise UsageError(f"{verb} takes one folder.", usage)
    return model_folder(call.positionals[0] if call.positionals else None)


def report_console(width: int = 160) -> "Console":
    """Return a console for reports, of this width where stdout is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def check_writable(*paths: str) -> None:
    """Create the output files that are given, so that a wrong path fails before the run."""
    from headway.measure.saved import write

    for path in paths:
        if path:
            write(path, b"")


def is_model(what: str | Path | None) -> bool:
    """Whether the word names a model of this machine: nothing (the embedded one), a folder or a
    GGUF file."""
    model = model_folder(what)
    return model.is_dir() or is_gguf(model)


def source_folder(given: str | Path, verb: str) -> Path:
    """Return the folder whose weights a verb rewrites; UsageError for a GGUF file."""
    folder = model_folder(given)
    if is_gguf(folder):
        raise UsageError(
            f"{folder.name} is a GGUF file; headway {verb} reads the safetensors of a folder.",
            "Give the folder of the model in 16 bits. serve, run, chat, batch, bench, eval and "
            "doctor take the file as it is.",
        )
    return folder


def model_name(folder: Path) -> str:
    """Return the served name of a model: its folder's name, or ORG/NAME of a cached snapshot.

    A GGUF file is named without its suffix, and without its number if the model is split. A model
    of a package has its short name.
    """
    if folder.parent.parent == models_folder():
        return folder.parent.name
    if is_gguf(folder):  # before links are followed: the hub's cache names files by their digests
        split = SPLIT_NAME.fullmatch(folder.name)
        return split[1] if split else folder.stem
    path = folder.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return path.name


def draft_model_folder(folder: Path, options: EngineOptions) -> Path | None:
    """Return the folder of the draft model that scores prompts for `context`, None without one.

    It is that of --draft-model, or headway-draft for the embedded model.
    """
    if options.draft_model:
        return model_folder(options.draft_model)
    return model_folder(embedded.DRAFT) if folder == model_folder(EMBEDDED) else None


def make_scorer(folder: Path, options: EngineOptions) -> "Scorer | None":
    """Return the scorer of prompts, None without a draft model; its process starts with the first
    text."""
    from headway.frontend.shorten.scorer import Scorer

    drafting = draft_model_folder(folder, options)
    command = [sys.executable, "-m", "headway.surprisal", str(drafting)]
    return None if drafting is None else Scorer(command)


def folder_stamp(folder: Path) -> str:
    """Return a text that changes with a folder's config or weights: names, sizes, times, inodes."""
    stamps = []
    try:
        for path in split_files(folder) if is_gguf(folder) else sorted(folder.iterdir()):
            if is_gguf(folder) or path.name == "config.json" or ".safetensors" in path.name:
                facts = path.stat()
                stamps.append(f"{path.name} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return "\n".join(stamps)


def engine_arguments(options: EngineOptions) -> dict[str, str]:
    """Return the keyword arguments of `headway.LLM` that stand for `options`."""
    pairs = (argument.removeprefix("--").partition("=") for argument in to_arguments(options))
    return {name.replace("-", "_"): value for name, _, value in pairs}


def read_tokenizer(folder: Path, options: EngineOptions) -> "Tokenizer | None":
    """Return the served tokenizer, its template compiled; None with --skip-tokenizer-init.

    Raises TokenizerError.
    """
    from headway.frontend.text import Tokenizer

    if options.skip_tokenizer_init:
        return None
    template = Path(options.chat_template) if options.chat_template else None
    tokenizer = Tokenizer(
        model_folder(options.tokenizer or folder),
        template,
        control_tokens=options.chat_control_tokens,
    )
    if tokenizer.template is not None:
        tokenizer.template.compile()
    return tokenizer


def print_settings(
    folder: Path,
    options: EngineOptions,
    sources: dict[str, str],
    deprecated: Sequence[str],
) -> None:
    """Print the settings of `--dry-run` with values and reasons, then where options came from.

    `deprecated` has the old option names that were given.
    """
    from headway.planning import plan_settings

    spec, settings, reasons, machine = plan_settings(folder, options)
    tokenizer = read_tokenizer(folder, options)
    print(f"model                  {folder.name} ({spec.architecture})")
    if tokenizer is not None:
        template = "none" if tokenizer.template is None else "compiles"
        print(f"chat_template          {template}")
    print(f"machine                {machine.num_cores} cores, {gib(machine.free_bytes)} RAM free")
    for reason in reasons:
        print(f"{reason.name:<22} {reason.value:<14} {reason.why}")
    for group, kv in enumerate(spec.kv_groups):
        size = kv.bytes_per_token(settings.cache.dtype)
        kind = f"window of {kv.window} tokens" if kv.window else "full"
        kind += f" and the first {kv.sinks}" if kv.sinks else " in part" if kv.chooses else ""
        states = f"states, {gib(kv.slot_bytes)} a sequence"
        takes = states if kv.slot_bytes else f"{kind}, {gib(size)} a token"
        print(f"kv_group {group:<13} {f'{len(kv.layers)} layers':<14} {takes}")
    for field in fields(options):
        if field.name in sources:
            value = getattr(options, field.name)
            print(f"{field.name:<22} {value!s:<14} from the {sources[field.name]}")
    for line in deprecated:
        print(f"{'deprecated':<22} {line}")


def open_served_model(
    url: str, options: EvalOptions, model: str
) -> "AbstractContextManager[UrlModel]":
    """Open the model at `url` for an evaluation; without a name the first that is served."""
    from headway.evals.url import open_url

    return open_url(
        url,
        model=model,
        api_key=options.api_key,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
    )
