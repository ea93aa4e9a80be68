"""Private protocol between a gateway and a Headway server, in addition to the public API.

A gateway's key (`gateway: true` in the server's key file, or an operator's) may send the field
`headway_gateway` in a body, and the header `x-headway-user`. A stream whose field requests `marks`
has comments that name the tokens which the events so far have shown:

    data: {… "content": "Hel" …}          data: {… "content": "lo" …}
                                          : headway 40 16 311,298
    : headway 40 16 87                    40 prompt tokens, 16 of them cached, then the new ids

With `resume` another server continues after these tokens: the client sees one stream.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

FIELD = "headway_gateway"
USER_HEADER = b"x-headway-user"
LOAD_HEADER = b"x-headway-load"
LOAD_PATH = "/v1/load"
MARK = b": headway "
MAX_USER = 64
MAX_RESUMED = 2_000_000
MAX_TOKEN_S = 3600.0
"""Maximum seconds per prompt token in a load report: a machine that swaps takes more than ten."""
ResponseId = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Name = Annotated[str, Meta(max_length=200)]


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stream that another server began: its id, its time, the tokens that were shown."""

    id: ResponseId
    created: Annotated[int, Meta(ge=0, le=2**53)]
    tokens: list[int] = []


class Relayed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field of a body: whether marks are requested, and what the answer resumes."""

    marks: bool = False
    resume: Resume | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """Load of a server: its queue in seconds, predicted seconds per prompt token (0: unknown),
    memory, rows.

    `boot` changes when the engine restarts, and its cache is empty then. `context`, `cache_tokens`
    and `max_rows` are its sizes; `fingerprint` is the `system_fingerprint` of its answers. Decoding
    a value outside of its range raises ValidationError.
    """

    queue_s: Seconds = 0.0
    token_s: Annotated[float, Meta(ge=0, le=MAX_TOKEN_S)] = 0.0
    kv: Annotated[float, Meta(ge=0, le=1e3)] = 0.0
    rows: Count = 0
    max_rows: Annotated[int, Meta(ge=0, le=2**16)] = 0
    boot: Name = ""
    context: Count = 0
    cache_tokens: Count = 0
    fingerprint: Name = ""


encode_load = msgspec.json.Encoder().encode
decode_load = msgspec.json.Decoder(LoadReport).decode


class Mark(msgspec.Struct, frozen=True):
    """Comment of a marked stream."""

    num_prompt: int
    num_cached: int
    tokens: list[int]


def mark(num_prompt: int, num_cached: int, tokens: list[int]) -> bytes:
    """Return the comment that names the tokens shown by the events before it."""
    ids = ",".join(map(str, tokens))
    return b"%b%d %d %b\n\n" % (MARK, num_prompt, num_cached, ids.encode())


def read_mark(line: bytes) -> Mark:
    """Parse a comment line; ValueError if it is not a mark."""
    numbers = line.removeprefix(MARK).split(b" ")
    if len(numbers) != 3:
        raise ValueError("a mark has three parts")
    tokens = [int(text) for text in numbers[2].split(b",")] if numbers[2] else []
    return Mark(int(numbers[0]), int(numbers[1]), tokens)


def is_user(name: str) -> bool:
    """Return whether the text can be the name of a gateway's user."""
    return 0 < len(name) <= MAX_USER and name.isascii() and name.isprintable()
