"""An engine in this process behind the face of `EngineClient`: no second process, no socket.

Given an assembled engine it steps it in the event loop, between the tasks that wait for answers.
What a server would refuse is refused with the same errors; nothing here dies apart from the
process, so nothing is restarted.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

from headway.core.errors import EngineDownError, HeadwayError, RequestError, ServerFaultError
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.core.terms import PROMISES_NOTHING, Terms
from headway.engine.engine import Engine
from headway.engine.process import introduction
from headway.frontend.answer import Answer, Stream
from headway.frontend.text import OutputParserSpec, Tokenizer
from headway.telemetry.records import StepRecord

log = logging.getLogger(__name__)


class LocalClient:
    """One engine, stepped here while there is work."""

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Tokenizer | None,
        on_record: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.on_record = on_record
        self.info = introduction(engine)
        self.status = "ready"
        self.failure: HeadwayError | None = None
        self.num_restarts = 0
        self._streams: dict[int, Stream] = {}
        self._request_ids = itertools.count(1)
        self._arrived = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.status == "ready"

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Step from now on; a grammar that is ready wakes the stepper from its own thread."""
        grammars = self.engine.grammars
        if grammars is not None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._arrived.set)

            grammars.on_news = wake
        self._stepper = asyncio.create_task(self._step())

    async def settled(self) -> None:
        """The engine was ready before."""

    async def _step(self) -> None:
        try:
            await self._step_on()
        except Exception:
            log.exception("the engine failed")
            self._end("failed", ServerFaultError("The engine failed; the log says why."))

    async def _step_on(self) -> None:
        engine = self.engine
        while True:
            if not engine.has_work and engine.num_requests:
                engine.flush()
            if not engine.has_work:
                self._arrived.clear()
                await self._arrived.wait()
            updates, record = engine.step()
            for update in updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    stream.put(update)
            for request_id, error in engine.take_refusals():
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.fail(error)
            self.on_record(record)
            await asyncio.sleep(0)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones, at most `timeout_s`."""
        self.status = "draining"
        deadline_s = self.engine.clock.now_s() + timeout_s
        while self.engine.num_requests and self.engine.clock.now_s() < deadline_s:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Step no more; safe to call twice."""
        if self._stepper is not None:
            self._stepper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
        self._end("stopped", EngineDownError("The engine was stopped.", code="shutting_down"))

    def _end(self, status: str, error: RequestError) -> None:
        self.status = status
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        principal: Principal | None = None,
        terms: Terms = PROMISES_NOTHING,
        arrived_s: float | None = None,
        parser_spec: OutputParserSpec | None = None,
    ) -> Stream:
        """Give a request to the engine; raises RequestError when it can never run."""
        if not self.ready:
            raise EngineDownError(f"The model is not ready ({self.status}).", code="not_ready")
        request = Request(
            next(self._request_ids),
            prompt_token_ids,
            sampling,
            principal or Principal(),
            self.engine.clock.now_s() if arrived_s is None else arrived_s,
            terms=terms,
        )
        self.engine.add(request)
        stream = Stream(
            Answer(request, self.tokenizer, parser_spec), self._aborter(request.request_id)
        )
        self._streams[request.request_id] = stream
        self._arrived.set()
        return stream

    def _aborter(self, request_id: int) -> Callable[[int | None], None]:
        """What a stream calls to drop the request (None) or one of its sequences."""

        def abort(index: int | None) -> None:
            if index is None:
                self._streams.pop(request_id, None)
            self.engine.abort(request_id, index)
            self._arrived.set()

        return abort
