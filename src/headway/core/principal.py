"""Who asks: a name, a class of service, and a salt that keeps caches apart.

The keyring makes one of each key; every request carries it from the server into the engine.
"""

import hashlib
from functools import lru_cache

import msgspec

ANONYMOUS = "anonymous"
KEY_BYTES, USER_BYTES = 12, 22
"""Bytes at the beginning of a block's owner that all of one key share, and all of one user."""


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """Who asks: the key's name, the service class and the salt of its prefix-cache blocks."""

    name: str = ANONYMOUS
    service_class: str = "standard"
    cache_salt: str = ""
    cache_owner: str = ""
    """Whose the blocks are, whatever salts are mixed in: "KEY", or "KEY USER" of a gateway."""

    def salted(self, salt: str | None) -> "Principal":
        """The same, with `salt` of the request mixed into its own: within one key's blocks it keeps
        apart what was sent with another, and reaches nobody else's."""
        if salt is None:
            return self
        own = hashlib.sha256(self.cache_salt.encode()).digest()
        mixed = hashlib.sha256(own + salt.encode("utf-8", "surrogatepass")).hexdigest()
        return msgspec.structs.replace(self, cache_salt=mixed)

    def block_owner(self) -> bytes:
        """The 32 bytes that its KV blocks are known by: KEY_BYTES for its key, more for the user
        of a gateway's key, up to USER_BYTES, and the rest for the salt."""
        return block_owner(self.cache_owner, self.cache_salt)


@lru_cache(maxsize=4096)
def block_owner(cache_owner: str, cache_salt: str) -> bytes:
    """As `Principal.block_owner` says."""
    key, _, user = cache_owner.partition(" ")
    sizes = (KEY_BYTES, USER_BYTES - KEY_BYTES, 32 - USER_BYTES)
    hashed = [
        hashlib.sha256(part.encode("utf-8", "surrogatepass")) for part in (key, user, cache_salt)
    ]
    return b"".join(each.digest()[:size] for each, size in zip(hashed, sizes, strict=True))
