"""Who asks: a name, a class of service, and a salt that keeps caches apart.

The keyring makes one of each key; every request carries it from the server into the engine.
"""

import hashlib

import msgspec

ANONYMOUS = "anonymous"


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """Who asks: the key's name, the service class and the salt of its prefix-cache blocks."""

    name: str = ANONYMOUS
    service_class: str = "standard"
    cache_salt: str = ""

    def salted(self, salt: str | None) -> "Principal":
        """The same, with `salt` of the request mixed into its own: within one key's blocks it keeps
        apart what was sent with another, and reaches nobody else's."""
        if salt is None:
            return self
        own = hashlib.sha256(self.cache_salt.encode()).digest()
        mixed = hashlib.sha256(own + salt.encode("utf-8", "surrogatepass")).hexdigest()
        return msgspec.structs.replace(self, cache_salt=mixed)
