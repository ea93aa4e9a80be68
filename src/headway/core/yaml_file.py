"""YAML files that people write: read whole, and refused where a key is there twice.

YAML's own rule for a mapping with two equal keys is that there are none; PyYAML keeps the last and
says nothing, so that two lists of `keys:` in a key file would lock out the keys of the first.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.regular_file import read_text

MALFORMED = ValueError, TypeError, LookupError, AttributeError, RecursionError
"""What PyYAML raises besides its own: `!!bool x` is a KeyError, `!!int ''` an IndexError."""
MOST_BYTES, MOST_VALUES = 2**24, 10**6
"""Of a file; of its values where aliases (`*name`) stand for what they repeat."""
MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path, what: str, how: str = "") -> Any:
    """The content of a YAML file, None for an empty one.

    `what` is the option that names the file, `how` the fix where it is no YAML. Raises UsageError
    with the file, and with line and key where a key is there twice.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise UsageError(f"{what} {path} is not YAML.", how or "It is not UTF-8.") from error
    return parse_yaml(text, f"{what} {path}", how)


def parse_yaml(text: str, where: str, how: str = "") -> Any:
    """What `text` says; raises UsageError, which begins with `where`."""
    import yaml  # late: start-up prints within 300 ms

    compared: set[Any] = set()

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, which also compares the keys of each mapping."""

        def construct_document(self, node: Any) -> Any:
            check_size(node, where)
            return super().construct_document(node)

        def flatten_mapping(self, node: Any) -> None:
            """Called again for what another `<<` brings, which is flat by then: compared once."""
            if node not in compared:
                compared.add(node)
                self.compare_keys(node)
            super().flatten_mapping(node)

        def compare_keys(self, node: Any) -> None:
            seen: dict[Any, int] = {}
            for key_node, _ in node.value:
                if key_node.tag == MERGE:
                    continue  # what `<<` brings may be said again
                key = self.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if not isinstance(key, Hashable):
                    continue  # which PyYAML refuses
                if key in seen:
                    raise UsageError(
                        f"{where}, line {line}: the key {str(key)[:64]!r} is there twice, "
                        f"first in line {seen[key]}.",
                        "Keep one of the two: the second would hide the first.",
                    )
                seen[key] = line

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, *MALFORMED) as error:
        raise UsageError(f"{where} is not YAML.", how or str(error)[:200]) from error


def check_size(node: Any, where: str) -> None:
    """Raise UsageError where aliases make a node contain itself, or more than `MOST_VALUES`.

    `a: &a [x, x]`, `b: &b [*a, *a]`, … has twice as many values in each line, in no more memory
    until they are looked at.
    """
    sizes: dict[int, int] = {}

    def size(one: Any) -> int:
        found = sizes.get(id(one))
        if found is None:
            sizes[id(one)] = MOST_VALUES  # for one that contains itself
            value = one.value if isinstance(one.value, list) else []
            parts = [part for each in value for part in (each if type(each) is tuple else (each,))]
            found = sizes[id(one)] = 1 + sum(map(size, parts))
        return found

    if size(node) > MOST_VALUES:
        raise UsageError(
            f"{where} has more than {MOST_VALUES:,} values with its aliases, or contains itself.",
            "Write out what the aliases (*name) stand for.",
        )
