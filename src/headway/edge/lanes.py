"""Threads for work that is too long for the event loop, users in turn: parsing, tokenizing.

Given work and whom it is for a lane waits for a turn, runs the work in a thread, and gives its
result. The users in a lane take turns, however much each of them has sent, and none has all of its
threads. Who leaves gives up the turn: what has not begun never does, and what runs stops at its
next `checkpoint`.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive

from headway.core.errors import RequestError
from headway.edge.body_turns import BodyTurns

LONG_BYTES = 64 * 1024
"""A body from this size on is long: up to some 50 ms of tokenizing are short."""

Result = TypeVar("Result")


def nothing() -> None:
    """What a dropped job has left to do."""


class WorkItem:
    """Work that waits for a thread or has one; `dropped` when its client has gone."""

    __slots__ = ("answer", "dropped", "user", "work")

    def __init__(self, user: str, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.user = user
        self.work = work
        self.answer = answer
        self.dropped = False

    def drop(self) -> None:
        """Release the body of work whose client has gone; the item keeps its place in the queue."""
        self.dropped, self.work = True, nothing


class Current(threading.local):
    """The work item of this thread."""

    job: WorkItem | None = None


current = Current()


def checkpoint() -> None:
    """Raise RequestError when the client has gone; long work calls it between its parts."""
    job = current.job
    if job is not None and job.dropped:
        raise client_left_error()


def client_left_error() -> RequestError:
    return RequestError("The client left before it was answered.", code="client_left")


class FairThreadPool:
    """Thread pool whose queue serves users round-robin: user → items, the next user first."""

    def __init__(self, name: str, num_threads: int, changed: Callable[[], None] = nothing) -> None:
        """`changed` is called when work is done or dropped."""
        self._threads = ThreadPoolExecutor(num_threads, f"headway-{name}")
        self._changed = changed
        self._num_threads = self._free = num_threads
        self._each = max(1, num_threads - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[WorkItem]] = {}

    @property
    def num_waiting(self) -> int:
        """Queued items that are not dropped."""
        return sum(map(self.num_waiting_of, self._waiting))

    def num_waiting_of(self, user: str) -> int:
        """Queued items of one user that are not dropped."""
        return sum(not job.dropped for job in self._waiting.get(user, ()))

    @property
    def is_busy(self) -> bool:
        """Whether a thread works."""
        return self._free < self._num_threads

    async def run(self, user: str, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, or raise what it raises, once it is the turn of `user`."""
        job = WorkItem(user, work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(user, deque()).append(job)
        self._start()
        try:
            result: Result = await job.answer
            return result
        finally:
            job.drop()
            del job, work  # with its answer: an error would keep the whole body alive
            self._changed()

    def _start(self) -> None:
        """Give the free threads to queued users, one each before a second one of any user."""
        for user in list(self._waiting):
            jobs = self._waiting[user]
            while jobs and jobs[0].dropped:
                jobs.popleft()
            if jobs and self._free and self._running[user] < self._each:
                self._free -= 1
                self._running[user] += 1
                self._threads.submit(self._work, jobs.popleft(), asyncio.get_running_loop())
                self._waiting[user] = self._waiting.pop(user)  # behind the others
            if not jobs:
                del self._waiting[user]

    def _work(self, job: WorkItem, loop: asyncio.AbstractEventLoop) -> None:
        """Run the work in a thread and hand its result to the loop."""
        current.job = job
        result = failure = None
        try:
            checkpoint()
            result = job.work()
        except BaseException as error:
            failure = error
        current.job = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(self._finish, job, result, failure)
        del job, result, failure

    def _finish(self, job: WorkItem, result: Any, failure: BaseException | None) -> None:
        self._free += 1
        self._running[job.user] -= 1
        if not self._running[job.user]:
            del self._running[job.user]
        if not job.answer.done():
            if failure is None:
                job.answer.set_result(result)
            else:
                job.answer.set_exception(failure)
        self._start()
        self._changed()


class BodyPool:
    """Reads and parses long bodies: users in turn, one thread that parses."""

    def __init__(self) -> None:
        self.turns = BodyTurns(self._is_parsing, self._has_room)
        self.parsing = FairThreadPool("parse", 1, self.turns.go_on)

    def _is_parsing(self) -> bool:
        return self.parsing.is_busy

    def _has_room(self, user: str) -> bool:
        """Whether the next body of a user may be read on."""
        return True

    async def parse(self, user: str, receive: Receive, work: Callable[[], Result]) -> Result:
        """Run what parses a large body; RequestError when its client leaves."""
        return await unless_gone(self.parsing.run(user, rested(work)), receive)


def rested(work: Callable[[], Result]) -> Callable[[], Result]:
    """`work`, and a rest as long as it took: the interpreter's lock was its own meanwhile, and the
    event loop, which needs the lock for each thing it does, catches up."""

    def both() -> Result:
        began_s = time.thread_time()
        try:
            return work()
        finally:
            time.sleep(time.thread_time() - began_s)

    return both


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of `work`, which ends with the client's connection; the body has been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_left_error()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # an error in them would keep the whole body alive


async def departure(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
