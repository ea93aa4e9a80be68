"""Several engines of one model behind one client: `headway serve --replicas N`.

A `ProcessClient` keeps each alive. When one dies, its requests fail over to the others at once,
after the tokens already sent:

    engine 0   killed from outside: its requests are sent to 1, 2 and 3, the least busy first
    engine 1   died by itself: its requests run on trial in the others, one at a time in each
    all died   the requests wait for the first engine that is back, as with one engine

`submit` may name the engine (admission knows the prefix cache of each); if that one accepts no
request, another gets it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from headway.core.errors import HeadwayError
from headway.core.request import Request
from headway.engine.messages import Ready
from headway.frontend.answer import ResumedTokens, Stream, Streams
from headway.frontend.client import not_ready
from headway.frontend.process import ProcessClient
from headway.frontend.quarantine import MAX_DEATHS
from headway.frontend.text import OutputParserSpec

log = logging.getLogger(__name__)


class Replicas:
    """Engines that serve the same weights with the same settings."""

    def __init__(
        self,
        clients: Sequence[ProcessClient],
        *,
        on_moved: Callable[[int, int], None] = lambda request_id, engine: None,
    ) -> None:
        """Create the client; `on_moved` is called for each request that changes its engine."""
        assert clients
        self.clients = clients
        self.on_moved = on_moved
        self._starting: asyncio.Task[None] | None = None
        for number, client in enumerate(clients):
            client.on_orphans = partial(self._failover, number)

    # ── life ────────────────────────────────────────────────────────────────────────────────

    @property
    def status(self) -> str:
        """Return ready while one engine is, else the status of the first that has not failed."""
        if self.ready:
            return "ready"
        alive = [client.status for client in self.clients if client.status != "failed"]
        return alive[0] if alive else "failed"

    @property
    def ready(self) -> bool:
        return any(client.ready for client in self.clients)

    @property
    def info(self) -> Ready | None:
        """Return the introduction of one engine; None before the first was ready."""
        return next((c.info for c in self.clients if c.info is not None), None)

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self.clients)

    @property
    def statuses(self) -> list[str]:
        """Return the status of each engine."""
        return [client.status for client in self.clients]

    async def start(self) -> None:
        """Start the first engine, whose packed weights the others map, then the others."""
        await self.clients[0].start()
        self._starting = asyncio.create_task(self._start_others())

    async def _start_others(self) -> None:
        await self.clients[0].wait_ready()
        for client in self.clients[1:]:
            await client.start()

    async def wait_ready(self) -> None:
        """Wait until all are ready; raises the HeadwayError that keeps one from starting."""
        assert self._starting is not None
        await asyncio.shield(self._starting)
        await asyncio.gather(*(client.wait_ready() for client in self.clients))

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests anywhere and wait for the running ones, at most `timeout_s`."""
        await self._end_starting()
        await asyncio.gather(*(client.drain(timeout_s) for client in self.clients))

    async def stop(self) -> None:
        """End all engines; safe to call twice and at any moment."""
        await self._end_starting()
        await asyncio.gather(*(client.stop() for client in self.clients))

    async def _end_starting(self) -> None:
        """Start no further engine; `wait_ready` raises the error of the first one."""
        if self._starting is not None:
            self._starting.cancel()
            for result in await asyncio.gather(self._starting, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, HeadwayError):
                    log.error("starting the engines failed: %r", result)

    # ── talk ────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Send a request to `engine` if it is free, else to the least busy one."""
        if engine is None or not self._is_free(engine):
            target = self._choose()
            if target is None:
                raise not_ready(self.status)
            if engine is not None:
                self.on_moved(request.request_id, target)
            engine = target
        return self.clients[engine].submit(request, parser_spec, None, resumed_tokens)

    def forget(self, owner: bytes) -> None:
        """Drop the KV blocks of `owner` in every engine."""
        for client in self.clients:
            client.forget(owner)

    def _is_free(self, engine: int) -> bool:
        """Return whether an engine runs a new request at once."""
        return self.clients[engine].ready and not self.clients[engine].trying

    def _choose(self, without: int | None = None) -> int | None:
        """Return the engine for a request, or None if none accepts requests.

        Free engines come first, then those with trials, then restarting ones; of each kind the one
        with the fewest requests. After a death only ready engines count.
        """
        takers = [n for n, client in enumerate(self.clients) if client.takes and n != without]
        if without is not None:
            takers = [n for n in takers if self.clients[n].ready]
        if not takers:
            return None
        return min(takers, key=self._order)

    def _failover_target(self, stream: Stream, engine: int) -> int | None:
        """Return the engine that resumes a request of a dead one."""
        return self._choose(without=engine)

    def _order(self, engine: int) -> tuple[bool, bool, int]:
        client = self.clients[engine]
        return not client.ready, client.trying, client.num_requests

    def _failover(self, engine: int, streams: Streams, from_outside: bool) -> None:
        """Resume the requests of a dead engine in others, as far as there are any.

        A request that was in two engines killed from outside is put on trial too: the system kills
        a process that takes all memory.
        """
        for request_id in sorted(streams):
            stream = streams[request_id]
            if stream.is_complete:
                continue
            target = self._failover_target(stream, engine)
            if target is None:
                return
            del streams[request_id]
            suspect = stream.num_deaths >= (MAX_DEATHS if from_outside else 1)
            self.clients[target].adopt(stream, on_trial=suspect)
            self.on_moved(request_id, target)
