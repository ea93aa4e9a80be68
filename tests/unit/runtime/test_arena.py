"""Blocks in memory that another process maps: whole, stamped, and given away once."""

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


def mapped(arena: Arena) -> MappedArena:
    assert arena.handle is not None
    return MappedArena(os.dup(arena.handle), arena.size)


def taken(arena: MappedArena, place: ArenaPlace, parcel_id: bytes = ID) -> bytes:
    into = bytearray(place.length)
    arena.take(parcel_id, place, memoryview(into))
    return bytes(into)


def test_a_block_is_read_by_who_has_the_file(arena):
    place = arena.put(ID, memoryview(b"content" * 20))
    assert taken(mapped(arena), place) == b"content" * 20 == bytes(arena.view(place))


def test_a_place_is_anothers_once_it_is_free(arena):
    other = mapped(arena)
    place = arena.put(ID, memoryview(b"a" * 100))
    arena.free(place)
    with pytest.raises(ValueError, match="overwritten"):
        taken(other, place)
    again = arena.put(ID, memoryview(b"b" * 90))
    assert again.offset == place.offset, "blocks of one size take each other's places"
    with pytest.raises(ValueError, match="overwritten"):
        taken(other, place)
    assert taken(other, again) == b"b" * 90


@pytest.mark.parametrize(
    "place",
    [
        ArenaPlace(4096, 8, 1),
        ArenaPlace(-64, 8, 1),
        ArenaPlace(0, 4096, 1),
        ArenaPlace(4096 - CACHE_LINE_BYTES, 1, 1),
    ],
)
def test_what_lies_outside_is_not_read(arena, place):
    with pytest.raises(ValueError, match="outside"):
        taken(mapped(arena), place)


def test_another_parcels_block_and_another_length_are_not_taken(arena):
    place = arena.put(ID, memoryview(b"a" * 100))
    with pytest.raises(ValueError, match="overwritten"):
        taken(mapped(arena), place, OTHER)
    with pytest.raises(ValueError, match="100 bytes in place of 7"):
        mapped(arena).take(ID, place, memoryview(bytearray(7)))


def test_memory_that_is_smaller_than_was_said_is_not_mapped(arena):
    with pytest.raises(ValueError, match="smaller"):
        MappedArena(os.dup(arena.handle), arena.size + 1)


def test_no_place_is_two_blocks_and_the_bound_holds():
    """Puts and frees of three lengths at random: what was put is there until it is freed."""
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


def test_without_files_that_have_no_name_it_is_memory_of_ones_own(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(1000)
    assert arena.handle is None
    assert bytes(arena.view(arena.put(ID, memoryview(b"abc")))) == b"abc"
    arena.close()
