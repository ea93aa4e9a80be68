"""A parcel on the wire: whole or refused by name, whatever the bytes are."""

import contextlib
import random

import msgspec
import pytest

from headway.core import parcel as messages
from headway.core.parcel import (
    MAX_PARCEL_BYTES,
    REFUSALS,
    VERSION,
    Parcel,
    ParcelError,
    Pull,
    Release,
    address_of,
    decode_block_message,
    decode_parcel,
    encode,
    peer_of,
)
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams


def parcel(**what: object) -> Parcel:
    """A good one, but for what is said."""
    sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=9, stop=["end"])
    request = Request(7, [1, 2, 3], sampling, Principal(cache_salt="salt"), adapter="x")
    made = Parcel(
        version=VERSION,
        parcel_id=b"i" * 16,
        address="unix:/run/p",
        fingerprint=b"f" * 32,
        root=b"r" * 32,
        request=request,
        index=0,
        seed=2**64 - 1,
        tokens=[1, 2, 3, 4],
        computed=3,
        groups=[(0, 1), (1, 1)],
    )
    return msgspec.structs.replace(made, **what)


def test_all_of_it_comes_back():
    assert decode_parcel(encode(parcel())) == parcel()


@pytest.mark.parametrize("cut", [0, 1, 7, -1, -20])
def test_a_part_of_it_is_refused(cut):
    with pytest.raises(ParcelError) as caught:
        decode_parcel(encode(parcel())[:cut])
    assert caught.value.name == "truncated"


def test_more_than_a_parcel_may_have_is_not_even_read():
    with pytest.raises(ParcelError) as caught:
        decode_parcel(bytes(MAX_PARCEL_BYTES + 1))
    assert caught.value.name == "too long"


def test_another_version_is_refused():
    with pytest.raises(ParcelError) as caught:
        decode_parcel(encode(parcel(version=VERSION + 1)))
    assert caught.value.name == "version"


@pytest.mark.parametrize(
    "what",
    [
        {"tokens": "abc"},
        {"computed": "3"},
        {"groups": [[0]]},
        {"groups": 7},
        {"request": None},
        {"parcel_id": 5},
        {"seed": 2**70},
    ],
)
def test_fields_of_another_kind_are_refused(what):
    try:
        frame = encode(parcel(**what))
    except (OverflowError, msgspec.MsgspecError):
        return  # no message holds it
    with pytest.raises(ParcelError):
        decode_parcel(frame)


def test_a_request_that_no_client_could_send_is_refused():
    """The checks of the fields are those of a request from outside."""
    frame = encode(parcel()).replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(99.5))
    with pytest.raises(ParcelError):
        decode_parcel(frame)


def test_random_bytes_raise_nothing_else():
    draw, good = random.Random(0), encode(parcel())
    for _ in range(2000):
        at, count = draw.randrange(len(good)), draw.randrange(1, 9)
        frame = good[:at] + draw.randbytes(count) + good[at + count :]
        with contextlib.suppress(ParcelError):
            assert isinstance(decode_parcel(frame), Parcel)


def test_every_refusal_is_a_sentence():
    for name, text in REFUSALS.items():
        assert text.startswith("The parcel") and text.endswith("."), name
        assert str(ParcelError(name)) == text


@pytest.mark.parametrize("address", ["unix:/run/a#b", "127.0.0.1:80", "[::1]:80", ""])
def test_a_peer_says_where_and_which(address):
    assert address_of(peer_of(address, b"\x00\xff" * 8)) == (address, b"\x00\xff" * 8)


def test_what_a_taker_sends_is_told_apart():
    pull = Pull(b"i" * 16, b"f" * 32, [(0, b"k" * 32)])
    for asked in (pull, Release(b"i" * 16)):
        assert decode_block_message(messages.encode(asked)) == asked
    with pytest.raises(msgspec.MsgspecError):
        decode_block_message(encode(parcel()))
