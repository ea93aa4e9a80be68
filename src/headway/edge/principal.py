"""Who a file or a batch belongs to: the name of the key that asks.

`AuthMiddleware` puts whom it lets in into the scope of the request. Without keys everybody is
one owner.
"""

from starlette.types import Scope

from headway.core.principal import ANONYMOUS, Principal
from headway.edge.keys import Caller


def principal_of(scope: Scope) -> Principal:
    """The caller that `AuthMiddleware` found."""
    caller: Caller | None = scope.get("caller")
    return caller.principal if caller else Principal()


def turn_of(scope: Scope) -> str:
    """Whose turn a request takes in the tokenizer pool: its key's, else its address's."""
    name = owner_of(scope)
    client = scope.get("client")
    return f"{name} at {client[0]}" if name == ANONYMOUS and client else name


def owner_of(scope: Scope) -> str:
    """The owner's name."""
    return principal_of(scope).name
