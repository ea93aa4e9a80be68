"""Operator actions on a running gateway: reload its file, end a rollout by hand, make keys.

The routes of keys are there with `--key-api` alone. All paths here want an operator's key.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import HeadwayError, RequestError
from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.key_file import digest, make_key
from headway.gateway import ledger
from headway.gateway.incoming import read_object
from headway.gateway.made_keys import NewKey, row_of
from headway.gateway.state import GatewayState

log = logging.getLogger(__name__)

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


# ── keys ────────────────────────────────────────────────────────────────────────────────────


async def make(state: GatewayState, request: Request) -> Response:
    """POST /keys: make a key; its text is in this answer and nowhere else."""
    raw = await read_object(state, request.scope, request.receive)
    body, key, made = bodies.typed(raw, NewKey), make_key(), state.made_keys
    row = row_of(body, digest(key).hex(), state.clock.wall_s())
    async with made.changing:
        made.check_new(row, state.keyring.reserved_names, state.config.teams)
        for name in row.models:
            state.route(name)
        await store(state, ledger.ADD_KEY, row.name, msgspec.json.encode(row).decode())
        state.use_made_keys([*made.rows.values(), row])
    log.info("the key %r was made", row.name)
    return json_response({**row.public(), "key": key}, 201, {"cache-control": "no-store"})


async def store(state: GatewayState, statement: str, *values: Any) -> None:
    """Write a change to the disk; RequestError 503 if that fails, and then nothing has changed."""
    try:
        await state.ledger.store(statement, *values)
    except HeadwayError as error:
        log.error("the keys stay as they were: %s", error)
        raise RequestError("The keys cannot be stored; see the log.", status=503) from error


async def list_keys(state: GatewayState, _: Request) -> Response:
    """GET /keys: the made keys without their hashes, and the names of the others."""
    rows = [row.public() for row in state.made_keys.rows.values()]
    return json_response({"data": rows, "others": sorted(state.keyring.reserved_names)})


async def delete_key(state: GatewayState, request: Request) -> Response:
    """DELETE /keys/NAME: refuse a made key from now on."""
    name, made = request.path_params["name"], state.made_keys
    async with made.changing:
        if name not in made.rows:
            raise RequestError(
                f"No key {name[:64]!r} was made here; a key of the key file is changed there.",
                code="not_found",
                status=404,
            )
        await store(state, ledger.DELETE_KEY, name)
        state.use_made_keys(row for row in list(made.rows.values()) if row.name != name)
    log.info("the key %r was deleted", name)
    return json_response({"name": name, "deleted": True})


KEY_ROUTES: list[tuple[str, str, Callable[[GatewayState, Request], Awaitable[Response]]]] = [
    ("POST", "/keys", make),
    ("GET", "/keys", list_keys),
    ("DELETE", "/keys/{name}", delete_key),
]
