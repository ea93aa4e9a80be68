"""Arm of a rollout that a request belongs to: upstreams that it may use, and its sample."""

from collections.abc import Collection
from typing import Any

import msgspec

from headway.edge.conforms import misfit
from headway.gateway.config import GatewayModelRow
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.rollout import ArmSample, Rollout
from headway.gateway.upstream import Upstream

NO_SAMPLE_OUTCOMES = ("left",)
"""Outcomes of an attempt that carry no information about its upstream."""
IDENTITIES = ("prompt_cache_key", "conversation", "user", "safety_identifier")
"""Fields that keep the requests of one caller in one arm."""
Arm = tuple[Rollout, bool]
"""The rollout, and whether the request belongs to the canary."""


def arm_of(rollout: Rollout | None, raw: dict[str, Any], owner: str, request_id: str) -> Arm | None:
    """Return the arm of a request; one that continues a stored response has none."""
    if rollout is None or raw.get("previous_response_id") is not None:
        return None
    names = [raw[name] for name in IDENTITIES if isinstance(raw.get(name), str)]
    return rollout, rollout.is_canary(f"{owner}\0{names[0] if names else request_id}")


def excluded_upstreams(
    arm: Arm | None, route: GatewayModelRow, upstreams: Collection[Upstream]
) -> list[set[Upstream]]:
    """Return sets of upstreams that a request must not use, in the order of trying.

    A request of the control never uses the canary. A request of the canary uses the other
    upstreams after the canary failed.
    """
    if arm is None or arm[0].row.model != route.name:
        return [set()]
    canary = {each for each in upstreams if each.name in arm[0].row.canary}
    return [set(upstreams) - canary, set()] if arm[1] else [canary]


def add_attempt_sample(
    arm: Arm,
    upstream: Upstream,
    outcome: str,
    *,
    usage: UpstreamUsage,
    seconds: float,
    ttft_s: float | None,
    dollars: float | None,
    invalid: bool | None,
) -> None:
    """Add the first attempt of a request to the rollout.

    A request of the canary that no canary upstream could answer counts as an error.
    """
    rollout, canary = arm
    if outcome in NO_SAMPLE_OUTCOMES:
        return
    error = outcome != "ok" or (canary and upstream.name not in rollout.row.canary)
    if error:
        missed = True if rollout.slo is not None else None
        rollout.add(canary, ArmSample(error=True, missed=missed))
        return
    missed, count = None, usage.output
    if rollout.slo is not None:
        rest = (seconds - ttft_s) / (count - 1) if ttft_s is not None and count > 1 else None
        missed = bool(rollout.slo.missed(ttft_s, rest, None, seconds))
    rollout.add(
        canary,
        ArmSample(
            error=False,
            missed=missed,
            token_s=seconds / count if count else None,
            invalid=invalid,
            dollars=dollars,
        ),
    )


def is_invalid(raw: dict[str, Any], text: str) -> bool | None:
    """Return whether a chat's text violates its `response_format`; None without one."""
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
    """Return the text of the first choice of a whole chat, or ""."""
    try:
        choices = msgspec.json.decode(data, type=_Whole).choices
    except msgspec.MsgspecError:
        return ""
    return choices[0].message.content or "" if choices else ""
