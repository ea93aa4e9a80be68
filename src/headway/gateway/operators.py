"""Operator actions on a running gateway: reload its file, end a rollout by hand."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import HeadwayError, RequestError
from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.gateway.incoming import read_object
from headway.gateway.state import GatewayState

STATES = {"promote": "promoted", "take_back": "rolled back"}


class Action(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rollouts/NAME."""

    action: Literal["promote", "take_back"]
    reason: str = ""

    def __post_init__(self) -> None:
        if len(self.reason) > 200 or not (self.reason.isprintable()):
            raise ValueError("reason must have at most 200 printable characters")


async def end_rollout(state: GatewayState, request: Request) -> Response:
    """Promote or roll back a rollout regardless of its evidence; the ledger keeps the reason."""
    name = request.path_params["name"]
    raw = await read_object(state, request.scope, request.receive)
    order = bodies.typed(raw, Action)
    rollouts = [each for each in state.rollouts.values() if each.row.name == name]
    if not rollouts:
        there = ", ".join(each.row.name for each in state.rollouts.values()) or "none"
        raise RequestError(
            f"There is no rollout {name[:80]!r}; there is {there}.", code="not_found", status=404
        )
    rollouts[0].set_by_operator(STATES[order.action], order.reason)
    await state.ledger.flushed()
    return json_response(rollouts[0].snapshot())


async def reload(state: GatewayState, _: Request) -> Response:
    """POST /reload without a body: reload the configuration and the keys, as SIGHUP does.

    An invalid file changes nothing and returns 400 with the reason.
    """
    if state.reload_config is None:
        raise RequestError("This gateway has no file to read again.", status=409)
    try:
        await state.read_files()
    except HeadwayError as error:
        raise RequestError(f"{error.cause} {error.fix}", code="invalid_configuration") from error
    return json_response({"upstreams": list(state.upstreams), "models": list(state.routes)})
