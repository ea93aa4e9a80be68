"""The models that come along, by name: `headway-tiny` is accepted wherever a folder is.

It is given what a user typed. It promises that a folder on disk wins over a name.
"""

from importlib.resources import files
from pathlib import Path

from headway.core.errors import UsageError

EMBEDDED = "headway-tiny"
"""What is served when nothing is named."""
DRAFT = "headway-draft"
"""The model that drafts for it."""
NAMES = (EMBEDDED, DRAFT)


def model_folder(given: str | Path | None) -> Path:
    """The folder a user named, an embedded model's, or without either the first one's."""
    name = EMBEDDED if given is None else str(given)
    if name not in NAMES or (given is not None and Path(given).is_dir()):
        return Path(name)
    root = Path(str(files("headway") / "embedded"))
    if not (root / name).is_dir():
        there = ", ".join(each for each in NAMES if (root / each).is_dir())
        raise UsageError(f"{name} is not embedded in this installation.", f"There are: {there}.")
    return root / name


def general_text() -> str:
    """17,000 characters of prose, dialogue, instructions, letters, code and tables in four
    languages, written for this project: what is scored where no other text is given."""
    return (files("headway") / "embedded" / "general.txt").read_text(encoding="utf-8")
