"""Blocks in memory that another process maps: complete, stamped, and not overwritten unnoticed."""

import os
import random
from itertools import pairwise

import pytest

from headway.runtime.kvstore.arena import (
    CACHE_LINE_BYTES,
    Arena,
    ArenaPlace,
    MappedArena,
    bytes_needed,
)

ID, OTHER = b"i" * 16, b"o" * 16


@pytest.fixture
def arena():
    made = Arena(4096)
    yield made
    made.close()


def map_arena(arena: Arena) -> MappedArena:
    assert arena.handle is not None
    return MappedArena(os.dup(arena.handle), arena.size)


def take_bytes(arena: MappedArena, place: ArenaPlace, parcel_id: bytes = ID) -> bytes:
    into = bytearray(place.length)
    arena.take(parcel_id, place, memoryview(into))
    return bytes(into)


def test_a_process_that_has_the_file_reads_a_block(arena):
    place = arena.put(ID, memoryview(b"content" * 20))
    assert take_bytes(map_arena(arena), place) == b"content" * 20 == bytes(arena.view(place))


def test_a_free_place_is_used_for_another_block(arena):
    other = map_arena(arena)
    place = arena.put(ID, memoryview(b"a" * 100))
    arena.free(place)
    with pytest.raises(ValueError, match="overwritten"):
        take_bytes(other, place)
    again = arena.put(ID, memoryview(b"b" * 90))
    assert again.offset == place.offset, "a free place is used again for blocks of the same size"
    with pytest.raises(ValueError, match="overwritten"):
        take_bytes(other, place)
    assert take_bytes(other, again) == b"b" * 90


@pytest.mark.parametrize(
    "place",
    [
        ArenaPlace(4096, 8, 1),
        ArenaPlace(-64, 8, 1),
        ArenaPlace(0, 4096, 1),
        ArenaPlace(4096 - CACHE_LINE_BYTES, 1, 1),
    ],
)
def test_places_outside_the_memory_are_refused(arena, place):
    with pytest.raises(ValueError, match="outside"):
        take_bytes(map_arena(arena), place)


def test_blocks_of_another_parcel_or_length_are_refused(arena):
    place = arena.put(ID, memoryview(b"a" * 100))
    with pytest.raises(ValueError, match="overwritten"):
        take_bytes(map_arena(arena), place, OTHER)
    with pytest.raises(ValueError, match="100 bytes in place of 7"):
        map_arena(arena).take(ID, place, memoryview(bytearray(7)))


def test_memory_smaller_than_announced_is_not_mapped(arena):
    with pytest.raises(ValueError, match="smaller"):
        MappedArena(os.dup(arena.handle), arena.size + 1)


def test_blocks_never_overlap_and_the_bound_holds():
    """Puts and frees of three lengths at random: a block is unchanged until it is freed."""
    draw, arena = random.Random(1), Arena(20_000)
    held: dict[ArenaPlace, bytes] = {}
    refused = 0
    for _ in range(3000):
        if held and draw.random() < 0.45:
            place = draw.choice(list(held))
            assert arena.view(place) == held.pop(place)
            arena.free(place)
            continue
        content = draw.randbytes(draw.choice([60, 900, 2000]))
        place = arena.put(ID, memoryview(content))
        if place is None:
            refused += 1
            continue
        assert place.offset + bytes_needed(place.length) <= 20_000
        held[place] = content
    assert refused and all(arena.view(place) == content for place, content in held.items())
    spans = sorted((place.offset, place.offset + bytes_needed(place.length)) for place in held)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    arena.close()


def test_without_memfd_the_memory_is_private(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(1000)
    assert arena.handle is None
    assert bytes(arena.view(arena.put(ID, memoryview(b"abc")))) == b"abc"
    arena.close()
