"""Split a text into units that can be cut out: sentences, items of a list, elements of JSON.

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
"""End of a sentence or of a line."""
SEPARATOR = re.compile(r"[,;]\s+")
MIN_SEPARATORS, MAX_ITEM = 3, 48
"""A sentence with so many separators and no longer item is a list; "a fox, a cat and a cow" is
none."""
JSON_BEGINS = ("[", "{")


@dataclass(frozen=True, slots=True)
class SplitText:
    """A text and its units; with JSON the units are the elements of the list at `path` of
    `document`."""

    whole: str
    units: list[str]
    document: Any = None
    path: tuple[str, ...] = ()

    def keep(self, mask: Sequence[bool]) -> str:
        """Return the text of the units for which `mask` is true; unchanged if all are."""
        if all(mask):
            return self.whole
        if self.document is None:
            pairs = zip(self.units, mask, strict=True)
            text = "".join(unit for unit, stays in pairs if stays)
            text = text if mask[0] else text.lstrip()
            return text if mask[-1] else text.rstrip(" ,;")
        elements = [e for e, stays in zip(at(self.document, self.path), mask, strict=True) if stays]
        return written(put(self.document, self.path, elements), like=self.whole)


def split(text: str) -> SplitText:
    """Return a text and its units; a single unit where nothing can be cut."""
    if text.lstrip().startswith(JSON_BEGINS):
        split_text = split_json(text)
        if split_text is not None:
            return split_text
    return SplitText(text, [item for each in cut(text, SENTENCE) for item in items(each)])


def cut(text: str, border: re.Pattern[str]) -> Iterator[str]:
    """Yield pieces that end at each border; blanks belong to the next piece, as in tokens."""
    start = 0
    for match in border.finditer(text):
        end = match.start() + len(match.group().rstrip())
        if text[start:end].strip() and text[end:].strip():
            yield text[start:end]
            start = end
    yield text[start:]


def items(sentence: str) -> list[str]:
    """Return the items of a list in a sentence, or the whole sentence."""
    pieces = list(cut(sentence, SEPARATOR))
    if len(pieces) <= MIN_SEPARATORS or max(map(len, pieces[1:])) > MAX_ITEM:
        return [sentence]
    return pieces


# ── JSON ────────────────────────────────────────────────────────────────────────────────────


def split_json(text: str) -> SplitText | None:
    """Return the elements of the longest list of a JSON text; None without JSON or a list."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    path = max(lists(document), key=lambda each: len(at(document, each)), default=None)
    if path is None:
        return None
    units = [json.dumps(element, ensure_ascii=False) for element in at(document, path)]
    return SplitText(text, units, document, path)


def lists(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the outermost lists of two or more elements: ("results", "rows")."""
    if isinstance(value, list) and len(value) > 1:
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from lists(inner, (*path, name))


def at(value: Any, path: tuple[str, ...]) -> list[Any]:
    """Return the list at `path`."""
    for name in path:
        value = value[name]
    elements: list[Any] = value
    return elements


def put(value: Any, path: tuple[str, ...], elements: list[Any]) -> Any:
    """Return a copy of `value` with `elements` at `path`."""
    if not path:
        return elements
    return {**value, path[0]: put(value[path[0]], path[1:], elements)}


def written(value: Any, like: str) -> str:
    """Return JSON in the layout of `like`: indented, spaced or compact."""
    if "\n" in like.strip():
        return json.dumps(value, ensure_ascii=False, indent=2)
    spaced = '": ' in like or ", " in like
    return json.dumps(value, ensure_ascii=False, separators=None if spaced else (",", ":"))
