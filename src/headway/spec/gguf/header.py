"""The header of a GGUF file: metadata, and where each tensor lies.

Nothing is believed: a count, a length or an offset is compared with what is left of the file before
anything is made of it, and a file may not ask for more than the limits below. Numbers are little
endian.

    GGUF | version, 4 bytes | tensors, 8 | pairs, 8 | pairs: key, type, value |
    tensors: name, dims, type, offset | zeros up to the alignment | numbers of the tensors

A key or text is its length in 8 bytes, then UTF-8; an array is the type of its items, their
number in 8 bytes, then the items.

A model split by `llama-gguf-split` is named by its first file, MODEL-00001-of-00003.gguf: the
others lie beside it, each with its number and the count in `split.no` and `split.count`.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.core.regular_file import open_regular
from headway.spec.gguf.types import TYPES, NumberType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_HEADER_BYTES = 1 << 26
MOST_PAIRS = 1 << 14
MOST_TENSORS = 1 << 17
MOST_TEXTS = 1 << 20
"""Texts in all arrays of a file together: 262,144 tokens and 514,906 merges are the most seen."""
MOST_NUMBERS = 1 << 22
MOST_ALIGNMENT = 1 << 16
MOST_DIMS = 4
MOST_NAME = 64
"""Bytes that llama.cpp keeps of a tensor's name, the zero at its end included."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MOST_SPLITS = 1000
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Type of a value → its letter for `struct`."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its file, number format, shape as torch has it (rows first), and bytes."""

    path: Path
    type: NumberType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata of the first file and tensors of all; texts of an array are bytes, odd ones too."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(model: Path) -> bool:
    """Whether a user who names `model` means a GGUF file."""
    return model.suffix.lower() == ".gguf" and not model.is_dir()


def split_files(path: Path) -> list[Path]:
    """Return the files of a model that a file named `path` begins, in order: itself alone mostly.

    Raises UnsupportedModelError for the name of a later file.

    >>> [each.name for each in split_files(Path("m-00001-of-00002.gguf"))]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    base, number, count, suffix = name.groups()
    if not 1 <= int(count) <= MOST_SPLITS:
        return [path]
    files = [
        path.with_name(f"{base}-{at:05}-of-{count}{suffix}") for at in range(1, int(count) + 1)
    ]
    if int(number) != 1:
        raise UnsupportedModelError(
            f"{path.name} is a later file of a split model.", f"Name the first one: {files[0].name}"
        )
    return files


def read_header(path: Path) -> Header:
    """The header of the model that begins with `path`, remembered while its files are unchanged.

    Raises CheckpointError for a file that contradicts itself or is missing, UnsupportedModelError
    for one that is well and not read here.
    """
    files = [each.resolve() if each.is_symlink() else each for each in split_files(path)]
    try:
        facts = [each.stat() for each in files]
        identities = tuple((each.st_size, each.st_mtime_ns, each.st_ino) for each in facts)
        return _read(tuple(each.absolute() for each in files), identities)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no file {error.filename}.", "Check the path.") from error
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error.strerror or error}.", "Check the file."
        ) from error


@lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], identities: tuple[tuple[int, ...], ...]) -> Header:
    first, *others = (read_file(path, facts[0]) for path, facts in zip(files, identities))
    check_split(first, 0, len(files))
    for number, header in enumerate(others, 1):
        check_split(header, number, len(files))
        if twice := first.tensors.keys() & header.tensors.keys():
            raise damaged(header.path, f"has {shown(min(twice))} of an earlier file again")
        first.tensors.update(header.tensors)
    promised = first.metadata.get("split.tensors.count", len(first.tensors))
    if others and promised != len(first.tensors):
        raise damaged(
            first.path, f"promises {promised} tensors; its files have {len(first.tensors)}"
        )
    return first


def read_file(path: Path, size: int) -> Header:
    """The header of one file of `size` bytes; the errors of `read_header`."""
    with open_regular(path) as file:
        if not size:
            raise damaged(path, "is empty")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with memory:
        return Reader(path, memory).header()


def check_split(header: Header, number: int, count: int) -> None:
    """Raise unless the header is that of file `number`, from 0, of `count` files."""
    stated = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1
    if stated == (number, count):
        return
    if count == 1:
        raise UnsupportedModelError(
            f"{header.path.name} is one of {shown(stated[1])} files of a split model, and its name "
            "does not tell the others.",
            "Name the files MODEL-00001-of-00002.gguf, MODEL-00002-of-00002.gguf …, as they were.",
        )
    metadata = f"file {shown(stated[0])} of {shown(stated[1])} by its metadata"
    raise damaged(header.path, f"is {metadata}, and {number} of {count} by its name (from 0)")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file that contradicts itself."""
    return CheckpointError(
        f"{path.name} {what}.", "Copy the file again: it is truncated, damaged or not GGUF."
    )


class Reader:
    """A place in the file's bytes that only moves forward, and never beyond what is there."""

    def __init__(self, path: Path, memory: mmap.mmap | bytes) -> None:
        self._path, self._memory = path, memory
        self._size = len(memory)
        self._end = min(self._size, MOST_HEADER_BYTES)
        self._at = 0
        self._texts = self._numbers = 0

    def header(self) -> Header:
        """All of it; the errors of `read_header`."""
        version, num_tensors, num_pairs = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text("a key of its metadata")
            if key in metadata:
                raise self._wrong(f"has the key {shown(key)} twice")
            metadata[key] = self._value(key)
        tensors: dict[str, tuple[NumberType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._text("the name of a tensor")
            if name in tensors or not 0 < len(name.encode()) < MOST_NAME:
                raise self._wrong(f"has a tensor {shown(name)!r} twice or without a fit name")
            tensors[name] = self._tensor(name)
        return Header(self._path, version, metadata, self._placed(tensors, metadata))

    # ── pieces of the header ────────────────────────────────────────────────────────────────

    def _counts(self) -> tuple[int, int, int]:
        """(version, tensors, pairs of metadata)."""
        if self._take(4, "its first bytes") != MAGIC:
            raise self._wrong("does not begin as GGUF does")
        (version,) = self._unpack("I", "its version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, *VERSIONS):
                raise UnsupportedModelError(
                    f"{self._path.name} is big-endian GGUF, which is not read.",
                    "Take the little-endian file of the same model, or convert it with "
                    "gguf_convert_endian.py of llama.cpp.",
                )
            raise UnsupportedModelError(
                f"{self._path.name} is GGUF of version {version}, which is not read.",
                f"Read are the versions {' and '.join(map(str, VERSIONS))}; convert the model "
                "again.",
            )
        num_tensors, num_pairs = self._unpack("QQ", "its counts")
        self._fits(num_tensors, 33, MOST_TENSORS, "tensors")
        self._fits(num_pairs, 13, MOST_PAIRS, "pairs of metadata")
        return version, num_tensors, num_pairs

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("I", key)
        if kind == STRING:
            return self._text(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self._wrong(f"has a value of type {kind} in {shown(key)}; there is none such")
        (value,) = self._unpack(SCALARS[kind], key)
        return shortest(value) if SCALARS[kind] == "f" else value

    def _array(self, key: str) -> list[Any]:
        kind, count = self._unpack("IQ", key)
        if kind == STRING:
            self._texts += count
            self._fits(count, 8, MOST_TEXTS - (self._texts - count), f"texts in {shown(key)}")
            return self._texts_of(count, key)
        if kind not in SCALARS:
            raise self._wrong(f"has an array of type {kind} in {shown(key)}, which is not read")
        self._numbers += count
        size = struct.calcsize(f"<{SCALARS[kind]}")
        self._fits(count, size, MOST_NUMBERS - (self._numbers - count), f"items in {shown(key)}")
        return list(self._unpack(f"{count}{SCALARS[kind]}", key))

    def _texts_of(self, count: int, key: str) -> list[bytes]:
        """`count` texts as bytes: a quarter of a million are read in a tenth of a second."""
        memory, at, end = self._memory, self._at, self._end
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            if start > end:
                raise self._short(key)
            at = start + length_at(memory, at)[0]
            if at > end:
                raise self._short(key)
            texts.append(memory[start:at])
        self._at = at
        return texts

    def _tensor(self, name: str) -> tuple[NumberType, tuple[int, ...], int]:
        """(format, shape, offset behind the header)."""
        (dims,) = self._unpack("I", name)
        if not 1 <= dims <= MOST_DIMS:
            raise self._wrong(f"has {dims} dimensions in {shown(name)}")
        shape = self._unpack(f"{dims}Q", name)[::-1]
        kind, offset = self._unpack("IQ", name)
        if kind not in TYPES:
            raise UnsupportedModelError(
                f"{self._path.name}: {shown(name)} is of a type with the number {kind}, which is "
                "unknown here.",
                f"Known are: {', '.join(each.name for each in TYPES.values())}.",
            )
        type = TYPES[kind]
        if not all(shape) or shape[-1] % type.block or math.prod(shape) >> 48:
            raise self._wrong(f"has the shape {list(shape)} in {shown(name)}, of {type.name}")
        return type, shape, offset

    def _placed(
        self, tensors: dict[str, tuple[NumberType, tuple[int, ...], int]], metadata: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        """Where each tensor lies; they neither overlap nor leave the file."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_power = isinstance(alignment, int) and alignment > 0 and alignment.bit_count() == 1
        if not is_power or alignment > MOST_ALIGNMENT:
            raise self._wrong(f"has the alignment {shown(alignment)}, which is no power of two")
        first = -(-self._at // alignment) * alignment
        placed = {}
        for name, (type, shape, offset) in tensors.items():
            begin = first + offset
            end = begin + type.bytes_of(math.prod(shape))
            if offset % alignment or end > self._size:
                raise self._wrong(
                    f"has {self._size} bytes, and {shown(name)} lies at {begin} to {end}"
                )
            placed[name] = TensorInfo(self._path, type, shape, begin, end)
        for before, after in pairwise(sorted(placed.values(), key=lambda info: info.begin)):
            if after.begin < before.end:
                raise self._wrong("has tensors that lie upon each other")
        return placed

    # ── bytes ───────────────────────────────────────────────────────────────────────────────

    def _take(self, count: int, what: str) -> bytes:
        if count > self._end - self._at:
            raise self._short(what)
        begin, self._at = self._at, self._at + count
        return self._memory[begin : self._at]

    def _unpack(self, letters: str, what: str) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{letters}")
        return packed.unpack(self._take(packed.size, what))

    def _text(self, what: str) -> str:
        (length,) = self._unpack("Q", what)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"has text that is not UTF-8 in {shown(what)}") from None

    def _fits(self, count: int, size: int, most: int, what: str) -> None:
        """Raise unless `count` things of at least `size` bytes can follow."""
        if count > most or count * size > self._end - self._at:
            raise self._wrong(f"claims {count} {what} in {self._size} bytes")

    def _short(self, what: str) -> CheckpointError:
        if self._end < self._size:
            return self._wrong(f"has a header of more than {MOST_HEADER_BYTES >> 20} MiB")
        return self._wrong(f"ends within {shown(what)}")

    def _wrong(self, what: str) -> CheckpointError:
        return damaged(self._path, what)


def shortest(value: float) -> float:
    """The shortest decimal that is this number in fp32: 0.2199999988079071 → 0.22.

    What was written as 0.22 is read as 0.22 then, as from config.json.
    """
    packed = struct.pack("<f", value)
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3e38 and struct.pack("<f", short) == packed:
            return short
    return value


def shown(text: Any) -> str:
    """What a file says, fit for one line of an error."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:80])
