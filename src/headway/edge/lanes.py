"""Thread pools for work that is too long for the event loop, such as parsing and tokenizing.

Work is queued by user and served round-robin, and no user may occupy all threads. If a client
disconnects its work is dropped: work in the queue never starts, and running work stops at its next
`checkpoint`.
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
"""Size from which on a body is long; shorter ones take up to some 50 ms to tokenize."""

Result = TypeVar("Result")


def do_nothing() -> None:
    """Do nothing: the replacement of dropped work."""


class WorkItem:
    """Work in the queue or in a thread; `dropped` after its client disconnected."""

    __slots__ = ("answer", "dropped", "user", "work")

    def __init__(self, user: str, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.user = user
        self.work = work
        self.answer = answer
        self.dropped = False

    def drop(self) -> None:
        """Drop the work and its body; the item keeps its place in the queue."""
        self.dropped, self.work = True, do_nothing


class Current(threading.local):
    """Work item of the current thread."""

    job: WorkItem | None = None


current = Current()


def checkpoint() -> None:
    """Raise RequestError if the client disconnected; long work calls it between its parts."""
    job = current.job
    if job is not None and job.dropped:
        raise client_left_error()


def client_left_error() -> RequestError:
    return RequestError("The client left before it was answered.", code="client_left")


class FairThreadPool:
    """Thread pool whose queue serves users round-robin: user → items, the next user first."""

    def __init__(
        self, name: str, num_threads: int, changed: Callable[[], None] = do_nothing
    ) -> None:
        """`changed` is called when work is done or dropped."""
        self._threads = ThreadPoolExecutor(num_threads, f"headway-{name}")
        self._changed = changed
        self._num_threads = self._free = num_threads
        self._each = max(1, num_threads - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[WorkItem]] = {}

    @property
    def num_waiting(self) -> int:
        """Return the number of queued items that are not dropped."""
        return sum(map(self.num_waiting_of, self._waiting))

    def num_waiting_of(self, user: str) -> int:
        """Return the number of a user's queued items that are not dropped."""
        return sum(not job.dropped for job in self._waiting.get(user, ()))

    @property
    def is_busy(self) -> bool:
        """Return whether a thread is at work."""
        return self._free < self._num_threads

    async def run(self, user: str, work: Callable[[], Result]) -> Result:
        """Run `work` in its user's turn; returns its result or raises its exception."""
        job = WorkItem(user, work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(user, deque()).append(job)
        self._start()
        try:
            result: Result = await job.answer
            return result
        finally:
            job.drop()
            del job, work  # an exception in the answer would keep the whole body alive
            self._changed()

    def _start(self) -> None:
        """Assign free threads to queued users, one each before a second one of any user."""
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
        """Run the work in a thread and pass its result to the event loop."""
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
    """Reads and parses long bodies, round-robin over users, with one parsing thread."""

    def __init__(self) -> None:
        self.turns = BodyTurns(self._is_parsing, self._has_room)
        self.parsing = FairThreadPool("parse", 1, self.turns.go_on)

    def _is_parsing(self) -> bool:
        return self.parsing.is_busy

    def _has_room(self, user: str) -> bool:
        """Return whether the next body of a user may be read."""
        return True

    async def parse(self, user: str, receive: Receive, work: Callable[[], Result]) -> Result:
        """Run the parser of a long body; RequestError if its client disconnects."""
        return await unless_disconnected(self.parsing.run(user, with_pause(work)), receive)


def with_pause(work: Callable[[], Result]) -> Callable[[], Result]:
    """Return `work` followed by a pause of the same length.

    Parsing holds the interpreter's lock; in the pause the event loop catches up.
    """

    def both() -> Result:
        began_s = time.thread_time()
        try:
            return work()
        finally:
            time.sleep(time.thread_time() - began_s)

    return both


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Return the result of `work`, cancelled if the client disconnects; the body has been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_left_error()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # an exception in them would keep the whole body alive


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
