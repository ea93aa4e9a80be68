"""Reader of YAML files that people write; a duplicate key is an error.

YAML forbids two equal keys in a mapping; PyYAML silently keeps the last, so that two lists of
`keys:` in a key file would lock out the keys of the first.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.regular_file import read_text

MALFORMED = ValueError, TypeError, LookupError, AttributeError, RecursionError
"""Exceptions of PyYAML besides its own: `!!bool x` is a KeyError, `!!int ''` an IndexError."""
MAX_BYTES, MAX_VALUES = 2**24, 10**6
"""Maximum size of a file, and of its values with aliases (`*name`) expanded."""
MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path, what: str, how: str = "") -> Any:
    """Read a YAML file; None for an empty one.

    `what` is the option that names the file, `how` the fix if it is not YAML. Raises UsageError
    with the file, and with line and key for a duplicate key.
    """
    try:
        text = read_text(path, MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise UsageError(f"{what} {path} is not YAML.", how or "It is not UTF-8.") from error
    return parse_yaml(text, f"{what} {path}", how)


def parse_yaml(text: str, where: str, how: str = "") -> Any:
    """Parse YAML text; raises UsageError, which begins with `where`."""
    import yaml  # late: start-up prints within 300 ms

    compared: set[Any] = set()

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, which also compares the keys of each mapping."""

        def construct_document(self, node: Any) -> Any:
            check_size(node, where)
            return super().construct_document(node)

        def flatten_mapping(self, node: Any) -> None:
            """Compare the keys once; PyYAML calls this again for flattened content of `<<`."""
            if node not in compared:
                compared.add(node)
                self.compare_keys(node)
            super().flatten_mapping(node)

        def compare_keys(self, node: Any) -> None:
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                if key_node.tag == MERGE:
                    continue  # `<<` may be repeated
                key = self.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if not isinstance(key, Hashable):
                    continue  # PyYAML refuses it
                if key in lines:
                    raise UsageError(
                        f"{where}, line {line}: the key {str(key)[:64]!r} is there twice, "
                        f"first in line {lines[key]}.",
                        "Keep one of the two: the second would hide the first.",
                    )
                lines[key] = line

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, *MALFORMED) as error:
        raise UsageError(f"{where} is not YAML.", how or str(error)[:200]) from error


def check_size(node: Any, where: str) -> None:
    """Raise UsageError if aliases make a node contain itself, or more than `MAX_VALUES` values.

    `a: &a [x, x]`, `b: &b [*a, *a]`, … doubles the values in each line, without more memory until
    they are visited.
    """
    sizes: dict[int, int] = {}

    def size(one: Any) -> int:
        count = sizes.get(id(one))
        if count is None:
            sizes[id(one)] = MAX_VALUES  # for one that contains itself
            value = one.value if isinstance(one.value, list) else []
            parts = [part for each in value for part in (each if type(each) is tuple else (each,))]
            count = sizes[id(one)] = 1 + sum(map(size, parts))
        return count

    if size(node) > MAX_VALUES:
        raise UsageError(
            f"{where} has more than {MAX_VALUES:,} values with its aliases, or contains itself.",
            "Write out what the aliases (*name) stand for.",
        )
