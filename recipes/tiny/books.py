"""Reads the books the model learns language from.

It is given a folder holding `train-*.txt` and `val.txt`.
It promises plain text without the names of those who typed the books.
"""

from collections.abc import Iterator
from pathlib import Path


def is_credit(paragraph: str) -> bool:
    """Whether a paragraph speaks of the transcription, as in "Produced by the team"."""
    return paragraph.startswith(("Produced by", "E-text prepared", "Transcriber", "[Transcriber"))


def clean(text: str) -> str:
    """The text without the credits."""
    return "\n\n".join(part for part in text.split("\n\n") if not is_credit(part))


def shards(folder: Path, bytes_per_shard: int, pattern: str = "train-*.txt") -> Iterator[str]:
    """The beginning of each file, cut at the end of a paragraph."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise SystemExit(f"no {pattern} in {folder}: pass a folder of books as --text")
    for path in paths:
        with path.open(encoding="utf-8", errors="ignore") as file:
            text = file.read(bytes_per_shard)
        yield clean(text[: text.rfind("\n\n")])
