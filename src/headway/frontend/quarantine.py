"""Which request kills the engine: those that ran when it died go on in the next one, on trial.

    engine 1 dies      a b c d were running: each is charged with one death, none has failed
    engine 2           [a] alone, for some steps; then [b] beside it; [c] kills engine 2
    engine 3           c, charged twice, is refused for good; a, b and d go on to their ends

A request goes on behind the tokens it was told, so what kills at its hundredth token kills at once
when it is tried again. At most one request is on trial at a time, newcomers behind the others; so
a request is tried once more at most, and costs two engines at most. Who has stood its trial is
refused only after `MOST_DEATHS`: an operator who ends one engine after the other refuses nobody.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headway.core.errors import RequestError
from headway.core.request import Request
from headway.engine import messages
from headway.frontend.answer import Stream

MAX_DEATHS = 2
"""Of these the last while it was on trial."""
MOST_DEATHS = 8
"""However its trials ended: what kills now and then."""
TRIAL_S = 10.0
"""How long the next one waits for the one on trial: a long prompt may take longer."""
TRIAL_STEPS = 4
"""What a trial lasts: a dying engine may have told of all steps but the last few."""
MAX_POISON = 1000


class CrashQuarantine:
    """The requests that are to go on after a death, in the order they came.

    Those that engines of one model have refused for good are in `poison`, which they share.
    """

    def __init__(self, poison: dict[bytes, None] | None = None) -> None:
        self.queue: deque[int] = deque()
        self._trial: int | None = None
        self._over = asyncio.Event()
        self._num_steps = 0
        self._poison: dict[bytes, None] = {} if poison is None else poison
        self._task: asyncio.Task[None] | None = None

    @property
    def trying(self) -> bool:
        """Whether trials go on: newcomers have to queue."""
        return bool(self.queue)

    def charge(self, streams: dict[int, Stream]) -> list[Stream]:
        """An engine died with `streams` in it; returns those that are refused from now on.

        The death is the one's on trial, else anybody's who has not proved otherwise. Whoever was
        never sent, or has all of its tokens, did not run.
        """
        self.stop()
        guilty = []
        running = {n: s for n, s in streams.items() if s.was_sent and not s.is_complete}
        tried = running.get(self._trial) if self._trial is not None else None
        most = MAX_DEATHS if tried else MOST_DEATHS
        for stream in [tried] if tried else running.values():
            stream.num_deaths += 1
            if stream.num_deaths >= most:
                guilty.append(stream)
                self._remember(stream.answer.request)
                del streams[stream.answer.request.request_id]
        self._trial = None
        for stream in streams.values():
            stream.was_sent = False
        self.queue = deque(sorted(streams))
        return guilty

    def join(self, request_id: int) -> None:
        """Queue a request that comes from elsewhere: once, though it was here before."""
        if request_id == self._trial or request_id not in self.queue:
            self.queue.append(request_id)

    def begin(self, streams: dict[int, Stream], send: Callable[[messages.ToEngine], bool]) -> None:
        """An engine is ready: let those who wait go on, one after the other."""
        if self.queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._try_all(streams, send))

    async def _try_all(
        self, streams: dict[int, Stream], send: Callable[[messages.ToEngine], bool]
    ) -> None:
        while self.queue:
            request_id = self.queue[0]
            stream = streams.get(request_id)
            if stream is not None and not stream.is_complete:
                self._trial = request_id
                self._over.clear()
                self._num_steps = 0
                stream.was_sent = send(submission(stream))
                send(messages.Flush())  # a batch that waits to be full would wait for ever
                # `asyncio.wait_for` of Python 3.11 may lose a cancellation: one that comes when
                # the trial is just over would leave this task to try the next engine's requests.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRIAL_S):
                        await self._over.wait()
                self._trial = None
            self.queue.popleft()

    def moved(self, streams: dict[int, Stream], request_ids: Iterable[int]) -> None:
        """These have had a token: whoever was on trial has stood one step of it, or all of them."""
        if self._trial is not None and self._trial in request_ids:
            self._num_steps += 1
            stream = streams.get(self._trial)
            if self._num_steps >= TRIAL_STEPS or stream is None or stream.is_complete:
                self._over.set()

    def left(self, request_id: int) -> None:
        """This one is over."""
        if self._trial == request_id:
            self._over.set()

    def stop(self) -> None:
        """No engine is there to try anything with."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def clear(self) -> None:
        self.stop()
        self.queue.clear()
        self._trial = None

    # ── what is never tried again ───────────────────────────────────────────────────────────

    def _remember(self, request: Request) -> None:
        self._poison[fingerprint(request)] = None
        if len(self._poison) > MAX_POISON:
            del self._poison[next(iter(self._poison))]

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that is known to kill engines."""
        if self._poison and fingerprint(request) in self._poison:
            raise poisonous()


def submission(stream: Stream) -> messages.Submit:
    """What an engine is told of a request: from its beginning, or behind what is known of it."""
    return messages.Submit(
        *(stream.answer.request, stream.resumed_tokens, stream.hands_over, stream.parcel)
    )


def fingerprint(request: Request) -> bytes:
    """Equal for requests that ask the same of the engine, whoever sends them."""
    asked = msgspec.msgpack.encode((request.prompt_token_ids, request.sampling, request.adapter))
    return hashlib.sha256(asked).digest()


def poisonous() -> RequestError:
    return RequestError(
        f"The engine died {MAX_DEATHS} times while it ran this request; it is not tried again.",
        code="poison_request",
        status=500,
    )
