"""Rows of the gateway's file for cascades, holds and task classes.

models:
  - name: chat
    upstreams: [big]
    cascade: {cheap: small, evidence: chat.evidence.json, checks: [margin], within: 20s}
  - {name: small, upstreams: [little]}
tasks:
  - {name: sort, matches: "smallest first"}        # for requests without a task class
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from headway.core.errors import UsageError
from headway.core.slo import parse_duration

Check = Literal["margin", "agree", "scorer", "judge"]
MAX_MATCHED = 4096
"""Characters of the last message that a rule searches."""


class CascadeRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cascade of a model row: ask the route `cheap` first, where the evidence allows it.

    `checks` decide in addition to validity: `scorer` is the URL for the check of that name, `judge`
    the model row for the other. Evidence expires after `days`.
    """

    cheap: str
    evidence: str
    checks: tuple[Check, ...] = ("margin",)
    within: str = "20s"
    days: float = 30.0
    scorer: str = ""
    judge: str = ""

    @property
    def within_s(self) -> float:
        return parse_duration(self.within, "within")

    def __post_init__(self) -> None:
        if not self.cheap or not self.evidence:
            raise ValueError("cascade.cheap and cascade.evidence must be there")
        if not 0 < self.days <= 3650:
            raise ValueError("cascade.days must be between 0 and 3650")
        for check, given in (("scorer", self.scorer), ("judge", self.judge)):
            if (check in self.checks) != bool(given):
                raise ValueError(f"cascade.{check} must be set if and only if checks has it")
        if self.scorer:
            check_url("cascade.scorer", self.scorer)
        check_duration("cascade.within", self.within)


class TaskRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Task class of a request that names none: `matches` is searched in its last message."""

    name: str
    matches: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.matches)
        except re.error as error:
            raise ValueError(f"matches is no regular expression: {error}") from None


class HoldRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold-back of the answers of a model row: parts of `size` tokens where `by` is tokens.

    `late` says what happens to a part that is not scored in time.
    """

    scorer: str
    by: Literal["sentence", "tokens", "whole"] = "sentence"
    size: int = 32
    least: float = 0.5
    within: str = "2s"
    late: Literal["stop", "publish"] = "stop"

    @property
    def within_s(self) -> float:
        return parse_duration(self.within, "within")

    def __post_init__(self) -> None:
        check_url("hold.scorer", self.scorer)
        check_duration("hold.within", self.within)
        if not 1 <= self.size <= 100_000:
            raise ValueError("hold.size must be between 1 and 100000")


def task_class_of(rules: tuple[TaskRule, ...], text: str) -> str | None:
    """Return the name of the first rule that matches; None if none does."""
    text = text[:MAX_MATCHED]
    return next((rule.name for rule in rules if re.search(rule.matches, text)), None)


def check_url(field: str, url: str) -> None:
    """Raise ValueError if the URL is not an HTTP address."""
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError(f"{field} {url[:80]!r} is no address; write http://host:9000/score")


def check_duration(field: str, text: str) -> None:
    """Raise ValueError if the text is not a check_duration."""
    try:
        parse_duration(text, field)
    except UsageError as error:
        raise ValueError(f"{error.cause} {error.fix}") from None


def evidence_path(row: CascadeRow, file: Path) -> Path:
    """Return the path of the evidence, relative to the gateway's file."""
    return file.parent / Path(row.evidence).expanduser()
