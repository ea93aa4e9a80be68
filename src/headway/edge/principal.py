"""Owner of a file or a batch: the name of the request's key.

`AuthMiddleware` stores the caller in the scope of the request. Without keys all clients are one
owner.
"""

from starlette.types import Scope

from headway.core.principal import ANONYMOUS, Principal
from headway.edge.keys import Caller


def principal_of(scope: Scope) -> Principal:
    """Return the principal of the caller that `AuthMiddleware` found."""
    caller: Caller | None = scope.get("caller")
    return caller.principal if caller else Principal()


def turn_of(scope: Scope) -> str:
    """Return the user of a request for turns in pools: its key, else its address."""
    name = owner_of(scope)
    client = scope.get("client")
    return f"{name} at {client[0]}" if name == ANONYMOUS and client else name


def owner_of(scope: Scope) -> str:
    """Return the owner's name."""
    return principal_of(scope).name
