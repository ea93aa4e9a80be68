"""What --kv-disk and --kv-disk-write say: a folder, a bound in bytes, bytes a second.

20GB             20 GB in the user's cache folder, $XDG_CACHE_HOME/headway/kv
/var/kv          10 GB in that folder
/var/kv:20GB     both
20XB             refused: a folder of that name is ./20XB
"""

import re

from headway.config.options import EngineOptions
from headway.config.options.field import parse_bytes
from headway.config.reasons import Reasons
from headway.core.errors import UsageError

DEFAULT_BYTES, LEAST_BYTES = 10 * 10**9, 10**6
SIZE = re.compile(r"[0-9.]+\s*([kmgt]i?b?|b)?", re.IGNORECASE)
LIKE_SIZE = re.compile(r"[0-9.]+\s*[a-z]{0,4}", re.IGNORECASE)
THROUGH = "through"


def plan_disk(options: EngineOptions, reasons: Reasons) -> tuple[str, int, float]:
    """(folder, bytes, bytes a second written): "" for the user's cache folder, no bytes for none,
    0 a second for no limit. Raises UsageError."""
    folder, num_bytes = read_kv_disk(options.kv_disk)
    limit = read_write_limit(options.kv_disk_write)
    if num_bytes and not options.prefix_cache:
        raise UsageError(
            "--kv-disk keeps what the prefix cache lists, and --no-prefix-cache turns that off.",
            "Leave one of them out.",
        )
    if not num_bytes and options.kv_disk_write != EngineOptions().kv_disk_write:
        raise UsageError(
            f"--kv-disk-write {options.kv_disk_write}: without --kv-disk nothing is written.",
            "Add --kv-disk 20GB, or leave it out.",
        )
    why = "no prompt and no answer reaches a disk"
    if num_bytes:
        why = f"in {folder or 'the cache folder of the user'}; it holds prompts and answers"
    reasons.choose("kv_disk", (num_bytes, why))
    return folder, num_bytes, limit if num_bytes else 0.0


def read_kv_disk(text: str) -> tuple[str, int]:
    """(folder, bytes), no bytes for none. Raises UsageError."""
    if not text:
        return "", 0
    folder, _, size = ("", "", text) if SIZE.fullmatch(text) else text.rpartition(":")
    if not SIZE.fullmatch(size) or (not folder and size != text):
        folder, size = text, ""
    if LIKE_SIZE.fullmatch(folder):
        raise UsageError(
            f"--kv-disk {text}: {folder} is neither a number of bytes nor a path.",
            f"Give bytes as 20GB, or a folder as ./{folder}.",
        )
    num_bytes = size_of(size, "--kv-disk") if size else DEFAULT_BYTES
    if num_bytes < LEAST_BYTES:
        raise UsageError(f"--kv-disk {text}: {num_bytes} bytes are too few.", "Give 1MB or more.")
    return folder, num_bytes


def read_write_limit(text: str) -> float:
    """Bytes a second; 0 for `through`. Raises UsageError."""
    if text == THROUGH:
        return 0.0
    limit = size_of(text, "--kv-disk-write")
    if limit <= 0:
        raise UsageError(
            f"--kv-disk-write {text} is no rate.", "Give bytes a second as 100MB, or through."
        )
    return float(limit)


def size_of(text: str, option: str) -> int:
    """Bytes of a text as 20GB. Raises UsageError."""
    try:
        if SIZE.fullmatch(text):
            return int(parse_bytes(text))
    except ValueError:
        pass
    raise UsageError(f"{option} {text} is no number of bytes.", "Give it as 20GB or 512MiB.")
