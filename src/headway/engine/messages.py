"""What the server process and the engine process say to each other: typed msgspec, no pickle.

The server sends `ToEngine`, the engine `FromEngine`, over a ZeroMQ pair in a private folder; a
second socket carries the engine's heartbeat from a thread of its own, so that a long step is
silence in the first and life in the second, which tells how long the step has been. Why an engine
cannot start is left beside them in a file: that is whole when the process has ended, while ZeroMQ
may not have read what was sent to it.
"""

import msgspec

from headway.config.options import plain
from headway.config.resolve import Settings
from headway.core.errors import RequestError, ServerFaultError, ShedError
from headway.core.plan import Ceilings, Description
from headway.core.records import StepRecord
from headway.core.request import Request, SequenceUpdate
from headway.core.service import Alone

MAX_MESSAGE_BYTES = 64 * 2**20
ENGINE_SOCKET, BEAT_SOCKET, FAILURE_FILE, BLOCKS_SOCKET = "engine", "beat", "failure", "blocks"
FILES = (ENGINE_SOCKET, BEAT_SOCKET, FAILURE_FILE, BLOCKS_SOCKET)
"""In an engine's folder of sockets; at the last other engines fetch KV blocks."""
BEAT_INTERVAL_S = 0.5
FAULT = "internal_error"
PARENT_VARIABLE = "HEADWAY_PARENT"
"""In the engine's environment: the process id of the server that started it."""
WEIGHTS_VARIABLE = "HEADWAY_SHARED_WEIGHTS"
"""And descriptors, "7,8", of memory for weights that several engines share: the model's, its
drafter's."""


class Submit(msgspec.Struct, array_like=True, tag=1):
    """Run this request; `resumed_tokens` it had from an engine that died, see Engine.add.

    With `hands_over` it goes on elsewhere behind its next token; with a `parcel` it comes from
    there (`engine.handover`).
    """

    request: Request
    resumed_tokens: list[list[int] | None] = []
    hands_over: bool = False
    parcel: bytes = b""


class RequestHead(msgspec.Struct, array_like=True):
    """The beginning of a Request: what follows in it is passed over."""

    request_id: int


class SubmitHead(msgspec.Struct, array_like=True, tag=1):
    """A Submit of which no more is read than whose request it is."""

    request: RequestHead


class Abort(msgspec.Struct, array_like=True, tag=2):
    """Drop a request, or one of its sequences."""

    request_id: int
    index: int | None = None


class Stop(msgspec.Struct, array_like=True, tag=3):
    """End the process."""


class Flush(msgspec.Struct, array_like=True, tag=4):
    """No more requests will come: let those that wait for a batch to fill start."""


class ForgetOwner(msgspec.Struct, array_like=True, tag=5):
    """Drop the KV blocks of this owner, or of all whose names begin so."""

    owner: bytes


class ReleaseHandover(msgspec.Struct, array_like=True, tag=6):
    """What is kept of a request that was handed over is wanted no more."""

    request_id: int


class Beat(msgspec.Struct, array_like=True):
    """The engine's process lives; its loop has been busy with one step, or message, for `busy_s`.

    `longest_s` is the longest that any step took. Of `busy_s` the busiest of the loop's thread and
    of the ranks that it waits for has computed for `computed_s`, and none of them anything in the
    last `still_s`. The engine has received `num_taken` messages so far.
    """

    busy_s: float
    longest_s: float
    still_s: float = 0.0
    computed_s: float = 0.0
    num_taken: int = 0


class Loading(msgspec.Struct, array_like=True, tag=1):
    """Bytes of weights loaded so far."""

    done: int
    total: int


class Ready(msgspec.Struct, array_like=True, tag=2):
    """The engine takes requests; this is what it serves. `group_blocks` by KV group.

    `settings` are final values by name, of those that clients may ask for.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    description: Description
    dtype: str = ""
    kv_dtype: str = ""
    max_num_batched_tokens: int = 0
    group_blocks: list[int] = []
    settings: dict[str, str] = {}
    alone: Alone = Alone()
    narrowed: list[tuple[int, int]] = []
    """What `--kv-layers` narrowed, as of `config.kv_layers.narrowing`."""
    plan: Settings | None = None
    """All of the settings, for who simulates this engine."""
    bounded: list[bool] = []
    """By layer whether a token may read its best blocks alone, as of `CacheConfig`."""
    kv_read: float = 1.0
    chooses: list[bool] = []
    """By layer whether it keeps a part of a prompt alone, as of `CacheConfig`."""
    kv_keep: float = 1.0


class StepOutput(msgspec.Struct, array_like=True, tag=3):
    """One step: what each sequence gained, and the record."""

    updates: list[SequenceUpdate]
    record: StepRecord


class ProbeResult(msgspec.Struct, array_like=True, tag=6):
    """The ceilings after a probe in an idle moment, and what the steps until then told."""

    ceilings: Ceilings
    alone: Alone = Alone()


class Rejection(msgspec.Struct, array_like=True, tag=4):
    """The engine does not take this request: a RequestError's parts, or FAULT for our own."""

    request_id: int
    message: str
    param: str | None
    code: str | None
    status: int = 400
    retry_after_s: float | None = None

    def error(self) -> RequestError:
        """The error again, as the client is to see it."""
        if self.code == FAULT:
            return ServerFaultError()
        return RequestError(
            self.message,
            param=self.param,
            code=self.code,
            status=self.status,
            retry_after_s=self.retry_after_s,
        )


class Shed(msgspec.Struct, array_like=True, tag=7):
    """The engine gives up this request, which it had taken: it can no longer be in time."""

    request_id: int

    def error(self) -> ShedError:
        """The error again, as the client is to see it."""
        return ShedError()


class HandedOver(msgspec.Struct, array_like=True, tag=8):
    """This request has left the engine: it goes on where this `parcel` is given."""

    request_id: int
    parcel: bytes


class TakenOver(msgspec.Struct, array_like=True, tag=9):
    """A parcel was taken, or refused by this name; then its request is computed here."""

    request_id: int
    refusal: str


class Failed(msgspec.Struct, array_like=True):
    """The engine cannot start: a HeadwayError's parts."""

    cause: str
    fix: str
    exit_code: int


HandoverNews = HandedOver | TakenOver
ToEngine = Submit | Abort | Stop | Flush | ForgetOwner | ReleaseHandover
FromEngine = Loading | Ready | StepOutput | Rejection | Shed | ProbeResult | HandedOver | TakenOver

encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_submit_head = msgspec.msgpack.Decoder(SubmitHead).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_beat = msgspec.msgpack.Decoder(Beat).decode
decode_failed = msgspec.msgpack.Decoder(Failed).decode
