"""What a key asks to be forgotten: POST /cache/forget, and revoked keys of the key file.

Keys and values go, in memory and on a disk, and past answers that guesses come from: stored
responses, files and batches have deletes of their own.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.core.principal import KEY_BYTES, USER_BYTES, Principal
from headway.edge import body as bodies
from headway.edge.auth import forbidden
from headway.edge.errors import json_response
from headway.edge.keys import Caller
from headway.edge.principal import principal_of, turn_of
from headway.server.models import State


class ForgetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /cache/forget: {} forgets all that this key has computed.

    With `cache_salt` only what was sent with that one; an operator may name another `key`.
    """

    cache_salt: str | None = None
    key: str | None = None


async def forget(state: State, request: Request) -> Response:
    """POST /cache/forget: nobody finds again the KV blocks of this key; a disk erases them."""
    raw, _ = await bodies.read_object(
        request.receive,
        state.options.max_body,
        ForgetBody,
        pool=state.pool,
        user=turn_of(request.scope),
    )
    asked = bodies.typed(raw, ForgetBody)
    principal = principal_of(request.scope)
    if asked.key is not None:
        principal = named(state, request.scope.get("caller"), asked.key)
    forget_everywhere(state, owner_of(principal, asked.cache_salt))
    shown: dict[str, Any] = {"object": "cache.forgotten", "key": principal.name}
    return json_response(shown | {"cache_salt": asked.cache_salt})


def named(state: State, caller: Caller | None, name: str) -> Principal:
    """Whom an operator names; RequestError for others, and for a name that nobody has."""
    if state.keyring and (caller is None or not caller.admin):
        raise forbidden("Another key's blocks are for the operator (admin: true in the key file).")
    found = state.keyring.named(name) if state.keyring else None
    if found is None:
        raise RequestError(f"There is no key {name[:64]!r}.", param="key", code="invalid_value")
    return found.principal


def owner_of(principal: Principal, salt: str | None) -> bytes:
    """What the owners of the blocks begin with: of one salt all of it, else of a user or a key."""
    if salt is not None:
        return principal.salted(salt).block_owner()
    is_user = " " in principal.cache_owner
    return principal.block_owner()[: USER_BYTES if is_user else KEY_BYTES]


def forget_everywhere(state: State, owner: bytes) -> None:
    """Every model drops the blocks of `owner`."""
    for model in state.rows:
        model.client.forget(owner)


def forget_revoked(state: State) -> None:
    """Every model drops the blocks of the revoked keys, whenever they were revoked."""
    for principal in state.keyring.revoked:
        forget_everywhere(state, owner_of(principal, None))
