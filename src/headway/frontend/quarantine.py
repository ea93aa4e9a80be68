"""Crash quarantine: find the request that kills the engine by running the suspects on trial.

    engine 1 dies      a b c d were running: each is charged with one death, none fails
    engine 2           [a] alone, for some steps; then [b] in addition; [c] kills engine 2
    engine 3           c, charged twice, is refused for good; a, b and d finish

A request resumes after the tokens already sent, so one that kills at its hundredth token kills at
once in its trial. At most one request is on trial at a time, new ones last; so a request gets one
trial and costs at most two engines. A request that passed its trial is refused only after
`MAX_DEATHS_IN_ALL`, because an operator may kill one engine after the other.
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
"""Deaths, the last one on trial, after which a request is refused."""
MAX_DEATHS_IN_ALL = 8
"""Deaths in all after which a request is refused: it kills only now and then."""
TRIAL_TIMEOUT_S = 10.0
"""Upper bound of a trial; a long prompt may take longer and then runs on without one."""
TRIAL_STEPS = 4
"""Steps of a trial: a dying engine may have reported all steps but the last few."""
MAX_POISON = 1000


class CrashQuarantine:
    """Queue of the requests to resume after a death, in order of arrival.

    `poison` has the requests refused for good; the engines of one model share it.
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
        """Return whether trials are running, so that new requests have to queue."""
        return bool(self.queue)

    def charge(self, streams: dict[int, Stream]) -> list[Stream]:
        """Charge the death of an engine to its requests; return those that are now refused.

        The request on trial is charged, or without a trial every request that was running: sent to
        the engine and not complete.
        """
        self.stop()
        guilty = []
        running = {n: s for n, s in streams.items() if s.was_sent and not s.is_complete}
        tried = running.get(self._trial) if self._trial is not None else None
        most = MAX_DEATHS if tried else MAX_DEATHS_IN_ALL
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
        """Queue a request of another engine, once."""
        if request_id == self._trial or request_id not in self.queue:
            self.queue.append(request_id)

    def begin(self, streams: dict[int, Stream], send: Callable[[messages.ToEngine], bool]) -> None:
        """Start the trials in an engine that is ready, one request after the other."""
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
                    async with asyncio.timeout(TRIAL_TIMEOUT_S):
                        await self._over.wait()
                self._trial = None
            self.queue.popleft()

    def on_tokens(self, streams: dict[int, Stream], request_ids: Iterable[int]) -> None:
        """Note that requests got tokens: one more step of the trial, which may end with it."""
        if self._trial is not None and self._trial in request_ids:
            self._num_steps += 1
            stream = streams.get(self._trial)
            if self._num_steps >= TRIAL_STEPS or stream is None or stream.is_complete:
                self._over.set()

    def on_remove(self, request_id: int) -> None:
        """End the trial of a request that was removed."""
        if self._trial == request_id:
            self._over.set()

    def stop(self) -> None:
        """Stop the trials: there is no engine."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def clear(self) -> None:
        self.stop()
        self.queue.clear()
        self._trial = None

    # ── poison ──────────────────────────────────────────────────────────────────────────────

    def _remember(self, request: Request) -> None:
        self._poison[fingerprint(request)] = None
        if len(self._poison) > MAX_POISON:
            del self._poison[next(iter(self._poison))]

    def check(self, request: Request) -> None:
        """Raise RequestError for a request with the content of one that killed engines."""
        if self._poison and fingerprint(request) in self._poison:
            raise poisonous()


def submission(stream: Stream) -> messages.Submit:
    """Return the message that submits a request, with the tokens it already has."""
    return messages.Submit(
        *(stream.answer.request, stream.resumed_tokens, stream.hands_over, stream.parcel)
    )


def fingerprint(request: Request) -> bytes:
    """Return a hash that is equal for requests with the same prompt and parameters."""
    content = msgspec.msgpack.encode((request.prompt_token_ids, request.sampling, request.adapter))
    return hashlib.sha256(content).digest()


def poisonous() -> RequestError:
    return RequestError(
        f"The engine died {MAX_DEATHS} times while it ran this request; it is not tried again.",
        code="poison_request",
        status=500,
    )
