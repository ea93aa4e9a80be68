"""The tokenizer pool: short before long, users in turn, and nothing for those who have left."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from headway.core.errors import RequestError
from headway.edge import lanes
from headway.edge.lanes import LONG_BYTES, FairThreadPool, checkpoint, current
from headway.server import tokenizer_pool
from headway.server.tokenizer_pool import (
    LONG_THREADS,
    SHORT_THREADS,
    TRIM_DELAY_S,
    TRIM_MIN_BYTES,
    TokenizerPool,
)


async def stays() -> dict[str, Any]:
    """What a connection says whose client waits."""
    await asyncio.Event().wait()
    raise AssertionError


async def leaves() -> dict[str, Any]:
    """What a connection says whose client is gone."""
    return {"type": "http.disconnect"}


async def until(condition: Callable[[], Any]) -> None:
    """Wait for `condition`; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.001)


class Body:
    """Some megabytes that wait for their turn."""

    def parsed(self) -> None:
        raise AssertionError


class Gate:
    """Work that waits to be let through, and who began it; `ends` let one through alone."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            self.ends.get(name, self.opened).wait()
            return name

        return run


async def test_a_short_text_does_not_wait_for_long_ones() -> None:
    pool, gate = TokenizerPool(), Gate()
    long = [
        asyncio.create_task(pool.run(f"user {i}", LONG_BYTES, stays, gate.work(str(i))))
        for i in range(8)
    ]
    await until(lambda: len(gate.begun) == LONG_THREADS)
    assert await pool.run("another", 10, stays, lambda: "short") == "short"
    assert await pool.run("user 0", LONG_BYTES - 1, stays, lambda: "short") == "short"
    assert len(gate.begun) == LONG_THREADS
    gate.opened.set()
    assert await asyncio.gather(*long) == [str(i) for i in range(8)]


async def test_users_take_turns_and_none_has_every_thread() -> None:
    """One piece of work ends at a time, the oldest, and the next begins in its place."""
    lane, gate = FairThreadPool("test", SHORT_THREADS), Gate()
    gate.ends = {f"{user}{i}": threading.Event() for user in "ab" for i in range(6)}
    tasks = [asyncio.create_task(lane.run("a", gate.work(f"a{i}"))) for i in range(6)]
    await until(lambda: len(gate.begun) == SHORT_THREADS - 1)
    tasks += [asyncio.create_task(lane.run("b", gate.work(f"b{i}"))) for i in range(3)]
    await until(lambda: "b0" in gate.begun)
    for number in range(len(tasks)):
        most = min(SHORT_THREADS + number, len(tasks))
        await until(lambda most=most: len(gate.begun) == most)
        gate.ends[gate.begun[number]].set()
    await asyncio.gather(*tasks)
    assert sorted(gate.begun[:2]) == ["a0", "a1"]
    assert gate.begun[2:] == ["b0", "a2", "b1", "a3", "b2", "a4", "a5"]
    assert lane.num_waiting == 0


async def test_a_client_that_leaves_gives_up_its_turn() -> None:
    pool, gate = TokenizerPool(), Gate()
    running = asyncio.create_task(pool.run("a", LONG_BYTES, stays, gate.work("first")))
    await until(lambda: gate.begun)
    with pytest.raises(RequestError) as caught:
        await pool.run("a", LONG_BYTES, leaves, gate.work("never"))
    assert caught.value.code == "client_left"
    assert pool.long.num_waiting == 0
    gate.opened.set()
    assert await running == "first"
    assert await pool.run("a", LONG_BYTES, stays, gate.work("last")) == "last"
    assert gate.begun == ["first", "last"]


async def test_work_for_a_client_that_is_gone_stops_between_its_parts() -> None:
    pool, parts, left = TokenizerPool(), [], asyncio.Event()

    def work() -> None:
        job = current.job
        while not (job and job.dropped):
            parts.append(1)
        checkpoint()
        parts.append("more")

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(pool.run("a", 1, receive, work))
    await until(lambda: parts)
    left.set()
    with pytest.raises(RequestError):
        await task
    assert await pool.run("a", 1, stays, lambda: "free") == "free"
    assert "more" not in parts


async def test_the_body_of_a_client_that_is_gone_is_freed() -> None:
    """Behind a long job of the same user, and one of his that still waits."""
    lane, gate = FairThreadPool("test", 1), Gate()
    kept = [asyncio.create_task(lane.run("a", gate.work(name))) for name in ("runs", "waits")]
    await until(lambda: gate.begun)
    body = Body()
    left = asyncio.create_task(lane.run("a", body.parsed))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gone = weakref.ref(body)
    del body, left
    gc.collect()
    gone_early = gone() is None
    gate.opened.set()
    assert gone_early
    assert await asyncio.gather(*kept) == ["runs", "waits"]


async def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await TokenizerPool().run("a", 1, stays, lambda: 1 // 0)


async def test_memory_goes_back_once_for_bodies_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after those that come later; its time is over when the test says so."""
    pool, trims, timers = TokenizerPool(), [], []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def held(delay: float, *call: Any) -> Any:
        return timers.append(call[0]) if delay == TRIM_DELAY_S else later(delay, *call)

    monkeypatch.setattr(loop, "call_later", held)
    monkeypatch.setattr(tokenizer_pool, "trim_heap", lambda: trims.append(1))
    for expected in (1, 2):
        jobs = [pool.run(f"user {i}", TRIM_MIN_BYTES, stays, lambda: None) for i in range(8)]
        await asyncio.gather(*jobs)
        (trim,) = timers
        timers.clear()
        trim()
        await until(lambda expected=expected: len(trims) == expected)
    await pool.run("a", TRIM_MIN_BYTES - 1, stays, lambda: None)
    assert not timers


async def test_the_parser_rests_as_long_as_it_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after what cannot be parsed; the pause is the thread's, not the lock's."""
    rests: list[float] = []
    monkeypatch.setattr(lanes.time, "sleep", rests.append)

    def work() -> int:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.02:
            pass
        return 1 // len(rests)

    with pytest.raises(ZeroDivisionError):
        await TokenizerPool().parse("a", stays, work)
    assert await TokenizerPool().parse("a", stays, work) == 1
    assert len(rests) == 2 and min(rests) >= 0.02
