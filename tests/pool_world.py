"""Engines of two roles behind `PrefillDecodePools`, in one process: what passes between them is a
queue of frames that a test delivers when it likes, and an engine is killed by taking it away.

Both ends are the real ones: `ProcessClient` without its process, and what the engine's process does
with a frame. The fake runtime checks the KV that each step reads.
"""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from cached_world import CachedWorld
from engine_world import CHEAP, VOCAB, make_settings
from fakes import answer
from headway.core.request import Request, SamplingParams
from headway.engine import messages, process
from headway.engine.handover import Handover
from headway.frontend.answer import Stream
from headway.frontend.pools import PrefillDecodePools
from headway.frontend.process import ProcessClient

MARK = b"m" * 32
MAX_LEN = 48
SHAPE = make_settings(
    num_blocks=(60,),
    windows=(0,),
    prefix_cache="lfu",
    block_bytes=(CHEAP,),
    max_model_len=MAX_LEN,
    max_num_seqs=4,
    budget=12,
)


class Shelf(dict):
    """What one engine keeps for others, who look on all shelves."""

    def __init__(self, shelves: list["Shelf"]) -> None:
        super().__init__()
        self.shelves = shelves
        self.over: set[str] = set()
        shelves.append(self)

    def __setitem__(self, place, cells) -> None:
        if place[0] not in self.over:
            super().__setitem__(place, cells)

    def get(self, place, default=None):
        found = [shelf[place] for shelf in self.shelves if place in shelf]
        return found[0] if found else default

    def release(self, parcel_id: bytes) -> None:
        self.over.add(parcel_id.hex())
        for place in [place for place in self if place[0] == parcel_id.hex()]:
            del self[place]


class Socket:
    """The engine's end: what came in, and what it has sent."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()

    def recv(self) -> bytes:
        return self.inbox.popleft()

    def send(self, frame: bytes) -> None:
        self.outbox.append(frame)


class Living:
    """An engine that runs."""

    def __init__(self, shelves: list[Shelf], address: str) -> None:
        self.socket, self.shelf = Socket(), Shelf(shelves)
        self.world = CachedWorld(SHAPE)
        self.world.executor.exports = self.shelf
        self.engine = self.world.engine
        self.handover = Handover(self.engine, MARK, address, self.shelf.release)


class WorldClient(ProcessClient):
    """A client whose engine is here; `living` is None while it is dead."""

    def __init__(self, number: int, shelves: list[Shelf]) -> None:
        super().__init__(lambda sockets: [], tokenizer=None)
        self.number, self.shelves = number, shelves
        self.living: Living | None = None
        self.num_born = 0

    def be_born(self) -> None:
        self.num_born += 1
        self.living = Living(self.shelves, f"{self.number}.{self.num_born}")
        self._take(process.ready_message(self.living.engine))

    def die(self) -> None:
        """As a real client goes about it; nobody is charged, for it was no request's fault."""
        assert self.living is not None
        self.shelves[:] = [shelf for shelf in self.shelves if shelf is not self.living.shelf]
        self.living = None
        self._set_status("restarting")
        self._died_s = self.clock.now_s()
        self._quarantine.charge(self._streams)
        for stream in self._streams.values():
            stream.num_deaths = 0
        self.on_orphans(self._streams, True)

    def _send(self, message: messages.ToEngine) -> bool:
        if self.living is None:
            return False
        self.living.socket.inbox.append(messages.encode(message))
        return True

    # ── what the test chooses the moment of ─────────────────────────────────────────────────

    def deliver(self) -> bool:
        """A frame to the engine."""
        living = self.living
        if living is None or not living.socket.inbox:
            return False
        assert process.handle_message(living.engine, living.socket, living.handover)  # type: ignore[arg-type]
        living.engine.check_integrity()
        return True

    def step(self) -> bool:
        living = self.living
        if living is None or not living.engine.has_work:
            return False
        process.step(living.engine, living.socket, living.handover)  # type: ignore[arg-type]
        living.engine.check_integrity()
        return True

    def hear(self) -> bool:
        """A frame from the engine."""
        if self.living is None or not self.living.socket.outbox:
            return False
        self._take(messages.decode_from_engine(self.living.socket.outbox.popleft()))
        return True


@dataclass
class PoolWorld:
    """`num_prefill` engines for prompts and `num_decode` for answers, and all that was asked."""

    num_prefill: int = 1
    num_decode: int = 1
    local_tokens: int = 4
    seed: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    outcomes: dict[str, int] = field(default_factory=dict)
    handed: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shelves: list[Shelf] = []
        count = self.num_prefill + self.num_decode
        self.clients = [WorldClient(number, self.shelves) for number in range(count)]
        self.pools = PrefillDecodePools(
            self.clients,
            self.num_prefill,
            local_tokens=self.local_tokens,
            on_handed=lambda request_id, engine: self.handed.append((request_id, engine)),
            on_outcome=self._note,
        )
        for client in self.clients:
            client.be_born()

    def _note(self, outcome: str, seconds: float | None) -> None:
        assert (seconds is not None) == (outcome == "taken")
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def ask(self, prompt: list[int], **sampling) -> int:
        number = len(self.streams) + 1
        chosen = SamplingParams(
            **{"max_tokens": 6, "ignore_eos": True, "seed": 3 + number, **sampling}
        )
        self.streams[number] = self.pools.submit(Request(number, prompt, chosen))
        return number

    def leave(self, number: int) -> None:
        """The client of this one is gone."""
        self.left.add(number)
        self.streams[number].close()

    def act(self) -> bool:
        """One thing, of one engine, that may happen next; False where nothing may."""
        acts = [a for c in self.clients for a in (c.deliver, c.step, c.hear)]
        self.random.shuffle(acts)
        return any(act() for act in acts)

    async def settle(self) -> None:
        """Everybody lives, and all goes on to its end."""
        for client in self.clients:
            if client.living is None:
                client.be_born()
        quiet = 0
        while quiet < 20:  # trials are tasks: they go on while nothing else does
            quiet = 0 if self.act() else quiet + 1
            await asyncio.sleep(0)

    async def tokens(self, number: int) -> list[list[int]]:
        """What the client of this one read, by its answers."""
        stream = self.streams[number]
        found: list[list[int]] = [[] for _ in range(stream.answer.request.sampling.n)]
        while deltas := await stream.next():
            for delta in deltas:
                found[delta.index] += delta.token_ids
        stream.close()
        return found

    async def check(self) -> None:
        """Every answer is what one engine alone would have given, and nobody holds anything."""
        await self.settle()
        for number, stream in self.streams.items():
            if number not in self.left:
                assert stream.is_complete, f"{number} is lost"
                assert await self.tokens(number) == expected(stream.answer.request)
        await self.settle()
        assert not self.pools._handovers
        for client in self.clients:
            assert client.num_requests == 0 and client.living is not None
            client.living.engine.check_integrity()
            assert client.living.engine.kv.num_used == 0
            assert not client.living.shelf, "blocks are kept for nobody"

    async def close(self) -> None:
        await self.pools.stop()


def expected(request: Request) -> list[list[int]]:
    """The answers without any engine."""
    sampling = request.sampling
    return [
        answer(
            request.prompt_token_ids,
            sampling,
            seed=sampling.seed,
            index=index,
            stop_ids=set(),
            max_len=MAX_LEN,
            vocab_size=VOCAB,
        )[0]
        for index in range(sampling.n)
    ]
