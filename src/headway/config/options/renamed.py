"""Renamed options: the old name works for one version more, with a line of warning.

    --speculate lookup,draft      is      --speculative-method ngram,draft

The old name has the meaning, units and bounds of the new one, on the command line, in a `--config`
file, as a variable of the environment and as an argument of `LLM`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway.config.options.field import flag_name
from headway.core.errors import UsageError

LAST_VERSION = "0.3"
"""The last version in which the old names work."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenamedOption:
    """An option's old name and its name; `values` maps old words of its value to those of today."""

    old: str
    new: str
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def convert(self, value: Any) -> Any:
        """Return the value in today's words: "lookup, draft" → "ngram,draft"."""
        if not self.values or not isinstance(value, str):
            return value
        words = [word.strip() for word in value.split(",")]
        return ",".join(self.values.get(word, word) for word in words)


RENAMED_OPTIONS = (
    RenamedOption(
        old="speculate",
        new="speculative_method",
        values={"lookup": "ngram", "suffixes": "suffix", "forced": "grammar"},
    ),
    RenamedOption(old="max_drafts", new="num_speculative_tokens"),
    RenamedOption(old="kv_ungated", new="allow_unverified_kv"),
)


def list_renamed(names: Iterable[str]) -> list[RenamedOption]:
    """Return the rows whose option is one of `names`."""
    known = frozenset(names)
    return [row for row in RENAMED_OPTIONS if row.new in known]


def rename_options(
    given: Mapping[str, Any],
    rows: Iterable[RenamedOption],
    warn: Callable[[str], None],
    spell: Callable[[str], str] = flag_name,
    place: str = "",
) -> dict[str, Any]:
    """Return `given` (name → value) with old names replaced, and warn of each.

    `spell` writes a name as it stands in its place, `place` is written before it. Raises UsageError
    where both names are given.
    """
    options = dict(given)
    for row in rows:
        if row.old not in options:
            continue
        if row.new in options:
            raise UsageError(
                f"{place}{spell(row.old)} is the old name of {spell(row.new)}, and both are given.",
                f"Keep {spell(row.new)}.",
            )
        value = options.pop(row.old)
        options[row.new] = row.convert(value)
        warn(place + describe(row, value, spell))
    return options


def describe(row: RenamedOption, value: Any, spell: Callable[[str], str]) -> str:
    """Return the line of warning for one old name, with the value where its words changed."""
    old, new, text = spell(row.old), spell(row.new), "".join(str(value).split())
    if row.convert(text) != text:
        old, new = f"{old} {text}", f"{new} {row.convert(text)}"
    return f"{old} is {new} now; the old name works in {LAST_VERSION}."
