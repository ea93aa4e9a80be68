"""The answer of one request while it arrives in the server process.

The engine's client puts updates in as they come; whoever serves the request takes deltas out. It
promises an end: the last delta, or the error that was put in instead.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from headway.core.errors import RequestError, ServerFaultError
from headway.core.request import SequenceUpdate
from headway.frontend.answer import Answer, Delta


class Stream:
    """The answer of one request while it arrives; iterate over it, then it is over.

    Each turn gives the deltas that came since the last one. Raises RequestError (refused),
    EngineDownError (died for good) or ServerFaultError (its step failed).
    """

    __slots__ = (
        "_abort",
        "_arrived",
        "_error",
        "_waiter",
        "answer",
        "num_deaths",
        "on_begin",
        "over",
        "resumed_tokens",
        "was_sent",
    )

    def __init__(self, answer: Answer, abort: Callable[[int | None], None]) -> None:
        self.answer = answer
        self.over = False
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a sequence has its first token, whether or not somebody reads."""
        self.num_deaths = 0
        """Engines that died while they ran this request."""
        self.was_sent = False
        """Whether the engine that runs now was sent it."""
        self.resumed_tokens: list[list[int] | None] = [[] for _ in range(answer.request.sampling.n)]
        """By index the tokens that came, None for a sequence that is over: what resumes it."""
        self._abort = abort
        self._arrived: list[SequenceUpdate] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: SequenceUpdate) -> None:
        """Called by the client for each update."""
        self._arrived.append(update)
        if update.first_scheduled_s is not None:
            self.on_begin()
        had = self.resumed_tokens[update.index]
        if update.finish_reason is not None:
            self.resumed_tokens[update.index] = None
        elif had is not None:
            had += update.token_ids
        self._wake()

    @property
    def is_complete(self) -> bool:
        """Whether the engine has told of the end of every sequence."""
        return all(had is None for had in self.resumed_tokens)

    def fail(self, error: RequestError) -> None:
        """Called by the client when no update will follow."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> list[Delta]:
        """The deltas since the last call, at least one; [] when the answer is complete."""
        while not self.over:
            if not self._arrived:
                if self._error is not None:
                    self.over = True
                    try:
                        raise self._error
                    finally:  # its traceback holds us: a circle with all that the request held
                        self._error = None
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
            deltas = self._take()
            if deltas:
                return deltas
        return []

    def _take(self) -> list[Delta]:
        arrived, self._arrived = self._arrived, []
        answer = self.answer
        deltas = []
        for update in arrived:
            if answer.finished(update.index):
                continue
            delta, abort = answer.push(update)
            if abort:
                self.resumed_tokens[update.index] = None
                self._abort(update.index)
            if delta.finish_reason == "error":
                self.over = True
                self.close()
                raise ServerFaultError()
            deltas.append(delta)
        if answer.num_unfinished == 0:
            self.over = True
        return deltas

    def close(self) -> None:
        """Give up: what still runs of this request is aborted in the engine."""
        self._abort(None)


async def merge(streams: list[Stream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """(stream's number, its next deltas) until all are complete."""
    if len(streams) == 1:
        while deltas := await streams[0].next():
            yield 0, deltas
        return
    waiting = {asyncio.ensure_future(s.next()): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                deltas = task.result()
                if deltas:
                    waiting[asyncio.ensure_future(streams[number].next())] = number
                    yield number, deltas
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
