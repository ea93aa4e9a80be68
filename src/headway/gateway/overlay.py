"""Overlay file of `headway gateway rollout`, next to the gateway's file, which stays as it is.

gateway.yaml             upstreams: [a]   models: [{name: chat, upstreams: [a]}]
gateway.rollouts.yaml    upstreams: [c]   rollouts: [{name: r, model: chat, canary: [c]}]
combined                 chat has the upstreams a and c, and c is the canary
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.core.errors import UsageError
from headway.core.yaml_file import read_yaml

FIX_HINT = "headway gateway rollout writes it; take it away where no rollout runs."
Rows = list[dict[str, Any]]


class Named(msgspec.Struct):
    """Upstream row of a canary, as far as this module reads it."""

    name: str


class OverlayTrial(msgspec.Struct):
    """Rollout row, as far as this module reads it."""

    name: str
    model: str
    canary: list[str]


class OverlayContent(msgspec.Struct):
    """Content of the overlay file, as far as this module reads it."""

    upstreams: list[Named]
    rollouts: list[OverlayTrial]


def overlay_path(file: Path) -> Path:
    """Return the overlay's path: gateway.yaml → gateway.rollouts.yaml."""
    return file.with_name(f"{file.stem}.rollouts{file.suffix}")


def with_overlay(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Combine the content of a gateway's file with its overlay, if there is one."""
    path = overlay_path(file)
    if not path.exists():
        return content
    more = read_rows(path)
    with suppress(TypeError, ValueError, AttributeError):  # the reader reports malformed rows
        return combine(content, more)
    return content


def combine(content: dict[str, Any], more: dict[str, Rows]) -> dict[str, Any]:
    """Combine both contents."""
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
    """Read the overlay's rows; UsageError if it contains anything else."""
    more: dict[str, Rows] = read_yaml(path, "rollouts", FIX_HINT)
    if not isinstance(more, dict) or set(more) != {"upstreams", "rollouts"}:
        raise UsageError(f"{path}: it has not upstreams and rollouts alone.", FIX_HINT)
    try:
        msgspec.convert(more, OverlayContent)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {str(error)[:300]}.", FIX_HINT) from error
    return more


def name_of(row: dict[str, Any]) -> str:
    """Return an upstream's name, with the default of the gateway's file."""
    return str(row.get("name") or urlsplit(str(row.get("url"))).netloc)


def add(file: Path, upstream: dict[str, Any], rollout: dict[str, Any]) -> None:
    """Add a canary to the overlay; an existing rollout of that model is replaced."""
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
    """Remove a rollout and its canary from the overlay."""
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
    """Write the whole file in JSON, which is YAML; delete it if no rollout is left."""
    if not rollouts:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"upstreams": upstreams, "rollouts": rollouts}, indent=1) + "\n")
    new.replace(path)
