"""What a block of tokens is known by: a link in a sha256 chain from the first token on.

    key(-1) = sha256(salt, adapter)     key(i) = sha256(key(i - 1) ‖ tokens of block i as int32)

A block that is filled in part has a key of the same form, over the tokens that it holds.

Equal keys mean equal tokens from the first on, of one salt and one adapter; who does not know the
salt can neither make a key nor meet one by chance.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import cache, lru_cache


class Chain:
    """The keys of one sequence's full blocks, each computed once, when it is asked for first."""

    __slots__ = ("_block_size", "_pack", "_tokens", "keys", "root")

    def __init__(self, tokens: list[int], root: bytes, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._pack = packer(block_size)
        self.root = root
        self.keys: list[bytes] = []

    def key(self, index: int) -> bytes:
        """The key of block `index`, all of whose tokens are known; -1 is the root."""
        if index < 0:
            return self.root
        keys, size = self.keys, self._block_size
        while len(keys) <= index:
            begin = len(keys) * size
            tokens = self._pack(*self._tokens[begin : begin + size])
            keys.append(hashlib.sha256((keys[-1] if keys else self.root) + tokens).digest())
        return keys[index]

    def part(self, index: int, count: int) -> bytes:
        """The key of the first `count` tokens of block `index`; of all of them, the block's own."""
        if count == self._block_size:
            return self.key(index)
        begin = index * self._block_size
        tokens = packer(count)(*self._tokens[begin : begin + count])
        return hashlib.sha256(self.key(index - 1) + tokens).digest()

    def cut(self, num_tokens: int) -> None:
        """Of the tokens only so many are known for sure: no key of more is kept."""
        del self.keys[num_tokens // self._block_size :]

    def link(self, index: int, count: int) -> tuple[bytes, bytes, list[int]]:
        """The key of the first `count` tokens of block `index`, that of the block before it, and
        these tokens."""
        begin, key = index * self._block_size, self.part(index, count)
        parent = self.keys[index - 1] if index else self.root
        return key, parent, self._tokens[begin : begin + count]


@cache
def packer(block_size: int) -> Callable[..., bytes]:
    """Packs so many ids as little-endian int32."""
    return struct.Struct(f"<{block_size}i").pack


@lru_cache(maxsize=4096)
def root_key(salt: str, adapter: str) -> bytes:
    """Where the chains of one salt and one adapter begin."""
    parts = (part.encode("utf-8", "surrogatepass") for part in (salt, adapter))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
