"""Principal of a request: a name, a service class, and a salt that separates caches.

The keyring creates one for each key; every request carries it from the server into the engine.
"""

import hashlib
from functools import lru_cache

import msgspec

ANONYMOUS = "anonymous"
KEY_BYTES, USER_BYTES = 12, 22
"""Leading bytes of a block owner that are common to one key, and to one user of a gateway."""


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """The key's name, the service class and the salt of its prefix-cache blocks."""

    name: str = ANONYMOUS
    service_class: str = "standard"
    cache_salt: str = ""
    cache_owner: str = ""
    """Owner of the blocks, with any salt: "KEY", or "KEY USER" of a gateway."""

    def salted(self, salt: str | None) -> "Principal":
        """Return the principal with the request's `salt` mixed into its own.

        It separates requests of one key, and cannot reach blocks of another key.
        """
        if salt is None:
            return self
        own = hashlib.sha256(self.cache_salt.encode()).digest()
        mixed = hashlib.sha256(own + salt.encode("utf-8", "surrogatepass")).hexdigest()
        return msgspec.structs.replace(self, cache_salt=mixed)

    def block_owner(self) -> bytes:
        """Return the 32 bytes that identify the owner of its KV blocks.

        KEY_BYTES are the key's, up to USER_BYTES those of a gateway's user, the rest the salt's.
        """
        return block_owner(self.cache_owner, self.cache_salt)


@lru_cache(maxsize=4096)
def block_owner(cache_owner: str, cache_salt: str) -> bytes:
    """Return as `Principal.block_owner`."""
    key, _, user = cache_owner.partition(" ")
    sizes = (KEY_BYTES, USER_BYTES - KEY_BYTES, 32 - USER_BYTES)
    hashed = [
        hashlib.sha256(part.encode("utf-8", "surrogatepass")) for part in (key, user, cache_salt)
    ]
    return b"".join(each.digest()[:size] for each, size in zip(hashed, sizes, strict=True))
