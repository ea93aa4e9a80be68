"""KV blocks sent to other engines and fetched from them, over a Unix or a TCP socket.

The giving engine keeps each parcel in `Exports` (bounded) until it is released or its lease ends.
The taking engine pulls the blocks that it names, one by one:

    giver   a nonce of 16 bytes
    taker   length, 4 bytes | proof, 32 bytes | Pull or Release (`core.parcel`)
    giver   for each block the header of a segment's record, then its bytes

The proof is the HMAC-SHA256 of nonce and message under the secret that both engines share. The
header has a CRC-32 in place of the SHA-256: it detects faults of memory, while the transport is
trusted. A block that is missing, or not of the length that was reserved for it, ends the pull.

Over a Unix socket both engines are on one machine: instead of bytes the giver sends the places of
the blocks in its memory, which the taker has mapped (`arena.py`) and reads itself.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import queue
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headway.core import parcel as messages
from headway.core.clock import Clock, SystemClock
from headway.runtime.kvstore.arena import Arena, ArenaPlace, MappedArena
from headway.runtime.kvstore.segment import (
    HEADER_BYTES,
    BlockId,
    OnRead,
    Record,
    pack_header,
    parse_header,
)
from headway.runtime.sockets import receive, receive_into

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**20
"""Longest message of a taker: some 20,000 blocks."""
NONCE_BYTES, PROOF_BYTES = 16, 32
LEASE_S = 60.0
"""Seconds that the blocks of a parcel are kept for a taker that does not come."""
SOCKET_TIMEOUT_S = 30.0
"""Seconds that a socket may be silent."""
MAX_EXPORT_BYTES = 2**30
MAX_RELEASED_PARCELS = 4096
"""Released parcels that are remembered, so that a pull does not wait for their blocks."""
BLOCK_WAIT_S = 2.0
"""Seconds that a pull waits for a block that the next step exports."""
READERS = 2
MAX_MAPPED_ARENAS = 64
"""Arenas of other engines that stay mapped."""
CAN_MAP_MEMORY = hasattr(os, "memfd_create")
"""Whether engines of this machine can map each other's memory."""
LENGTH = struct.Struct("<I")
MISSING_BLOCK_HEADER = bytes(HEADER_BYTES)
UNIX = "unix:"


def block_checksum(block: BlockId, owner: bytes, data: bytes | memoryview) -> bytes:
    """Return the CRC-32 over group, key, owner and bytes, in the 32 bytes of a digest."""
    start = zlib.crc32(struct.pack("<H", block[0]) + block[1] + owner)
    return LENGTH.pack(zlib.crc32(data, start)).ljust(32, b"\0")


@dataclass(slots=True)
class HeldParcel:
    """The blocks of a parcel, and when their lease ends."""

    until_s: float
    blocks: dict[BlockId, tuple[bytes, ArenaPlace]] = field(default_factory=dict)


class Exports:
    """Blocks that other engines may fetch: `put` by a step, served by threads on `address`.

    `address` is "unix:PATH" (in a folder of this user only) or "HOST:PORT", where port 0 takes a
    free one. Across machines a `secret` is needed. Raises OSError.
    """

    def __init__(
        self,
        address: str,
        fingerprint: bytes,
        *,
        secret: bytes = b"",
        limit_bytes: int = MAX_EXPORT_BYTES,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self.fingerprint, self.limit_bytes, self.lease_s = fingerprint, limit_bytes, lease_s
        self._secret, self._clock = secret, clock or SystemClock()
        self._parcels: dict[bytes, HeldParcel] = {}
        self._released: dict[bytes, None] = {}
        """Ids of released parcels, the oldest first."""
        self._num_bytes = 0
        self._arena = Arena(limit_bytes)
        self._changed = threading.Condition()
        self._is_closed = False
        self._listener = open_listener(address)
        self.address = address
        if not address.startswith(UNIX):
            host, port = self._listener.getsockname()[:2]
            self.address = f"{host}:{port}"
        threading.Thread(target=self._accept_loop, daemon=True).start()

    # ── called by a step ───────────────────────────────────────────────────────────────────

    def put(self, parcel_id: bytes, block: BlockId, owner: bytes, data: memoryview) -> None:
        """Keep a block of a parcel and renew its lease; beyond the bound nothing is kept."""
        with self._changed:
            self._drop_expired()
            is_new = parcel_id not in self._released and block not in self._blocks_of(parcel_id)
            place = self._arena.put(parcel_id, data) if is_new else None
            if place is not None:
                until_s = self._clock.now_s() + self.lease_s
                held = self._parcels.setdefault(parcel_id, HeldParcel(until_s))
                held.until_s = until_s
                held.blocks[block] = owner, place
                self._num_bytes += len(data)
            self._changed.notify_all()

    def release(self, parcel_id: bytes) -> None:
        """Drop the blocks of a parcel that is not needed any more."""
        with self._changed:
            self._drop(parcel_id)
            self._released[parcel_id] = None
            while len(self._released) > MAX_RELEASED_PARCELS:
                self._released.pop(next(iter(self._released)))
            self._changed.notify_all()

    def _drop(self, parcel_id: bytes) -> None:
        for _, place in self._blocks_of(parcel_id).values():
            self._num_bytes -= place.length
            self._arena.free(place)
        self._parcels.pop(parcel_id, None)

    def _drop_expired(self) -> None:
        now_s = self._clock.now_s()
        for parcel_id in [name for name, each in self._parcels.items() if each.until_s < now_s]:
            self._drop(parcel_id)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait to be fetched."""
        with self._changed:
            self._drop_expired()
            return self._num_bytes

    def close(self) -> None:
        """Stop to serve and remove the socket."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._arena.close()
        if self.address.startswith(UNIX):
            Path(self.address.removeprefix(UNIX)).unlink(missing_ok=True)

    # ── run by threads ──────────────────────────────────────────────────────────────────────────

    def _accept_loop(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one taker, message by message; any fault ends the connection."""
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(SOCKET_TIMEOUT_S)
            nonce = os.urandom(NONCE_BYTES)
            connection.sendall(nonce)
            while (frame := receive_frame(connection)) is not None:
                proof, message = frame[:PROOF_BYTES], frame[PROOF_BYTES:]
                if not hmac.compare_digest(proof, proof_of(self._secret, nonce, message)):
                    log.warning("A client without the secret asked for KV blocks: nothing is sent.")
                    return
                request = messages.decode_block_message(message)
                if isinstance(request, messages.Release):
                    self.release(request.parcel_id)
                elif request.fingerprint != self.fingerprint:
                    return
                elif request.how != messages.BYTES:
                    self._send_places(connection, request)
                else:
                    self._send(connection, request)

    def _wait_for_block(self, parcel_id: bytes, block: BlockId) -> tuple[bytes, ArenaPlace] | None:
        """Return (owner, place), perhaps after the next step exported it, or None."""
        with self._changed:
            self._changed.wait_for(
                lambda: parcel_id in self._released or block in self._blocks_of(parcel_id),
                BLOCK_WAIT_S,
            )
            if parcel_id in self._parcels:
                self._parcels[parcel_id].until_s = self._clock.now_s() + self.lease_s
            return self._blocks_of(parcel_id).get(block)

    def _blocks_of(self, parcel_id: bytes) -> dict[BlockId, tuple[bytes, ArenaPlace]]:
        held = self._parcels.get(parcel_id)
        return {} if held is None else held.blocks

    def _send(self, connection: socket.socket, request: messages.Pull) -> None:
        for group, key in request.blocks:
            entry = self._wait_for_block(request.parcel_id, (group, key))
            if entry is None:
                connection.sendall(MISSING_BLOCK_HEADER)
                return
            owner, data = entry[0], self._arena.view(entry[1])
            block = group, key
            check = block_checksum(block, owner, data)
            header = pack_header(Record(block, owner, 0, len(data), 0, check))
            send_block(connection, header, data)

    def _send_places(self, connection: socket.socket, request: messages.Pull) -> None:
        """Send the places of the blocks to a taker on this machine."""
        places: list[tuple[int, int, int]] = []
        for block in request.blocks:
            entry = self._wait_for_block(request.parcel_id, block)
            if entry is None:
                places = []
                break
            places.append(entry[1])
        reply = messages.encode(messages.BlockPlaces(self._arena.size, places))
        if request.how == messages.PLACES_AND_FILE and self._arena.handle is not None:
            socket.send_fds(connection, [LENGTH.pack(len(reply))], [self._arena.handle])
        else:
            connection.sendall(LENGTH.pack(len(reply)))
        connection.sendall(reply)


def send_block(connection: socket.socket, header: bytes, data: memoryview) -> None:
    """Send header and bytes, in one call where the socket takes both.

    Nothing is sent behind them, because the taker of the last block may have closed the connection.
    """
    count = connection.sendmsg([header, data])
    for part in (memoryview(header)[count:], data[max(count - len(header), 0) :]):
        if part:
            connection.sendall(part)


class PeerStore:
    """Blocks of other engines, for `PeerTransfers`; `peer_of` names address and parcel."""

    def __init__(self, fingerprint: bytes, *, secret: bytes = b"") -> None:
        self.fingerprint, self._secret = fingerprint, secret
        self._reads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mutex, self._expected = threading.Lock(), dict[str, int]()
        self._arenas: dict[str, MappedArena] = {}
        """By the address of the engine that owns the memory."""
        for _ in range(READERS):
            threading.Thread(target=self._read_loop, daemon=True).start()

    def expect(self, peer: str) -> None:
        """Announce a read: a parcel is not released before its last announced read."""
        with self._mutex:
            self._expected[peer] = self._expected.get(peer, 0) + 1

    def _is_last(self, peer: str) -> bool:
        with self._mutex:
            num_pending = self._expected.pop(peer, 1) - 1
            if num_pending:
                self._expected[peer] = num_pending
        return not num_pending

    def read(
        self, peer: str, blocks: list[BlockId], into: list[memoryview], on_read: OnRead
    ) -> None:
        """Copy the bytes of each block into its memory and call `on_read`, with False where a block
        is missing or damaged."""
        self._reads.put(lambda: on_read(self._pull(peer, blocks, into)))

    def _read_loop(self) -> None:
        while True:
            self._reads.get()()

    def _pull(self, peer: str, blocks: list[BlockId], into: list[memoryview]) -> bool:
        address, parcel_id = messages.address_of(peer)
        is_last = False
        try:
            with connect(address) as connection:
                nonce = receive(connection, NONCE_BYTES)
                pull = messages.Pull(parcel_id, self.fingerprint, blocks)
                if CAN_MAP_MEMORY and address.startswith(UNIX):
                    self._copy_from_arena(connection, nonce, address, pull, into)
                else:
                    self._send_request(connection, nonce, pull)
                    for block, data in zip(blocks, into, strict=True):
                        receive_block(connection, block, data)
                is_last = self._is_last(peer)
                if is_last:
                    self._send_request(connection, nonce, messages.Release(parcel_id))
        except (OSError, ValueError) as error:
            log.warning("KV blocks of %s were not received and are computed: %s", address, error)
            self._arenas.pop(address, None)
            if not is_last:
                self._is_last(peer)
            return False
        return True

    def _copy_from_arena(
        self,
        connection: socket.socket,
        nonce: bytes,
        address: str,
        pull: messages.Pull,
        into: list[memoryview],
    ) -> None:
        """Copy the blocks out of the giver's mapped memory. Raises OSError, ValueError."""
        arena = self._arenas.get(address)
        pull.how = messages.PLACES_AND_FILE if arena is None else messages.PLACES
        self._send_request(connection, nonce, pull)
        reply, handle = receive_lent(connection)
        if handle is not None:
            arena = self._map(address, handle, reply.size)
        if not reply.places or arena is None:
            raise ValueError("a block is not there any more")
        for place, data in zip(reply.places, into, strict=True):
            arena.take(pull.parcel_id, ArenaPlace(*place), data)

    def _map(self, address: str, handle: int, size: int) -> MappedArena:
        """Map the memory of the engine at `address`, and keep the mapping."""
        arena = self._arenas[address] = MappedArena(handle, size)
        while len(self._arenas) > MAX_MAPPED_ARENAS:
            self._arenas.pop(next(iter(self._arenas)))
        return arena

    def _send_request(
        self, connection: socket.socket, nonce: bytes, request: messages.Pull | messages.Release
    ) -> None:
        message = messages.encode(request)
        proof = proof_of(self._secret, nonce, message)
        connection.sendall(LENGTH.pack(len(proof) + len(message)) + proof + message)


def receive_block(connection: socket.socket, block: BlockId, data: memoryview) -> None:
    """Receive `block` into `data`. Raises OSError, and ValueError for another block."""
    header = receive(connection, HEADER_BYTES)
    record = parse_header(header, 0)
    if record is None or record.block != block:
        raise ValueError("a block is not there any more")
    if record.length != len(data):
        raise ValueError(f"a block has {record.length} bytes in place of {len(data)}")
    receive_into(connection, data)
    if block_checksum(block, record.owner, data) != record.digest:
        raise ValueError("a block is damaged")


# ── sockets ─────────────────────────────────────────────────────────────────────────────────────


def open_listener(address: str) -> socket.socket:
    """Return a socket that listens on `address`. Raises OSError."""
    if address.startswith(UNIX):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = address.removeprefix(UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    else:
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)))
    listener.listen()
    return listener


def connect(address: str) -> socket.socket:
    """Return a connection to `address`. Raises OSError, ValueError."""
    if address.startswith(UNIX):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(SOCKET_TIMEOUT_S)
            connection.connect(address.removeprefix(UNIX))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S)


def proof_of(secret: bytes, nonce: bytes, message: bytes) -> bytes:
    """Return the proof that the sender of `message` has the secret."""
    return hmac.new(secret, nonce + message, hashlib.sha256).digest()


def receive_frame(connection: socket.socket) -> bytes | None:
    """Return the next proof and message, None at the end. Raises OSError, ValueError."""
    first = connection.recv(1)
    if not first:
        return None
    (length,) = LENGTH.unpack(first + receive(connection, LENGTH.size - 1))
    if not PROOF_BYTES < length <= MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return receive(connection, length)


def receive_lent(connection: socket.socket) -> tuple[messages.BlockPlaces, int | None]:
    """Return (places of blocks, descriptor of the memory or None). Raises OSError, ValueError."""
    head, handles, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    try:
        head += receive(connection, LENGTH.size - len(head))
        (length,) = LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        reply = messages.decode_places(receive(connection, length))
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    return reply, handles[0] if handles else None
