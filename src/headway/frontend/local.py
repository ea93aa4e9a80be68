"""Client of an engine in this process: no second process, no socket.

It steps an assembled engine in the event loop, between the tasks that wait for answers. Errors are
those of a server; the engine cannot die alone, so there are no restarts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from headway.core.errors import EngineDownError, RequestError, ServerFaultError
from headway.core.records import StepRecord
from headway.core.request import Request
from headway.engine.engine import Engine
from headway.engine.process import ready_message
from headway.frontend.answer import ResumedTokens, Stream, Streams
from headway.frontend.client import not_ready
from headway.frontend.text import OutputParserSpec, Tokenizer

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
        self.on_record = on_record
        self.info = ready_message(engine)
        self.status = "ready"
        self.num_restarts = 0
        self._streams = Streams(tokenizer, self._abort)
        self._arrived = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.status == "ready"

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Start stepping; a compiled grammar wakes the stepper from its own thread."""
        grammars = self.engine.grammars
        if grammars is not None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._arrived.set)

            grammars.on_news = wake
        self._stepper = asyncio.create_task(self._step())

    async def wait_ready(self) -> None:
        """Return at once: the engine is ready before it is passed here."""

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
            self._streams.feed(updates)
            for request_id, error in engine.drain_refusals():
                self._streams.fail(request_id, error)
            self.on_record(record)
            await asyncio.sleep(0)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones, at most `timeout_s`."""
        self.status = "draining"
        await self._streams.wait_empty(timeout_s, self.engine.clock)
        self._streams.fail_all(stopped())

    async def stop(self) -> None:
        """Step no more; safe to call twice."""
        if self._stepper is not None:
            self._stepper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
        self._end("stopped", stopped())

    def _end(self, status: str, error: RequestError) -> None:
        self.status = status
        self._streams.fail_all(error)

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Add a request to the engine; raises RequestError if it can never run."""
        if not self.ready:
            raise not_ready(self.status)
        self.engine.add(request, resumed_tokens)
        self._arrived.set()
        return self._streams.open(request, parser_spec, resumed_tokens)

    def forget(self, owner: bytes) -> None:
        """Drop the KV blocks of `owner` in the engine."""
        self.engine.forget(owner)
        self._arrived.set()

    def _abort(self, request_id: int, index: int | None) -> None:
        self.engine.abort(request_id, index)
        self._arrived.set()


def stopped() -> EngineDownError:
    return EngineDownError("The engine was stopped.", code="shutting_down")
