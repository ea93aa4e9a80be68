"""Messages between the server's process and the engine's: typed msgspec, no pickle.

The server sends `ToEngine`, the engine `FromEngine`, over a ZeroMQ pair in a private folder. A
second socket carries the engine's heartbeat from a thread of its own: during a long step the first
is silent, and the second says that the process lives and how long the step takes. The reason why an
engine cannot start is a file next to the sockets: it is complete when the process has ended, while
ZeroMQ may lose the last messages.
"""

import msgspec

from headway.config.options import plain
from headway.config.resolve import Settings
from headway.core.errors import RequestError, ServerFaultError, ShedError
from headway.core.plan import Ceilings, Description
from headway.core.records import StepRecord
from headway.core.request import Request, SequenceUpdate
from headway.core.service import UnloadedTimes

MAX_MESSAGE_BYTES = 64 * 2**20
ENGINE_SOCKET, BEAT_SOCKET, FAILURE_FILE, BLOCKS_SOCKET = "engine", "beat", "failure", "blocks"
FILES = (ENGINE_SOCKET, BEAT_SOCKET, FAILURE_FILE, BLOCKS_SOCKET)
"""Files in an engine's folder of sockets; from the last one other engines fetch KV blocks."""
BEAT_INTERVAL_S = 0.5
FAULT = "internal_error"
PARENT_VARIABLE = "HEADWAY_PARENT"
"""Environment variable of the engine: the process id of the server that started it."""
WEIGHTS_VARIABLE = "HEADWAY_SHARED_WEIGHTS"
"""Environment variable of the engine: descriptors, "7,8", of memory for weights that several
engines share: the model's, its drafter's."""


class Submit(msgspec.Struct, array_like=True, tag=1):
    """Run this request; `resumed_tokens` are of an engine that died, as in Engine.add.

    With `hands_over` it continues in another engine after its next token; with a `parcel` it comes
    from another engine (`engine.handover`).
    """

    request: Request
    resumed_tokens: list[list[int] | None] = []
    hands_over: bool = False
    parcel: bytes = b""


class RequestHead(msgspec.Struct, array_like=True):
    """The first field of a Request; the others are not decoded."""

    request_id: int


class SubmitHead(msgspec.Struct, array_like=True, tag=1):
    """A Submit of which only the request id is decoded."""

    request: RequestHead


class Abort(msgspec.Struct, array_like=True, tag=2):
    """Drop a request, or one of its sequences."""

    request_id: int
    index: int | None = None


class Stop(msgspec.Struct, array_like=True, tag=3):
    """End the process."""


class Flush(msgspec.Struct, array_like=True, tag=4):
    """Expect no more requests: those that wait for a full batch start."""


class ForgetOwner(msgspec.Struct, array_like=True, tag=5):
    """Drop the KV blocks of this owner, or of all owners whose names begin with it."""

    owner: bytes


class ReleaseHandover(msgspec.Struct, array_like=True, tag=6):
    """Release what is kept of a request that was handed over."""

    request_id: int


class Beat(msgspec.Struct, array_like=True):
    """Heartbeat; the loop has been busy with one step, or message, for `busy_s`.

    `longest_s` is the longest step so far. `computed_s` is the processor time within `busy_s` of
    the busiest thread or rank; none of them has computed in the last `still_s`. `num_received`
    is the number of messages that the engine has received.
    """

    busy_s: float
    longest_s: float
    still_s: float = 0.0
    computed_s: float = 0.0
    num_received: int = 0


class Loading(msgspec.Struct, array_like=True, tag=1):
    """Bytes of weights loaded so far."""

    done: int
    total: int


class Ready(msgspec.Struct, array_like=True, tag=2):
    """The engine takes requests; this is what it serves. `group_blocks` by KV group.

    `settings` are final values by name, of those that clients may query.
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
    alone: UnloadedTimes = UnloadedTimes()
    narrowed: list[tuple[int, int]] = []
    """What `--kv-layers` narrowed, as of `config.kv_layers.narrowing`."""
    plan: Settings | None = None
    """All settings, for a simulation of this engine."""
    bounded: list[bool] = []
    """By layer whether a token may read only its best blocks, as of `CacheConfig`."""
    kv_read: float = 1.0
    chooses: list[bool] = []
    """By layer whether it keeps only a part of a prompt, as of `CacheConfig`."""
    kv_keep: float = 1.0


class StepOutput(msgspec.Struct, array_like=True, tag=3):
    """Result of a step: the updates of its sequences, and its record."""

    updates: list[SequenceUpdate]
    record: StepRecord


class ProbeResult(msgspec.Struct, array_like=True, tag=6):
    """The ceilings after a probe in an idle moment, and the times learned until then."""

    ceilings: Ceilings
    alone: UnloadedTimes = UnloadedTimes()


class Rejection(msgspec.Struct, array_like=True, tag=4):
    """The engine refuses this request: the parts of a RequestError, or FAULT (internal)."""

    request_id: int
    message: str
    param: str | None
    code: str | None
    status: int = 400
    retry_after_s: float | None = None

    def error(self) -> RequestError:
        """Return the RequestError for the client."""
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
    """The engine drops a request that it had accepted, because it can no longer be in time."""

    request_id: int

    def error(self) -> ShedError:
        """Return the error for the client."""
        return ShedError()


class HandedOver(msgspec.Struct, array_like=True, tag=8):
    """This request has left the engine; it continues where this `parcel` is given."""

    request_id: int
    parcel: bytes


class TakenOver(msgspec.Struct, array_like=True, tag=9):
    """A parcel was accepted, or refused by this name; then its request is computed here."""

    request_id: int
    refusal: str


class Failed(msgspec.Struct, array_like=True):
    """The engine cannot start: the parts of a HeadwayError."""

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
