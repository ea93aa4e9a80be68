"""A text in units that can be cut out: sentences, items of a list, elements of JSON.

Joined, all units are the text again, byte for byte. JSON that is cut stays JSON.

    'Anna has a kite. Tom has none.'    'Anna has a kite.', ' Tom has none.'
    'fox: 1, cat: 2, cow: 3, bee: 4.'   'fox: 1,', ' cat: 2,', ' cow: 3,', ' bee: 4.'
    '[{"a": 1}, {"a": 2}]'              '{"a": 1}', '{"a": 2}'
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[^a-z\s])|(?<=[。！？])|\n\s*")
"""Where a sentence or a line is over."""
SEPARATOR = re.compile(r"[,;]\s+")
MIN_SEPARATORS, MAX_ITEM = 3, 48
"""A sentence with so many separators and no longer item is a list; "a fox, a cat and a cow" is
none."""
JSON_BEGINS = ("[", "{")


@dataclass(frozen=True, slots=True)
class Text:
    """A text and its units; of JSON the `document` in which the units are elements of a list, found
    by `path`."""

    whole: str
    units: list[str]
    document: Any = None
    path: tuple[str, ...] = ()

    def keep(self, kept: Sequence[bool]) -> str:
        """The text of the units for which `kept` is true, as it was where all are."""
        if all(kept):
            return self.whole
        if self.document is None:
            pairs = zip(self.units, kept, strict=True)
            left = "".join(unit for unit, stays in pairs if stays)
            left = left if kept[0] else left.lstrip()
            return left if kept[-1] else left.rstrip(" ,;")
        elements = [e for e, stays in zip(at(self.document, self.path), kept, strict=True) if stays]
        return written(put(self.document, self.path, elements), like=self.whole)


def split(text: str) -> Text:
    """The units of a text; one where nothing can go."""
    if text.lstrip().startswith(JSON_BEGINS):
        found = split_json(text)
        if found is not None:
            return found
    return Text(text, [item for each in cut(text, SENTENCE) for item in items(each)])


def cut(text: str, border: re.Pattern[str]) -> Iterator[str]:
    """Pieces that end at each border; blanks belong to the piece behind them, as in tokens."""
    start = 0
    for match in border.finditer(text):
        end = match.start() + len(match.group().rstrip())
        if text[start:end].strip() and text[end:].strip():
            yield text[start:end]
            start = end
    yield text[start:]


def items(sentence: str) -> list[str]:
    """A sentence whole, or in the items that it lists."""
    found = list(cut(sentence, SEPARATOR))
    if len(found) <= MIN_SEPARATORS or max(map(len, found[1:])) > MAX_ITEM:
        return [sentence]
    return found


# ── JSON ────────────────────────────────────────────────────────────────────────────────────


def split_json(text: str) -> Text | None:
    """The elements of the longest list of a JSON text; None where it is none, or has no list."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    path = max(lists(document), key=lambda each: len(at(document, each)), default=None)
    if path is None:
        return None
    units = [json.dumps(element, ensure_ascii=False) for element in at(document, path)]
    return Text(text, units, document, path)


def lists(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the outermost lists of two elements or more are: () or ("results", "rows")."""
    if isinstance(value, list) and len(value) > 1:
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from lists(inner, (*path, name))


def at(value: Any, path: tuple[str, ...]) -> list[Any]:
    """The list that `path` leads to."""
    for name in path:
        value = value[name]
    found: list[Any] = value
    return found


def put(value: Any, path: tuple[str, ...], elements: list[Any]) -> Any:
    """A copy of `value` with `elements` where `path` leads."""
    if not path:
        return elements
    return {**value, path[0]: put(value[path[0]], path[1:], elements)}


def written(value: Any, like: str) -> str:
    """JSON with the blanks that `like` has: on lines, spaced, or compact."""
    if "\n" in like.strip():
        return json.dumps(value, ensure_ascii=False, indent=2)
    spaced = '": ' in like or ", " in like
    return json.dumps(value, ensure_ascii=False, separators=None if spaced else (",", ":"))
