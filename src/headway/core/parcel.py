"""What another engine needs to go on with a request: a parcel, and the messages that fetch blocks.

Who prefills offers a parcel, who decodes takes the blocks that it names, one by one, into memory
that it has reserved. A parcel says nothing that its taker does not check: the keys of its blocks
follow from the taker's own salt and tokens, so no other blocks can be meant. Worked example, blocks
of 16, a prompt of 70 tokens of which all are computed, and one more was sampled:

    tokens 71, computed 70, groups [[0, 4]]      blocks 0 … 3: 64 tokens; 7 are computed again
"""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import Request

VERSION = 1
MOST_PARCEL_BYTES = 16 * 2**20
"""Of a parcel as it is sent: 4 bytes or fewer a token, and a grammar."""
ENGINE = "engine:"
"""What the name of a peer begins with that is another engine."""


class ParcelError(ValueError):
    """Why a parcel is not taken; `name` is one of REFUSALS."""

    def __init__(self, name: str) -> None:
        super().__init__(REFUSALS[name])
        self.name = name


REFUSALS = {
    "truncated": "The parcel is no whole message.",
    "too long": f"The parcel is longer than {MOST_PARCEL_BYTES} bytes.",
    "version": "The parcel is of another version.",
    "fingerprint": "The parcel's blocks are of other weights, formats or kernels.",
    "salt": "The parcel's chain begins with another salt or adapter.",
    "request": "The parcel is of another request.",
    "tokens": "The parcel's tokens do not go on from the prompt.",
    "group": "The parcel has other KV groups than this model.",
    "blocks": "The parcel has more blocks than its tokens need.",
    "replayed": "The parcel was taken before.",
}


class Parcel(msgspec.Struct, array_like=True):
    """One sequence that goes on elsewhere.

    `parcel_id` is random: who knows it may fetch the blocks, which lie at `address` until they are
    released or their lease is over. `root` is where the chain of keys begins. Of KV group g the
    blocks `groups[g]` = (first, end) are there, all full. `seed` is the sequence's own, `tokens`
    begin with the prompt.
    """

    version: int
    parcel_id: bytes
    address: str
    fingerprint: bytes
    root: bytes
    request: Request
    index: int
    seed: int
    tokens: list[int]
    computed: int
    groups: list[tuple[int, int]]


BYTES, PLACES, PLACES_AND_FILE = range(3)
"""How blocks are given: their bytes, or where they lie in the memory of who gives them, with the
descriptor of that memory where the taker has not mapped it yet."""


class Pull(msgspec.Struct, array_like=True, tag=1):
    """Send these blocks, (KV group, key), in this order."""

    parcel_id: bytes
    fingerprint: bytes
    blocks: list[tuple[int, bytes]]
    how: int = BYTES


class Release(msgspec.Struct, array_like=True, tag=2):
    """The blocks of this parcel are not needed any more."""

    parcel_id: bytes


class Lent(msgspec.Struct, array_like=True):
    """Where the blocks of a Pull lie, as of `runtime.kvstore.arena.Place`, in memory of so many
    bytes; no places where one is not there."""

    size: int
    places: list[tuple[int, int, int]]


def peer_of(address: str, parcel_id: bytes) -> str:
    """The name of a peer in transfers: where it is, and which parcel is meant."""
    return f"{ENGINE}{address}#{parcel_id.hex()}"


def address_of(peer: str) -> tuple[str, bytes]:
    """(address, parcel id) of `peer_of`."""
    address, _, parcel_id = peer.removeprefix(ENGINE).rpartition("#")
    return address, bytes.fromhex(parcel_id)


encode = msgspec.msgpack.Encoder().encode
_decode_parcel = msgspec.msgpack.Decoder(Parcel).decode
_decode_lent = msgspec.msgpack.Decoder(Lent).decode
decode_asked = msgspec.msgpack.Decoder(Pull | Release).decode


def decode_lent(frame: bytes) -> Lent:
    """Where blocks lie. Raises ValueError."""
    try:
        return _decode_lent(frame)
    except msgspec.MsgspecError as error:
        raise ValueError("what came says nothing of places") from error


def decode_parcel(frame: bytes) -> Parcel:
    """The parcel in `frame`. Raises ParcelError."""
    if len(frame) > MOST_PARCEL_BYTES:
        raise ParcelError("too long")
    try:
        parcel = _decode_parcel(frame)
    except (msgspec.MsgspecError, RequestError, ValueError, RecursionError) as error:
        raise ParcelError("truncated") from error
    if parcel.version != VERSION:
        raise ParcelError("version")
    return parcel
