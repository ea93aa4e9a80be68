"""Parcel: what another engine needs to continue a request, and the messages that fetch blocks.

The prefilling engine offers a parcel; the decoding engine fetches the blocks that it names, one by
one, into blocks that it has allocated. The receiver checks all of a parcel: the keys of its blocks
follow from the receiver's own salt and tokens, so no other blocks can be meant. Worked example,
blocks of 16, a prompt of 70 tokens of which all are computed, and one more was sampled:

    tokens 71, computed 70, groups [[0, 4]]      blocks 0 … 3: 64 tokens; 7 are computed again
"""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import Request

VERSION = 1
MAX_PARCEL_BYTES = 16 * 2**20
"""Maximum size of an encoded parcel: at most 4 bytes per token, and a grammar."""
ENGINE = "engine:"
"""Prefix of the name of a peer that is another engine."""


class ParcelError(ValueError):
    """Refusal of a parcel; `name` is one of REFUSALS."""

    def __init__(self, name: str) -> None:
        super().__init__(REFUSALS[name])
        self.name = name


REFUSALS = {
    "truncated": "The parcel is no whole message.",
    "too long": f"The parcel is longer than {MAX_PARCEL_BYTES} bytes.",
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
    """One sequence that continues in another engine.

    `parcel_id` is random: its holder may fetch the blocks, which are at `address` until they are
    released or their lease ends. `root` is the first key of the chain. Of KV group g the blocks
    `groups[g]` = (first, end) are available, all full. `seed` is the sequence's own, `tokens` begin
    with the prompt.
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
"""How blocks are sent: their bytes, or their places in the sender's memory, with the descriptor of
that memory if the receiver has not mapped it yet."""


class Pull(msgspec.Struct, array_like=True, tag=1):
    """Request for these blocks, (KV group, key), in this order."""

    parcel_id: bytes
    fingerprint: bytes
    blocks: list[tuple[int, bytes]]
    how: int = BYTES


class Release(msgspec.Struct, array_like=True, tag=2):
    """Message that the blocks of this parcel are not needed any more."""

    parcel_id: bytes


class BlockPlaces(msgspec.Struct, array_like=True):
    """Places of the blocks of a Pull, see `runtime.kvstore.arena.Place`, in memory of `size` bytes;
    no places if a block is missing."""

    size: int
    places: list[tuple[int, int, int]]


def peer_of(address: str, parcel_id: bytes) -> str:
    """Return the name of a peer in transfers: its address and the parcel id."""
    return f"{ENGINE}{address}#{parcel_id.hex()}"


def address_of(peer: str) -> tuple[str, bytes]:
    """Return (address, parcel id) of a name by `peer_of`."""
    address, _, parcel_id = peer.removeprefix(ENGINE).rpartition("#")
    return address, bytes.fromhex(parcel_id)


encode = msgspec.msgpack.Encoder().encode
_decode_parcel = msgspec.msgpack.Decoder(Parcel).decode
_decode_lent = msgspec.msgpack.Decoder(BlockPlaces).decode
decode_block_message = msgspec.msgpack.Decoder(Pull | Release).decode


def decode_places(frame: bytes) -> BlockPlaces:
    """Return the places of blocks. Raises ValueError."""
    try:
        return _decode_lent(frame)
    except msgspec.MsgspecError as error:
        raise ValueError("the answer contains no places") from error


def decode_parcel(frame: bytes) -> Parcel:
    """Decode a parcel. Raises ParcelError."""
    if len(frame) > MAX_PARCEL_BYTES:
        raise ParcelError("too long")
    try:
        parcel = _decode_parcel(frame)
    except (msgspec.MsgspecError, RequestError, ValueError, RecursionError) as error:
        raise ParcelError("truncated") from error
    if parcel.version != VERSION:
        raise ParcelError("version")
    return parcel
