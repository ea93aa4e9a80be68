"""POST /cache/forget, and the KV of keys that the key file revokes.

KV blocks in memory and on disk are forgotten, and past answers from which draft tokens come. Stored
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
from headway.edge.principal import principal_of
from headway.server.models import ServerState
from headway.server.turn import read_body


class ForgetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /cache/forget: {} forgets all KV of this key.

    With `cache_salt` only the KV of that salt; an operator may name another `key`.
    """

    cache_salt: str | None = None
    key: str | None = None


async def forget_blocks(state: ServerState, request: Request) -> Response:
    """POST /cache/forget: drop the KV blocks of this key, and erase them on disk."""
    raw, _ = await read_body(state, request, ForgetBody)
    body = bodies.typed(raw, ForgetBody)
    principal = principal_of(request.scope)
    if body.key is not None:
        principal = principal_by_name(state, request.scope.get("caller"), body.key)
    forget_everywhere(state, block_owner_prefix(principal, body.cache_salt))
    shown: dict[str, Any] = {"object": "cache.forgotten", "key": principal.name}
    return json_response(shown | {"cache_salt": body.cache_salt})


def principal_by_name(state: ServerState, caller: Caller | None, name: str) -> Principal:
    """Return the principal of a key's name; RequestError for an unknown name or no operator."""
    if state.keyring and (caller is None or not caller.admin):
        raise forbidden("Another key's blocks are for the operator (admin: true in the key file).")
    owner = state.keyring.named(name) if state.keyring else None
    if owner is None:
        raise RequestError(f"There is no key {name[:64]!r}.", param="key", code="invalid_value")
    return owner.principal


def block_owner_prefix(principal: Principal, salt: str | None) -> bytes:
    """Return the prefix of the block owners: of one salt, of a user or of a key."""
    if salt is not None:
        return principal.salted(salt).block_owner()
    is_user = " " in principal.cache_owner
    return principal.block_owner()[: USER_BYTES if is_user else KEY_BYTES]


def forget_everywhere(state: ServerState, owner: bytes) -> None:
    """Drop the blocks of `owner` in every model."""
    for model in state.rows:
        model.client.forget(owner)


def forget_revoked(state: ServerState) -> None:
    """Drop the blocks of all revoked keys in every model."""
    for principal in state.keyring.revoked:
        forget_everywhere(state, block_owner_prefix(principal, None))
