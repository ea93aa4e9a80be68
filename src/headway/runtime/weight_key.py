"""The key of packed weights: text of all that they depend on. Equal text, equal bytes.

The checkpoint enters by its content. A SHA-256 of 1 GB takes half a second, so the digest of a file
is stored and reused while size, inode and times of change are the same, as git does.
"""

import hashlib
import json
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway import __version__
from headway.config.resolve import Settings
from headway.core.clock import Clock, SystemClock
from headway.core.regular_file import open_regular
from headway.runtime.checkpoint_files import EAGLE_FILE, MALFORMED, MEDUSA_FILE, find_files
from headway.spec.gguf.header import is_gguf
from headway.spec.quantization_config import OLD_CONFIGS

LAYOUT_VERSION = 2
"""Incremented when Python fuses or rounds the layers of a model in another way."""
MTIME_SETTLED_S = 2.0
"""A file that changed within this time may change again without a new timestamp."""
MAX_REMEMBERED_DIGESTS = 256
"""Stored digests, one small file each; chosen generously, not measured."""
NUM_HASH_THREADS = 4
"""Threads that hash files, as `weight_cache.READERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A model folder, packed for some settings by the kernels of one instruction set."""

    folder: Path
    settings: Settings
    instruction_set: str
    kernels: Path | None
    """The compiled module, if there is one."""

    def text(self, digests: Path, clock: Clock | None = None) -> str:
        """Return the key as JSON; digests of files are stored in the folder `digests`.

        Raises OSError and CheckpointError where the files cannot be read.
        """
        files = self.files
        clock = clock or SystemClock()
        with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
            hashes = list(pool.map(lambda path: content_digest(path, digests, clock), files))
        return self._text([[path.name, one] for path, one in zip(files, hashes, strict=True)])

    def text_of_files(self) -> str:
        """Return the key with paths and identities of the files in place of digests.

        It needs no hashing, and is enough for engines that start at one time. Raises OSError and
        CheckpointError.
        """
        return self._text([[str(path.resolve()), identity(path)] for path in self.files])

    @property
    def files(self) -> list[Path]:
        """All files that the bytes depend on."""
        kernels = [] if self.kernels is None else [self.kernels]
        return [*model_files(self.folder), *kernels]

    def _text(self, files: list[Any]) -> str:
        quantization = self.settings.quantization
        facts = {
            "version": __version__,
            "layout": LAYOUT_VERSION,
            "instruction_set": self.instruction_set,
            "dtype": self.settings.dtype,
            "formats": [[pattern, asdict(format)] for pattern, format in quantization.formats],
            "profile": Path(quantization.profile).name,
            "files": files,
        }
        return json.dumps(facts, sort_keys=True)


def text_of_drafter(model: Path) -> str:
    """Return the key, as `Key.text_of_files`, of Medusa heads or EAGLE layer in the folder."""
    files = [path for name in (MEDUSA_FILE, EAGLE_FILE) if (path := model / name).is_file()]
    return json.dumps([[str(path.resolve()), identity(path)] for path in files])


def model_files(model: Path) -> list[Path]:
    """Return the files that the weights of a model depend on. Raises CheckpointError."""
    if is_gguf(model):
        return find_files(model)
    configs = [path for name in OLD_CONFIGS if (path := model / name).is_file()]
    return [model / "config.json", *configs, *find_files(model)]


def content_digest(path: Path, digests: Path, clock: Clock) -> str:
    """Return the SHA-256 of a file; the stored digest is used while the file is unchanged."""
    path = path.resolve()
    note = digests / (hashlib.sha256(bytes(path)).hexdigest() + ".json")
    before = identity(path)
    known = read_digest(note, before)
    if known is not None:
        return known
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    changed_s = max(before[1:3]) / 1e9
    if identity(path) == before and changed_s < clock.wall_s() - MTIME_SETTLED_S:
        write_digest(note, before, digest)
    return digest


def identity(path: Path) -> list[int]:
    """Return size, times of change in ns, inode and device."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def read_digest(note: Path, of: list[int]) -> str | None:
    """Return the digest in `note` for a file of this identity, None for another file."""
    try:
        with open_private(note) as file:
            content = json.loads(file.read())
        if content["identity"] == of and len(bytes.fromhex(content["sha256"])) == 32:
            return str(content["sha256"])
    except (OSError, *MALFORMED):
        pass
    return None


def write_digest(note: Path, of: list[int], digest: str) -> None:
    """Write `note` and remove the oldest beyond MAX_REMEMBERED_DIGESTS; errors are ignored."""
    try:
        make_private_folder(note.parent)
        handle, name = tempfile.mkstemp(".part", dir=note.parent)
        with open(handle, "w") as file:
            json.dump({"identity": of, "sha256": digest}, file)
        os.replace(name, note)
        notes = sorted(note.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in notes[:-MAX_REMEMBERED_DIGESTS]:
            old.unlink(missing_ok=True)
    except OSError:
        pass


def make_private_folder(folder: Path) -> None:
    """Create a folder that is private to the user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        folder.chmod(0o700)


def open_private(path: Path) -> Any:
    """Open a file for reading. Raises OSError unless it is regular and only this user may write."""
    file = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(file.fileno())
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        file.close()
        raise PermissionError(f"{path} is not this user's alone")
    return file
