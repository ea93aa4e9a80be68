"""A sequence goes on in another engine: equal tokens, and nothing believed that does not fit."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from drive import KV_BYTES, Answer, engine_for, take
from headway.assemble import join_peers
from headway.core.errors import RequestError
from headway.core.parcel import MAX_PARCEL_BYTES, REFUSALS, Parcel, decode_parcel, encode
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.handover import Handover
from headway.runtime.kvstore import handover as wire
from headway.runtime.kvstore.arena import ArenaPlace
from parity.tiny import TWO_LAYERS, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 70,
}
MODELS = {"full": ("llama", {}), "window": ("qwen3", WINDOWS)}
FORMATS = ("int8", "int4", "int8/int4", "int4/int8")
KINDS = {"own": {}, **{name: {"kv_cache_dtype": name} for name in FORMATS}}
PROMPT = [3 + number * 7 % 50 for number in range(200)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, more = MODELS[request.param]
    return save(tiny_model(family, **TWO_LAYERS | more), tmp_path_factory.mktemp("handed"))


class Pair:
    """A prefill engine and a decode engine, joined by a socket."""

    def __init__(self, folder: Path, tmp_path: Path, *, tcp: bool = False, **how: object) -> None:
        sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_memory": KV_BYTES}
        self.engines = [engine_for(folder, **{**sizes, **how}) for _ in range(2)]
        self.sides: list[Handover] = []
        for name, engine in zip("pd", self.engines, strict=True):
            address = "127.0.0.1:0" if tcp else f"unix:{tmp_path / name}"
            made = join_peers(engine, folder, address, secret=b"s", root=tmp_path / "kv")
            self.sides.append(made)
            engine.kv.tiers.recompute_s = lambda end, start: 60.0

    def close(self) -> None:
        for engine in self.engines:
            engine.executor.transfers.peers.exports.close()

    def prefill(self, request: Request, count: int = 1) -> tuple[list[int], bytes]:
        """(the first tokens, the parcel) of a request that the first engine begins."""
        engine, side = self.engines[0], self.sides[0]
        engine.add(request)
        side.offer(request.request_id)
        tokens: list[int] = []
        while len(tokens) < count:
            for update in engine.step()[0]:
                tokens += update.token_ids
            engine.check_integrity()
        frame = side.hand_over(request.request_id)
        rest(engine)
        return tokens, frame

    def decode(self, request: Request, frame: bytes) -> tuple[str, list[int], int]:
        """(the refusal, the tokens, prompt tokens found) of what the second engine goes on with."""
        engine = self.engines[1]
        refusal = self.sides[1].take_over(request, frame)
        answer, computed = Answer(), 0
        while engine.has_work:
            updates, record = engine.step()
            computed += record.num_prefill_tokens
            for update in updates:
                take(answer, update)
            engine.check_integrity()
        return refusal, answer.token_ids, computed


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for a thread of the other side."""
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def rest(engine: Engine) -> None:
    """The steps of an engine without requests to advance."""
    while engine.has_work:
        engine.step()
        engine.check_integrity()


@pytest.fixture
def pair(folder: Path, tmp_path: Path):
    made = Pair(folder, tmp_path)
    yield made
    made.close()


def alone(folder: Path, request: Request, **how: object) -> list[int]:
    """Its tokens in one engine."""
    engine, answer = engine_for(folder, max_num_batched_tokens=64, **how), Answer()
    engine.add(request)
    while engine.has_work:
        for update in engine.step()[0]:
            take(answer, update)
    return answer.token_ids


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [("own", GREEDY), ("own", SEEDED), ("own", UNSEEDED), *((name, SEEDED) for name in FORMATS)],
    ids=["greedy", "seeded", "no seed", *FORMATS],
)
def test_tokens_are_those_of_one_engine(folder, tmp_path, kind, sampling):
    request = Request(3, PROMPT, sampling)
    expected = alone(folder, request, **KINDS[kind])
    pair = Pair(folder, tmp_path, tcp=kind == "int8", **KINDS[kind])
    first, frame = pair.prefill(request)
    refusal, rest_of, computed = pair.decode(msgspec.structs.replace(request, request_id=9), frame)
    size = pair.engines[1].settings.cache.block_size
    assert (refusal, first + rest_of) == ("", expected)
    assert computed <= 1 + len(PROMPT) % size + size
    wait_until(lambda: pair.engines[0].executor.transfers.peers.exports.num_bytes == 0)
    pair.close()


def test_a_request_continues_in_the_middle_of_its_answer(pair, folder):
    request = Request(0, PROMPT, GREEDY)
    expected = alone(folder, request)
    first, frame = pair.prefill(request, 20)
    refusal, rest_of, _ = pair.decode(request, frame)
    assert (refusal, first + rest_of) == ("", expected)


def changed(frame: bytes, **what: object) -> bytes:
    return encode(msgspec.structs.replace(decode_parcel(frame), **what))


def bad_parcels(frame: bytes) -> dict[str, bytes]:
    """Name of the refusal → a parcel with one fault."""
    good = decode_parcel(frame)
    other = msgspec.structs.replace(good.request, sampling=SEEDED)
    return {
        "truncated": frame[:-1],
        "too long": bytes(MAX_PARCEL_BYTES + 1),
        "version": changed(frame, version=2),
        "fingerprint": changed(frame, fingerprint=bytes(32)),
        "salt": changed(frame, root=bytes(32)),
        "request": changed(frame, request=other),
        "tokens": changed(frame, tokens=[1, *good.tokens[1:]]),
        "group": changed(frame, groups=[*good.groups, (0, 1)]),
        "blocks": changed(frame, groups=[(0, 1 + len(PROMPT))] * len(good.groups)),
    }


def test_a_wrong_parcel_is_refused_with_a_reason_and_computed(pair, folder):
    request = Request(0, PROMPT, GREEDY)
    expected = alone(folder, request)
    _, frame = pair.prefill(request)
    number = 1
    for name, bad in bad_parcels(frame).items():
        pair.engines[1].kv.forget_free()
        asked = msgspec.structs.replace(request, request_id=number)
        refusal, tokens, computed = pair.decode(asked, bad)
        assert (refusal, tokens) == (name, expected), name
        assert computed == len(PROMPT)
        number += 1
    assert {*bad_parcels(frame), "replayed"} == REFUSALS.keys()


def test_a_parcel_is_taken_once(pair):
    request = Request(0, PROMPT, GREEDY)
    _, frame = pair.prefill(request)
    assert pair.decode(request, frame)[0] == ""
    assert pair.decode(request, frame)[0] == "replayed"


def test_a_foreign_salt_is_refused(pair, folder):
    """A client that sends another client's parcel with its own key does not get those blocks."""
    request = Request(0, PROMPT, GREEDY, Principal(cache_salt="alice"))
    _, frame = pair.prefill(request)
    asked = msgspec.structs.replace(request, principal=Principal(cache_salt="mallory"))
    assert pair.decode(asked, frame)[0] == "salt"


def test_random_bytes_and_cuts_are_refused(pair):
    _, frame = pair.prefill(Request(0, PROMPT, GREEDY))
    draw = random.Random(0)
    for number in range(200):
        at = draw.randrange(len(frame))
        bad = frame[:at] if number % 2 else frame[:at] + draw.randbytes(4) + frame[at + 4 :]
        try:
            parcel = decode_parcel(bad)
        except ValueError:
            continue
        assert isinstance(parcel, Parcel)


def test_expired_blocks_are_computed(pair, folder, caplog):
    """Their lease has ended, or the engine that held them."""
    request = Request(0, PROMPT, GREEDY)
    expected = alone(folder, request)
    exports = pair.engines[0].executor.transfers.peers.exports
    first, frame = pair.prefill(request)
    exports.release(decode_parcel(frame).parcel_id)
    refusal, rest_of, computed = pair.decode(request, frame)
    assert (refusal, first + rest_of) == ("", expected)
    assert computed >= len(PROMPT)
    assert "were not received and are computed" in caplog.text


def test_blocks_of_an_ended_engine_are_computed(pair, folder, caplog):
    request = Request(0, PROMPT, GREEDY)
    expected = alone(folder, request)
    first, frame = pair.prefill(request)
    pair.engines[0].executor.transfers.peers.exports.close()
    refusal, rest_of, _ = pair.decode(request, frame)
    assert (refusal, first + rest_of) == ("", expected)
    assert "were not received and are computed" in caplog.text


def test_a_cached_prefix_is_handed_over_too(pair, folder):
    """Blocks that the first engine did not compute for this request are sent with the rest."""
    expected = alone(folder, Request(0, PROMPT, GREEDY))
    pair.engines[0].add(Request(7, PROMPT[:150], GREEDY))
    rest(pair.engines[0])
    first, frame = pair.prefill(Request(0, PROMPT, GREEDY))
    refusal, rest_of, computed = pair.decode(Request(0, PROMPT, GREEDY), frame)
    assert (refusal, first + rest_of) == ("", expected) and computed <= 2 * 16


def test_several_answers_are_not_handed_over(pair):
    request = Request(0, PROMPT, SamplingParams(n=2, max_tokens=4))
    pair.engines[0].add(request)
    with pytest.raises(RequestError, match="several answers"):
        pair.sides[0].offer(0)
    pair.engines[0].abort(0)
    rest(pair.engines[0])


def test_a_finished_request_is_not_handed_over(pair):
    with pytest.raises(RequestError, match="no such request"):
        pair.sides[0].hand_over(77)


# ── the wire ────────────────────────────────────────────────────────────────────────────────────


BLOCK, OWNER, CONTENT = (0, bytes(range(32))), b"o" * 32, bytes(range(256)) * 40
SIZE = len(CONTENT)
ID = b"i" * 16


@pytest.fixture(params=["unix", "tcp"])
def exports(request: pytest.FixtureRequest, tmp_path: Path):
    """Exports over shared memory, and over a socket."""
    address = f"unix:{tmp_path / 'x'}" if request.param == "unix" else "127.0.0.1:0"
    made = wire.Exports(address, b"f" * 32, secret=b"s", lease_s=60.0)
    made.put(ID, BLOCK, OWNER, memoryview(bytearray(CONTENT)))
    yield made
    made.close()


def pull_block(exports: wire.Exports, *, mark=b"f" * 32, secret=b"s", size=SIZE, parcel=ID):
    """The bytes that a taker gets, or None."""
    store, into = wire.PeerStore(mark, secret=secret), memoryview(bytearray(size))
    peer = wire.messages.peer_of(exports.address, parcel)
    store.expect(peer)
    return bytes(into) if store._pull(peer, [BLOCK], [into]) else None


def test_a_block_arrives_complete_and_once(exports):
    assert pull_block(exports) == CONTENT
    wait_until(lambda: exports.num_bytes == 0)
    assert pull_block(exports) is None


@pytest.mark.parametrize(
    "how", [{"mark": bytes(32)}, {"secret": b"other"}, {"size": 5}, {"size": len(CONTENT) + 1}]
)
def test_a_wrong_client_gets_nothing(exports, how, caplog):
    assert pull_block(exports, **how) is None
    assert exports.num_bytes == len(CONTENT)


@pytest.mark.parametrize("exports", ["tcp"], indirect=True)
def test_a_damaged_block_is_refused(exports, monkeypatch, caplog):
    monkeypatch.setattr(wire, "send_block", lambda connection, header, data: connection.sendall(
        header + bytes([data[0] ^ 1]) + bytes(data[1:])))  # fmt: skip
    assert pull_block(exports) is None and "damaged" in caplog.text


@pytest.mark.parametrize("exports", ["unix"], indirect=True)
def test_a_block_overwritten_during_the_read_is_refused(exports, monkeypatch, caplog):
    """The stamp is compared after the copy: the bytes may belong to another block."""
    lend = exports._send_places

    def late(connection, asked):
        places = [ArenaPlace(*exports._wait_for_block(ID, block)[1]) for block in asked.blocks]
        exports._wait_for_block = lambda parcel_id, block: (OWNER, places[0])
        exports.release(ID)
        exports.put(b"j" * 16, BLOCK, OWNER, memoryview(bytes(SIZE)))
        lend(connection, asked)

    monkeypatch.setattr(exports, "_send_places", late)
    assert pull_block(exports) is None and "overwritten" in caplog.text
    assert exports.num_bytes == SIZE


@pytest.mark.parametrize("exports", ["unix"], indirect=True)
def test_memory_is_mapped_once_and_again_after_a_failed_pull(exports, tmp_path, caplog):
    store, hows = wire.PeerStore(b"f" * 32, secret=b"s"), []
    lend = exports._send_places
    exports._send_places = lambda connection, asked: (
        hows.append(asked.how),
        lend(connection, asked),
    )

    def pull(parcel: bytes) -> bytes | None:
        into = memoryview(bytearray(SIZE))
        peer = wire.messages.peer_of(exports.address, parcel)
        store.expect(peer)
        return bytes(into) if store._pull(peer, [BLOCK], [into]) else None

    for number in range(3):
        parcel = bytes([number]) * 16
        exports.put(parcel, BLOCK, OWNER, memoryview(bytes([number]) * SIZE))
        assert pull(parcel) == bytes([number]) * SIZE
    assert pull(b"n" * 16) is None and "not there any more" in caplog.text
    exports.put(ID, BLOCK, OWNER, memoryview(CONTENT))
    assert pull(ID) == CONTENT
    file, known = wire.messages.PLACES_AND_FILE, wire.messages.PLACES
    assert hows == [file, known, known, known, file]


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1", b"\x09\0\0\0ab", b""])
def test_invalid_replies_about_places_are_refused(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((ValueError, OSError), match=r"places|message|closed"):
            wire.receive_lent(ours)


def test_a_lease_ends_and_a_bound_holds(tmp_path, monkeypatch):
    made = wire.Exports(f"unix:{tmp_path / 'x'}", bytes(32), lease_s=-1.0)
    made.put(ID, BLOCK, OWNER, memoryview(CONTENT))
    assert made.num_bytes == 0
    made.close()
    made = wire.Exports(f"unix:{tmp_path / 'x'}", bytes(32), limit_bytes=10)
    made.put(ID, BLOCK, OWNER, memoryview(CONTENT))
    assert made.num_bytes == 0
    made.close()


@pytest.mark.parametrize(
    "sent", [b"", b"\xff\xff\xff\xff", b"\x05\0\0\0hello", b"\x30\0\0\0" + bytes(48), b"\x30\0"]
)
def test_after_invalid_bytes_the_next_client_is_served(exports, sent):
    with wire.connect(exports.address) as connection:
        wire.receive(connection, wire.NONCE_BYTES)
        # The four bytes 05 00 00 00 are a wrong length: it may hang up before we shut our side.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert pull_block(exports) == CONTENT


@pytest.mark.parametrize("exports", ["unix"], indirect=True)
def test_only_the_user_may_open_the_socket(exports):
    path = Path(exports.address.removeprefix(wire.UNIX))
    assert path.stat().st_mode & 0o777 == 0o600
