"""A JSON object out of a file, or an error that names the file."""

import json
from pathlib import Path
from typing import Any

from headway.core.errors import ModelError
from headway.core.regular_file import read_text


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
