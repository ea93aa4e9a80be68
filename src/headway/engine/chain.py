"""What a block of tokens is known by: a link in a sha256 chain from the first token on.

    key(-1) = sha256(salt, adapter, rope)   key(i) = sha256(key(i - 1) ‖ tokens of block i as int32)

A block that is filled in part has a key of the same form, over the tokens that it holds.

Equal keys mean equal tokens from the first on, of one salt, one adapter and one scaling of the rope
(`RopeSpec.scaled_len`); who does not know the salt can neither make a key nor meet one by chance.
"""

import struct
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

TOKEN_BYTES = 4
"""Of each that is `packed`."""


class Chain:
    """The keys of one sequence's full blocks, each computed once, when it is asked for first."""

    __slots__ = ("_block_size", "_pack", "_packed", "_tokens", "cached_hit", "keys", "root")

    def __init__(self, tokens: list[int], root: bytes, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._pack = packer(block_size)
        self.root = root
        self.keys: list[bytes] = []
        self._packed: list[bytes] = []
        """By key the tokens of its block."""
        self.cached_hit: tuple[Any, Any] | None = None
        """What was asked of the prefix cache last, and what it held."""

    def key(self, index: int) -> bytes:
        """The key of block `index`, all of whose tokens are known; -1 is the root."""
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
        """The key of the first `count` tokens of block `index`; of all of them, the block's own."""
        if count == self._block_size:
            return self.key(index)
        begin = index * self._block_size
        return sha256(self.key(index - 1) + packed(self._tokens[begin : begin + count])).digest()

    def cut(self, num_tokens: int) -> None:
        """Of the tokens only so many are known for sure: no key of more is kept."""
        self.cached_hit = None
        count = num_tokens // self._block_size
        del self.keys[count:], self._packed[count:]

    def links(self, begin: int, end: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Of each block from `begin` to `end` - 1, all full, what `link` says."""
        self.key(end - 1)
        keys = self.keys
        before = keys[begin - 1 : end - 1] if begin else [self.root, *keys]
        return zip(keys[begin:end], before, self._packed[begin:end])

    def link(self, index: int, count: int) -> tuple[bytes, bytes, bytes]:
        """The key of the first `count` tokens of block `index`, that of the block before it, and
        these tokens, `packed`."""
        begin, key = index * self._block_size, self.part(index, count)
        return key, self.key(index - 1), packed(self._tokens[begin : begin + count])


def packed(tokens: list[int]) -> bytes:
    """As keys are made of them: little-endian int32.

    >>> packed([1, 2])
    b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00'
    """
    return packer(len(tokens))(*tokens)


@cache
def packer(block_size: int) -> Callable[..., bytes]:
    """Packs so many ids as little-endian int32."""
    return struct.Struct(f"<{block_size}i").pack


@lru_cache(maxsize=4096)
def root_key(salt: str, adapter: str, scaled_len: int | None = None) -> bytes:
    """Where the chains of one salt, one adapter and one scaling of the rope begin.

    `scaled_len` is None where no scaling follows from lengths.
    """
    names = (salt, adapter) if scaled_len is None else (salt, adapter, f"rope {scaled_len}")
    parts = (part.encode("utf-8", "surrogatepass") for part in names)
    return sha256(b"".join(sha256(part).digest() for part in parts)).digest()
