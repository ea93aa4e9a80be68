"""Long bodies are read one at a time: users in turn, the oldest first, and who is slow waits."""

import asyncio
import threading
from typing import Any

import pytest

from headway.edge.body import read_pieces
from headway.edge.lanes import LONG_BYTES
from headway.server.tokenizer_pool import LONG_THREADS, MAX_LONG_TEXTS_PER_USER, TokenizerPool

PIECES = 5
LIMIT = 10 * LONG_BYTES


async def stays() -> dict[str, Any]:
    """What a connection says whose client waits."""
    await asyncio.Event().wait()
    raise AssertionError


async def rounds(number: int = 200) -> None:
    """Let the event loop go round, much more often than a turn takes."""
    for _ in range(number):
        await asyncio.sleep(0)


class Bodies:
    """Bodies of `PIECES` pieces, which lie in their sockets, and who has read which piece."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.pool = pool
        self.read: list[str] = []
        self.silent: dict[str, asyncio.Event] = {}
        """Those whose clients send nothing after the first piece until the event is set."""

    def begin(self, name: str) -> asyncio.Task[bytes]:
        """Read a body of the user that `name` begins with."""
        left = [bytes([i]) * LONG_BYTES for i in range(PIECES)]

        async def receive() -> dict[str, Any]:
            if len(left) < PIECES and name in self.silent:
                await self.silent[name].wait()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.read.append(name)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def whole() -> bytes:
            return b"".join(await read_pieces(receive, LIMIT, self.pool.turns, name[0]))

        return asyncio.create_task(whole())


WHOLE = b"".join(bytes([i]) * LONG_BYTES for i in range(PIECES))


@pytest.fixture
async def bodies() -> Bodies:
    return Bodies(TokenizerPool())


async def test_one_is_read_at_a_time_the_oldest_first(bodies: Bodies) -> None:
    names = ["a1", "a2", "a3"]
    tasks = [bodies.begin(name) for name in names]
    assert await asyncio.gather(*tasks) == [WHOLE] * 3
    assert bodies.read[:3] == names  # what comes first is read at once
    assert bodies.read[3:] == [name for name in names for _ in range(PIECES - 1)]


async def test_users_take_turns(bodies: Bodies) -> None:
    tasks = [bodies.begin(name) for name in ("a1", "a2", "a3", "b1")]
    assert await asyncio.gather(*tasks) == [WHOLE] * 4
    after = bodies.read[4:]
    assert after[: 2 * PIECES - 2].count("b1") == PIECES - 1
    assert [name for name in after if name != "b1"] == ["a1"] * 4 + ["a2"] * 4 + ["a3"] * 4


async def test_who_sends_nothing_holds_up_nobody(bodies: Bodies) -> None:
    bodies.silent["a1"] = asyncio.Event()
    slow, other = bodies.begin("a1"), bodies.begin("a2")
    assert await other == WHOLE
    assert not slow.done()
    bodies.silent["a1"].set()
    assert await slow == WHOLE


async def test_who_leaves_while_he_waits_is_passed_over(bodies: Bodies) -> None:
    tasks = [bodies.begin(name) for name in ("a1", "a2", "b1")]
    await asyncio.sleep(0)
    while len(bodies.read) < 4:
        await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [WHOLE] * 2


async def test_nobody_reads_while_a_body_is_parsed(bodies: Bodies) -> None:
    """Also when its client leaves meanwhile: the thread works on."""
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    parsing = asyncio.create_task(bodies.pool.parse("a", stays, work))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    reading = bodies.begin("b1")
    await rounds()
    parsing.cancel()
    await asyncio.gather(parsing, return_exceptions=True)
    await rounds()
    assert bodies.read == ["b1"]
    gate.set()
    assert await reading == WHOLE


async def test_who_has_made_work_ahead_is_not_read_on(bodies: Bodies) -> None:
    """Neither his bodies nor his memory grow without end; others are read."""
    gate, pool = threading.Event(), bodies.pool
    ahead = [
        asyncio.create_task(pool.run("a", LONG_BYTES, stays, gate.wait))
        for _ in range(LONG_THREADS - 1 + MAX_LONG_TEXTS_PER_USER)
    ]
    await rounds()
    mine, other = bodies.begin("a1"), bodies.begin("b1")
    assert await other == WHOLE
    await rounds()
    assert bodies.read.count("a1") == 1
    gate.set()
    assert await mine == WHOLE
    await asyncio.gather(*ahead)


async def test_who_has_made_work_ahead_is_read_on_when_it_is_dropped(bodies: Bodies) -> None:
    gate, pool = threading.Event(), bodies.pool
    ahead = [
        asyncio.create_task(pool.run("a", LONG_BYTES, stays, gate.wait))
        for _ in range(LONG_THREADS - 1 + MAX_LONG_TEXTS_PER_USER)
    ]
    await rounds()
    mine = bodies.begin("a1")
    await rounds()
    assert bodies.read == ["a1"]
    ahead[-1].cancel()
    assert await mine == WHOLE
    gate.set()
    await asyncio.gather(*ahead, return_exceptions=True)
