"""Prefix index: which block holds the KV of which tokens, given the tokens before.

A block is found by its key, a link in the chain of its sequence's keys (`engine.chain`). Given the
keys of a sequence, `blocks_held` returns the length of its cached prefix. Worked example, blocks of
4: [1 2 3 4] [5 6 7 8] and [1 2 3 4] [5 6 9 9] are cached, and a prompt 1 2 3 4 5 6 7 1 arrives. Its
first block is found by its key. The second equals none of the two, but the newest block that
continues with 5 begins with 5 6 or 5 6 7: the prompt shares that part, and copies the block before
it writes. A partially filled block (`engine.kv.listing`) is found in the same way.
"""

from collections.abc import Container
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from headway.core.plan import NULL_BLOCK
from headway.engine.chain import TOKEN_BYTES, Chain, packed
from headway.engine.kv.eviction import EvictionQueue

Entry = TypeVar("Entry", int, bytes)
"""Entry of a block table: a block, or the key of one."""


class Cached(msgspec.Struct, eq=False, gc=False):
    """Content of one block: its key, its parent's key, its tokens, and its number of uses.

    A partially filled block starts with a fraction of one use, because it saves less. There are as
    many as blocks, so they are hidden from the garbage collector.
    """

    key: bytes
    parent: bytes
    packed: bytes
    cost: float
    owner: bytes = b""
    uses: float = 1

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def place(self) -> bytes:
        """Return its place: the parent's key and its first token (see `PrefixIndex.newest`)."""
        return self.parent + self.packed[:TOKEN_BYTES]


class PrefixIndex:
    """Key → block of one KV group, and the eviction queue of blocks without a reference.

    A key has one block: a second block with the same tokens, computed at the same time, is not
    listed. `chained` keeps a block as long as its continuations; a window group is not chained,
    because it may hold the end of a conversation without its beginning.
    """

    __slots__ = ("_chained", "_newest", "block_of", "cached", "num_changes", "queue")

    def __init__(self, num_blocks: int, policy: str, *, chained: bool = True) -> None:
        self._chained = chained
        self.block_of: dict[bytes, int] = {}
        self.cached: list[Cached | None] = [None] * num_blocks
        self.queue = EvictionQueue(policy)
        """Cached blocks without a reference."""
        self.num_changes = 0
        """Number of changes of the index; a lookup stays valid as long as it is equal."""
        self._newest: dict[bytes, bytes] = {}
        """Place → key of the newest block that was listed there."""

    def __len__(self) -> int:
        return len(self.block_of)

    def add(self, block: int, cached: Cached, *, first: bool = False) -> bool:
        """List `block`, which a sequence refers to, as `cached`, unless its key has a block.

        With `first` only if nothing is listed in its place; returns False otherwise.
        """
        key, packed = cached.key, cached.packed
        place = cached.parent + packed[:TOKEN_BYTES]
        if first and place in self._newest:
            return False
        if key not in self.block_of and self.cached[block] is None:
            self.block_of[key] = block
            self.cached[block] = cached
            self.num_changes += 1
            self._newest[place] = key
        return True

    def newest(self, place: bytes) -> Cached | None:
        """Return the newest content that continues at this place (`Cached.place`)."""
        key = self._newest.get(place)
        return None if key is None else self.cached[self.block_of[key]]

    def drop(self, block: int) -> None:
        """Unlist `block`, which is not in the queue."""
        cached = self.cached[block]
        assert cached is not None
        self.cached[block] = None
        self.num_changes += 1
        del self.block_of[cached.key]
        place = cached.place
        if self._newest.get(place) == cached.key:
            del self._newest[place]

    def released(self, block: int) -> bool:
        """Queue `block`, which has no reference any more; returns whether it is cached."""
        return not self.released_all([block])

    def released_all(self, blocks: list[int]) -> list[int]:
        """Queue blocks that have no reference any more; returns those that are not cached."""
        held, chained, queue = self.cached, self._chained, self.queue
        lost = []
        for block in blocks:
            cached = held[block]
            if cached is None:
                lost.append(block)
                continue
            parent = cached.parent if chained else None
            queue.push(cached.key, parent, cached.uses, cached.cost)
        return lost

    def evict(self) -> tuple[int, Cached]:
        """Return the block to evict and its content; it is unlisted."""
        key = self.queue.pop()
        assert isinstance(key, bytes)
        block = self.block_of[key]
        cached = self.cached[block]
        assert cached is not None
        self.drop(block)
        return block, cached

    def check_integrity(self, references: list[int]) -> None:
        """Assert that keys and blocks agree, and that the free ones are in the queue."""
        blocks, keys = list(self.block_of.values()), list(self.block_of)
        known = [cached for cached in map(self.cached.__getitem__, blocks) if cached is not None]
        assert [cached.key for cached in known] == keys, "keys and blocks differ"
        assert len(known) == len(self.cached) - self.cached.count(None), "a block has no key"
        free = [not references[block] for block in blocks]
        self.queue.check_integrity(compress(keys, free))
        for place, key in self._newest.items():
            cached = self.cached[self.block_of[key]]
            assert cached is not None and cached.place == place

    def check_table(self, table: list[int], chain: Chain, full: int, *, shared: bool) -> None:
        """Assert that a sequence's blocks are listed under its own tokens, or not at all."""
        for at, block in enumerate(table):
            cached = self.cached[block]
            if block != NULL_BLOCK and cached is not None and at < full:
                assert cached.key == chain.key(at), "a block is listed under foreign tokens"
            elif block != NULL_BLOCK and cached is not None:
                assert shared, "a listed block will be written to"


@dataclass(slots=True, kw_only=True)
class Hit:
    """Cached prefix of a sequence, `num_tokens` long: block tables by group.

    Entries before `first_live`, except a window group's sinks, are the null block. With
    `is_partial` the last block contains other tokens behind the prefix, and must be copied before
    it is written to.
    """

    num_tokens: int
    tables: list[list[int]]
    first_live: list[int]
    is_partial: bool = False
    reads: list["Read"] = field(default_factory=list)
    """Blocks of the tables that are in a lower tier; their entries are the null block."""
    restored: dict[str, int] = field(default_factory=dict)
    """Tier → tokens that its blocks save."""

    @classmethod
    def none(cls, num_groups: int) -> "Hit":
        """Return an empty hit."""
        tables: list[list[int]] = [[] for _ in range(num_groups)]
        return cls(num_tokens=0, tables=tables, first_live=[0] * num_groups)

    def num_whole(self, block_size: int) -> int:
        """Return the number of leading full blocks that are on the device."""
        return min([self.num_tokens // block_size, *[read.at for read in self.reads]])


class Tier(Protocol):
    """Place below the device's memory: the keys it holds, and the cost of a read."""

    @property
    def name(self) -> str:
        """Return its name in transfers."""
        ...

    @property
    def held(self) -> TypingSequence[Container[bytes]]:
        """Return by KV group the keys of its blocks."""
        ...

    def read_s(self, num_bytes: int) -> float:
        """Return the predicted seconds of a read."""
        ...

    def doubt(self) -> None:
        """Record that a read seemed too slow to start, so that the rate is measured again."""
        ...


class Read(NamedTuple):
    """Block of a hit that is not on the device: its group, its place in the table, its key, and its
    tier."""

    group: int
    at: int
    key: bytes
    tier: "Tier"


def blocks_held(
    chain: Chain, most: int, held_by: TypingSequence[Container[bytes]], block_size: int,
    windows: TypingSequence[int], sink_blocks: TypingSequence[int],
) -> int:  # fmt: skip
    """Return how many leading blocks, of `most`, all groups hold.

    A window group needs only what the next token sees. Blocks of 4, a window of 6: after 3 blocks
    token 12 sees 7 … 12, so blocks 1 and 2 suffice there, and those of its sinks.
    """
    count = most
    for keys, window, num_sinks in zip(held_by, windows, sink_blocks, strict=True):
        needed = min(count, num_sinks) if window else count
        held = 0
        while held < needed and chain.key(held) in keys:
            held += 1
        if held < needed:
            count = held
    settled = False
    while not settled:
        settled = True
        for keys, window in zip(held_by, windows, strict=True):
            at = count - 1
            while window and at >= first_visible(count * block_size, window) // block_size:
                if chain.key(at) not in keys:
                    count, settled = at, False
                at -= 1
    return count


def find_partial_block(
    indexes: TypingSequence[PrefixIndex],
    tokens: list[int],
    most: int,
    chain: Chain,
    count: int,
    size: int,
) -> tuple[bytes, int] | None:
    """Return (key, shared tokens) of a block after the first `count` that begins as `tokens` do.

    At most `most` of `tokens` are matched. If the tokens end with the block, the whole block is
    taken: its last token is computed anew.
    """
    rest = tokens[count * size : min((count + 1) * size, most)]
    if not rest:
        return None
    key = None
    if (count + 1) * size == len(tokens):
        key = chain.key(count)
    if key is None or key not in indexes[0].block_of:
        newest = indexes[0].newest(chain.key(count - 1) + packed(rest[:1]))
        if newest is None:
            return None
        key, rest = newest.key, rest[: common_tokens(packed(rest), newest.packed)]
    held = all(key in index.block_of for index in indexes)
    return (key, len(rest)) if held and is_worth_copying(len(rest), size) else None


def find_partial_below(
    chain: Chain, at: int, most: int, held_by: TypingSequence[Container[bytes]], block_size: int
) -> tuple[bytes, int] | None:
    """Return (key, tokens) of the fullest partial block at this place that all groups hold, with at
    most `most` tokens."""
    for count in range(min(most, block_size - 1), 0, -1):
        if not is_worth_copying(count, block_size):
            break
        key = chain.part(at, count)
        if all(key in keys for keys in held_by):
            return key, count
    return None


def is_worth_copying(count: int, block_size: int) -> bool:
    """Return whether a partial block is worth its copy, which costs as much as computing a few
    tokens: 4, or a quarter of a small block."""
    return 4 * count >= min(block_size, 16)


def first_visible(position: int, window: int) -> int:
    """Return the first token that the token at `position` sees."""
    return max(0, position - window + 1) if window else 0


def live_of(table: list[Entry], first_live: int, num_sinks: int) -> list[Entry]:
    """Return the entries of `table` that were not released: the first `num_sinks`, and those from
    `first_live` on.

    >>> live_of([7, 0, 0, 4, 5], 3, 1)
    [7, 4, 5]
    """
    return table[:] if first_live <= num_sinks else table[:num_sinks] + table[first_live:]


def with_gap(blocks: list[int], first_live: int, num_sinks: int) -> list[int]:
    """Return the table whose live entries are `blocks`: the inverse of `live_of`."""
    head = min(num_sinks, first_live)
    return blocks[:head] + [NULL_BLOCK] * (first_live - head) + blocks[head:]


def common_tokens(some: bytes, more: bytes) -> int:
    """Return the length in tokens of the common prefix of two packed texts."""
    count = 0
    for one, other in zip(some, more, strict=False):
        if one != other:
            break
        count += 1
    return count // TOKEN_BYTES
