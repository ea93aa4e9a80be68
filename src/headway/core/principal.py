"""Who asks: a name, a class of service, and a salt that keeps caches apart.

Doors make one of each key; every request carries it from the server into the engine.
"""

import msgspec

ANONYMOUS = "anonymous"


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """Who asks: the key's name, the service class and the salt of its prefix-cache blocks."""

    name: str = ANONYMOUS
    service_class: str = "standard"
    cache_salt: str = ""
