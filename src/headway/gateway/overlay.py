"""What `headway gateway rollout` adds to a gateway's file: a file beside it, so that the file of
the operator stays as it was written.

    gateway.yaml             upstreams: [a]   models: [{name: chat, upstreams: [a]}]
    gateway.rollouts.yaml    upstreams: [c]   rollouts: [{name: r, model: chat, canary: [c]}]
    together                 chat is answered by a and c, and c is on trial
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.core.errors import UsageError
from headway.core.yaml_file import read_yaml

HOW = "headway gateway rollout writes it; take it away where no rollout runs."
Rows = list[dict[str, Any]]


class Named(msgspec.Struct):
    """A canary's row."""

    name: str


class Trial(msgspec.Struct):
    """A rollout's row."""

    name: str
    model: str
    canary: list[str]


class Content(msgspec.Struct):
    """What the file holds of its rows, as far as it is gone by here."""

    upstreams: list[Named]
    rollouts: list[Trial]


def overlay_path(file: Path) -> Path:
    """gateway.yaml → gateway.rollouts.yaml"""
    return file.with_name(f"{file.stem}.rollouts{file.suffix}")


def with_overlay(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with that of the one beside it, if there is one."""
    path = overlay_path(file)
    if not path.exists():
        return content
    more = read_rows(path)
    with suppress(TypeError, ValueError, AttributeError):  # rows that are none: the reader says so
        return joined(content, more)
    return content


def joined(content: dict[str, Any], more: dict[str, Rows]) -> dict[str, Any]:
    """Both as one file."""
    names = [name_of(row) for row in content["upstreams"]]
    canaries = {row["model"]: row["canary"] for row in more["rollouts"]}
    models = [
        {**row, "upstreams": [*(row.get("upstreams") or names), *canaries.get(row.get("name"), [])]}
        for row in content.get("models") or []
    ]
    return {
        **content,
        "upstreams": [*content["upstreams"], *more["upstreams"]],
        "models": models,
        "rollouts": [*(content.get("rollouts") or []), *more["rollouts"]],
    }


def read_rows(path: Path) -> dict[str, Rows]:
    """The rows of the file; UsageError where it holds anything else."""
    more: dict[str, Rows] = read_yaml(path, "rollouts", HOW)
    if not isinstance(more, dict) or set(more) != {"upstreams", "rollouts"}:
        raise UsageError(f"{path}: it has not upstreams and rollouts alone.", HOW)
    try:
        msgspec.convert(more, Content)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {str(error)[:300]}.", HOW) from error
    return more


def name_of(row: dict[str, Any]) -> str:
    """An upstream's name as the gateway calls it."""
    return str(row.get("name") or urlsplit(str(row.get("url"))).netloc)


def add(file: Path, upstream: dict[str, Any], rollout: dict[str, Any]) -> None:
    """Put one canary beside the file; a rollout of that model that was there is replaced."""
    path = overlay_path(file)
    there: dict[str, Rows] = {"upstreams": [], "rollouts": []}
    if path.exists():
        there = read_rows(path)
    gone = [row for row in there["rollouts"] if row["model"] == rollout["model"]]
    names = {name for row in gone for name in row["canary"]} | {upstream["name"]}
    write(
        path,
        [*(row for row in there["upstreams"] if row["name"] not in names), upstream],
        [*(row for row in there["rollouts"] if row not in gone), rollout],
    )


def remove(file: Path, name: str) -> None:
    """Take a rollout and its canary away again."""
    path = overlay_path(file)
    if not path.exists():
        return
    there = read_rows(path)
    names = {each for row in there["rollouts"] if row["name"] == name for each in row["canary"]}
    write(
        path,
        [row for row in there["upstreams"] if row["name"] not in names],
        [row for row in there["rollouts"] if row["name"] != name],
    )


def write(path: Path, upstreams: Rows, rollouts: Rows) -> None:
    """The file whole, in JSON, which is YAML; none where nothing is left."""
    if not rollouts:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"upstreams": upstreams, "rollouts": rollouts}, indent=1) + "\n")
    new.replace(path)
