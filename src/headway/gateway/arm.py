"""One request's arm of a rollout: which upstreams it may ask first, and what it says of them."""

from collections.abc import Collection
from typing import Any

import msgspec

from headway.edge.conforms import misfit
from headway.gateway.config import ModelRow
from headway.gateway.dialects import Usage
from headway.gateway.rollout import Rollout, Sample
from headway.gateway.upstream import Upstream

UNTOLD = ("left",)
"""Outcomes of an attempt that say nothing of its upstream."""
IDENTITIES = ("prompt_cache_key", "conversation", "user", "safety_identifier")
"""Fields that keep a caller's requests in one arm."""
Arm = tuple[Rollout, bool]
"""The rollout, and whether the canary answers."""


def arm_of(rollout: Rollout | None, raw: dict[str, Any], owner: str, request_id: str) -> Arm | None:
    """The arm of a request; what goes on from a stored response has none."""
    if rollout is None or raw.get("previous_response_id") is not None:
        return None
    names = [raw[name] for name in IDENTITIES if isinstance(raw.get(name), str)]
    return rollout, rollout.takes(f"{owner}\0{names[0] if names else request_id}")


def barred(
    arm: Arm | None, route: ModelRow, upstreams: Collection[Upstream]
) -> list[set[Upstream]]:
    """Whom a request must not ask, in the order of trying.

    The control never asks the canary; the canary's requests ask the others where it fails them.
    """
    if arm is None or arm[0].row.model != route.name:
        return [set()]
    canary = {each for each in upstreams if each.name in arm[0].row.canary}
    return [set(upstreams) - canary, set()] if arm[1] else [canary]


def tell(
    arm: Arm,
    upstream: Upstream,
    outcome: str,
    *,
    usage: Usage,
    seconds: float,
    ttft_s: float | None,
    dollars: float | None,
    invalid: bool | None,
) -> None:
    """The first attempt of a request is over; a canary that nobody could ask has failed."""
    rollout, canary = arm
    if outcome in UNTOLD:
        return
    error = outcome != "ok" or (canary and upstream.name not in rollout.row.canary)
    if error:
        missed = True if rollout.slo is not None else None
        rollout.add(canary, Sample(error=True, missed=missed))
        return
    missed, count = None, usage.output
    if rollout.slo is not None:
        rest = (seconds - ttft_s) / (count - 1) if ttft_s is not None and count > 1 else None
        missed = bool(rollout.slo.missed(ttft_s, rest, None, seconds))
    rollout.add(
        canary,
        Sample(
            error=False,
            missed=missed,
            token_s=seconds / count if count else None,
            invalid=invalid,
            dollars=dollars,
        ),
    )


def is_invalid(raw: dict[str, Any], text: str) -> bool | None:
    """Whether a chat's text breaks the form that was asked for; None where none was."""
    response_format = raw.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("json_object", "json_schema"):
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return True
    if kind == "json_object":
        return not isinstance(value, dict)
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return misfit(value, schema.get("schema") if isinstance(schema, dict) else None) is not None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class _Whole(msgspec.Struct):
    choices: list[_Choice] = []


def whole_text(data: bytes) -> str:
    """The text of a whole chat's first choice, "" where there is none."""
    try:
        choices = msgspec.json.decode(data, type=_Whole).choices
    except msgspec.MsgspecError:
        return ""
    return choices[0].message.content or "" if choices else ""
