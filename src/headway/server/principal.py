"""Who a file or a batch belongs to: the name of the key that asks.

The doors put who they let in into the scope of the request. Where there are no keys everybody is
one owner.
"""

from starlette.types import Scope

from headway.core.principal import Principal


def principal_of(scope: Scope) -> Principal:
    """The caller that the doors know."""
    found = scope.get("principal") or getattr(scope.get("caller"), "principal", None)
    return found if isinstance(found, Principal) else Principal()


def owner_of(scope: Scope) -> str:
    """The owner's name."""
    return principal_of(scope).name
