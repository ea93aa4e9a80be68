"""Keys of blocks of tokens: links of a SHA-256 chain from the first token on.

    key(-1) = sha256(salt, adapter, rope)   key(i) = sha256(key(i - 1) ‖ tokens of block i as int32)

A partially filled block has a key of the same form over the tokens that it holds.

Equal keys mean equal prefixes of one salt, one adapter and one scaling of RoPE
(`RopeSpec.scaled_len`). Without the salt a key can neither be computed nor met by chance.
"""

import struct
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

TOKEN_BYTES = 4
"""Bytes of a packed token id."""


class Chain:
    """Keys of one sequence's full blocks, each computed at its first use."""

    __slots__ = ("_block_size", "_pack", "_packed", "_tokens", "cached_hit", "keys", "root")

    def __init__(self, tokens: list[int], root: bytes, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._pack = packer(block_size)
        self.root = root
        self.keys: list[bytes] = []
        self._packed: list[bytes] = []
        """Packed tokens of each block in `keys`."""
        self.cached_hit: tuple[Any, Any] | None = None
        """Last query of the prefix cache, and its hit."""

    def key(self, index: int) -> bytes:
        """Return the key of block `index`, all of whose tokens are known; -1 is the root."""
        if index < 0:
            return self.root
        keys, size, tokens, pack = self.keys, self._block_size, self._tokens, self._pack
        before = keys[-1] if keys else self.root
        for begin in range(len(keys) * size, (index + 1) * size, size):
            own = pack(*tokens[begin : begin + size])
            before = sha256(before + own).digest()
            keys.append(before)
            self._packed.append(own)
        return keys[index]

    def part(self, index: int, count: int) -> bytes:
        """Return the key of the first `count` tokens of block `index`; for all, its own key."""
        if count == self._block_size:
            return self.key(index)
        begin = index * self._block_size
        return sha256(self.key(index - 1) + packed(self._tokens[begin : begin + count])).digest()

    def cut(self, num_tokens: int) -> None:
        """Drop the keys of tokens from `num_tokens` on, because they may change."""
        self.cached_hit = None
        count = num_tokens // self._block_size
        del self.keys[count:], self._packed[count:]

    def links(self, begin: int, end: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Return (key, parent key, packed tokens) of the full blocks `begin` … `end` - 1."""
        self.key(end - 1)
        keys = self.keys
        before = keys[begin - 1 : end - 1] if begin else [self.root, *keys]
        return zip(keys[begin:end], before, self._packed[begin:end])

    def link(self, index: int, count: int) -> tuple[bytes, bytes, bytes]:
        """Return (key, parent key, packed tokens) of the first `count` tokens of block `index`."""
        begin, key = index * self._block_size, self.part(index, count)
        return key, self.key(index - 1), packed(self._tokens[begin : begin + count])


def packed(tokens: list[int]) -> bytes:
    """Pack token ids as little-endian int32, the form that keys are computed of.

    >>> packed([1, 2])
    b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00'
    """
    return packer(len(tokens))(*tokens)


@cache
def packer(block_size: int) -> Callable[..., bytes]:
    """Return a function that packs `block_size` ids as little-endian int32."""
    return struct.Struct(f"<{block_size}i").pack


@lru_cache(maxsize=4096)
def root_key(salt: str, adapter: str, scaled_len: int | None = None) -> bytes:
    """Return the root key of the chains of one salt, one adapter and one scaling of RoPE.

    `scaled_len` is None if the scaling does not depend on lengths.
    """
    names = (salt, adapter) if scaled_len is None else (salt, adapter, f"rope {scaled_len}")
    parts = (part.encode("utf-8", "surrogatepass") for part in names)
    return sha256(b"".join(sha256(part).digest() for part in parts)).digest()
