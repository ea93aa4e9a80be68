"""`headway ls`, and models of the Hugging Face hub.

What is fetched lies in the hub's own cache, so other programs share it, an interrupted download
goes on, and `headway serve ORG/NAME` finds it. Only weights as safetensors or GGUF, tokenizers and
JSON are fetched: nothing that could be code.
"""

import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.packages import PACKAGED_MODELS, cached_model
from headway.config.memory_plan import gib
from headway.config.options import PullOptions
from headway.core.errors import HeadwayError, ModelError, UsageError
from headway.spec import read_model_spec
from headway.spec.gguf.header import SPLIT_NAME, split_files

if TYPE_CHECKING:
    from headway.cli.main import VerbCall

FETCHED_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*", "README.md"]
SKIPPED_FILES = ["original/*", "consolidated*", "onnx/*", "openvino/*", "*.bin", "*.pth"]
DEFAULT_QUANTIZATION = "Q4_K_M"
MAX_LICENSE_CHARS = 80
SPLIT_END = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
REACH_TIMEOUT_S = 5.0
NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
REVISION = re.compile(r"[\w./-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine; `why_not` is the reason why it cannot be served."""

    name: str
    folder: Path
    architecture: str = "?"
    num_parameters: int = 0
    context: int = 0
    num_bytes: int = 0
    why_not: str = ""


def cache_folder() -> Path:
    """Return the hub's cache: HF_HUB_CACHE, hub below HF_HOME, or ~/.cache/huggingface/hub."""
    given = os.environ.get("HF_HUB_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "huggingface" / "hub"


def cached_snapshot(name: str, revision: str = "main") -> Path | None:
    """Return the folder of ORG/NAME in the hub's cache, None without a config in it."""
    if not NAME.fullmatch(name) or not REVISION.fullmatch(revision):
        return None
    folder = snapshot_folder(name, revision)
    return folder if (folder / "config.json").is_file() else None


def snapshot_folder(name: str, revision: str = "main") -> Path:
    """Return where the hub's cache has, or would have, ORG/NAME at a revision."""
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    return repository / "snapshots" / commit


def cached_gguf(name: str, quantization: str) -> Path | None:
    """The GGUF file of ORG/NAME in the hub's cache, or None; the only one if none is named.

    Of a split model it is the first file, once all are there.
    """
    snapshot = snapshot_folder(name)
    files = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in (snapshot.rglob("*.gguf") if snapshot.is_dir() else ())
        if path.is_file()
    }
    try:
        file = choose_gguf(HubCard(name=name, files=files), quantization)
    except UsageError:
        file = next(iter(files)) if len(files) == 1 and not quantization else ""
    if not file or not all(part.is_file() for part in split_files(snapshot / file)):
        return None
    return snapshot / file


def local_models() -> Iterator[LocalModel]:
    """The embedded models, those of packages, then the hub's cache by name."""
    embedded = Path(str(files("headway") / "embedded"))
    for config in sorted(embedded.glob("*/config.json")):
        yield describe_folder(config.parent.name, config.parent)
    for name in PACKAGED_MODELS:
        if (path := cached_model(name)) is not None:
            yield describe_folder(name, path)
    cache = cache_folder()
    for repository in sorted(cache.glob("models--*--*")) if cache.is_dir() else []:
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        folder = cached_snapshot(name)
        if folder is not None:
            yield describe_folder(name, folder)
        for file in sorted(snapshot_folder(name).rglob("*.gguf")):
            if file.is_file() and is_whole_model(file.name):
                yield describe_folder(f"{name}/{file.name}", file)


def describe_folder(name: str, folder: Path) -> LocalModel:
    """What a folder holds."""
    weights = split_files(folder) if folder.is_file() else folder.glob("*.safetensors")
    num_bytes = sum(path.stat().st_size for path in weights if path.is_file())
    try:
        spec = read_model_spec(folder)
    except ModelError as error:
        return LocalModel(name=name, folder=folder, num_bytes=num_bytes, why_not=error.cause)
    return LocalModel(
        name=name,
        folder=folder,
        architecture=spec.architecture,
        num_parameters=spec.num_parameters,
        context=spec.max_len,
        num_bytes=num_bytes,
        why_not="" if num_bytes else "It has no weights; pull it again.",
    )


def ls(call: "VerbCall") -> int:
    """Print the models on this machine with the word in their name."""
    if len(call.positionals) > 1:
        raise UsageError("ls takes one word.", "headway ls WORD")
    word = call.positionals[0].lower() if call.positionals else ""
    models = [model for model in local_models() if word in model.name.lower()]
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        if model.why_not:
            print(f"{model.name:<{width}}  cannot be served: {model.why_not}")
            continue
        print(
            f"{model.name:<{width}}  {model.architecture:<24} "
            f"{format_count(model.num_parameters):>7} parameters  {gib(model.num_bytes):>10}  "
            f"context {model.context:<8} {model.folder}"
        )
    if not models:
        print(f"No model has {word!r} in its name.", file=sys.stderr)
    return 0


def format_count(count: int) -> str:
    """Format a count: 1234567 → 1.2M."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return str(count)


def fetch_snapshot(name: str, options: PullOptions) -> Path:
    """Fetch the complete snapshot and return its folder; HeadwayError with a fix where that fails.

    The configuration comes first, so that a model that cannot be served costs no gigabytes.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    check_reachable()
    token = options.hub_token or None
    cache = cache_folder()
    try:
        config = hf_hub_download(
            name, "config.json", revision=options.revision, token=token, cache_dir=cache
        )
        read_model_spec(Path(config).parent)
        return Path(
            snapshot_download(
                name,
                revision=options.revision,
                token=token,
                cache_dir=cache,
                allow_patterns=FETCHED_FILES,
                ignore_patterns=SKIPPED_FILES,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        status = answered_status(error)
        raise (hub_error(name, options, status) if status else unreachable()) from error
    except OSError as error:
        raise not_stored(name, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCard:
    """A repository as the hub describes it: bytes of each file, and the license its card states."""

    name: str
    files: dict[str, int]
    license: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that `fetch_snapshot` downloads."""
        return sum(
            size
            for file, size in self.files.items()
            if any(fnmatch(file, pattern) for pattern in FETCHED_FILES)
            and not any(fnmatch(file, pattern) for pattern in SKIPPED_FILES)
        )


def read_card(name: str, options: PullOptions) -> HubCard:
    """Ask the hub for a repository's files and license; HeadwayError as `fetch_snapshot`."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise HeadwayError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it.",
            "Unset HF_HUB_OFFLINE, or name the path of a model folder or GGUF file.",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_reachable()
    try:
        found = HfApi(endpoint=hub_address(), token=options.hub_token or None).model_info(
            name, revision=options.revision, files_metadata=True
        )
    except HfHubHTTPError as error:
        status = answered_status(error)
        raise (hub_error(name, options, status) if status else unreachable()) from error
    except Exception as error:  # whatever its client raises for an answer that is none
        cause = f"{hub_address()} gave no readable answer about {name}: {error!r:.200}."
        raise HeadwayError(cause, "Check HF_ENDPOINT, or try again later.") from error
    files = {
        str(each.rfilename): each.size if isinstance(each.size, int) else 0
        for each in found.siblings or []
        if not {"", ".", ".."} & set(str(each.rfilename).split("/"))
    }
    license = str(getattr(found.card_data, "license", None) or "")
    return HubCard(name=name, files=files, license=license[:MAX_LICENSE_CHARS])


def choose_gguf(card: HubCard, quantization: str) -> str:
    """The GGUF file of a repository that has `quantization` in its name; "" for a folder's weights.

    Without a quantization a repository of GGUF files alone gives its Q4_K_M, as other programs do.
    Of a split model it is the first file. Raises UsageError where no file or several fit.
    """
    if not quantization and any(name.endswith(".safetensors") for name in card.files):
        return ""
    word = (quantization or DEFAULT_QUANTIZATION).lower()
    stems = {n: SPLIT_END.sub("", n).lower() for n in card.files if is_whole_model(n)}
    fitting = [name for name, stem in stems.items() if word in re.split(r"[-./]", stem)]
    fitting = fitting or [name for name, stem in stems.items() if stem.endswith(word)]
    if len(fitting) == 1:
        return fitting[0]
    if not stems:
        raise UsageError(f"{card.name} has no GGUF file.", "Leave the quantization out.")
    raise UsageError(
        f"{card.name} has {len(fitting) or 'no'} GGUF files of {word.upper()}.",
        f"It has: {', '.join(sorted(stems))[:500]}. Name one: hf.co/{card.name}:QUANTIZATION",
    )


def is_whole_model(name: str) -> bool:
    """Whether a file is a model in GGUF, or the first file of a split one."""
    split = SPLIT_NAME.fullmatch(name)
    return name.lower().endswith(".gguf") and (split is None or int(split[2]) == 1)


def fetch_gguf(card: HubCard, file: str, options: PullOptions) -> Path:
    """Fetch a GGUF file of a repository, with the others of a split model; return the first."""
    first, *others = (part.as_posix() for part in split_files(Path(file)))
    for part in others:
        if part not in card.files:
            raise HeadwayError(f"{card.name} lacks {part}.", "Choose another quantization.")
    paths = [fetch_file(card.name, part, options) for part in (first, *others)]
    return paths[0]


def fetch_file(name: str, file: str, options: PullOptions) -> Path:
    """One file of a repository, in the hub's cache; HeadwayError as `fetch_snapshot`."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cache, token = cache_folder(), options.hub_token or None
    try:
        return Path(
            hf_hub_download(name, file, revision=options.revision, token=token, cache_dir=cache)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        status = answered_status(error)
        raise (hub_error(name, options, status) if status else unreachable()) from error
    except OSError as error:
        raise not_stored(name, error) from error


def check_reachable() -> None:
    """Raise HeadwayError where the hub does not answer: its client retries for half a minute."""
    request = urllib.request.Request(hub_address(), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=REACH_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # it answered
    except OSError as error:
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise unreachable() from error


def not_stored(name: str, error: OSError) -> HeadwayError:
    return HeadwayError(
        f"{name} could not be stored: {error.strerror or error}.",
        f"Free space below {cache_folder()}, or set HF_HOME; what was fetched is kept.",
    )


def answered_status(error: BaseException | None) -> int | None:
    """The status that the hub answered with, None when it answered nothing."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return int(response.status_code)
        error = error.__cause__ or error.__context__
    return None


def hub_address() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def unreachable() -> HeadwayError:
    return HeadwayError(
        f"{hub_address()} cannot be reached.",
        "Give the path of a model folder or GGUF file, or run `headway pull NAME` with a network; "
        "HF_ENDPOINT names a mirror.",
    )


def hub_error(name: str, options: PullOptions, status: int) -> HeadwayError:
    """Return the error of a hub that answered with `status`."""
    if status in (401, 403):
        return HeadwayError(
            f"{hub_address()} has no {name} for you: it may want a licence accepted and a token.",
            "Give --hub-token or HF_TOKEN, and check the name.",
        )
    if status == 404:
        return HeadwayError(
            f"{hub_address()} has no {name} at {options.revision} with a config.json.",
            "Check the name and --revision.",
        )
    return HeadwayError(f"{hub_address()} answered {status}.", "Try again later.")
