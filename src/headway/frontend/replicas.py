"""Several engines of one model behind the face of one: `headway serve --replicas N`.

Each is kept alive by a `ProcessClient` of its own. When one dies its requests go on at once in the
others, behind the tokens they were told, and nobody waits for the next engine:

    engine 0   killed from outside: its requests are sent to 1, 2 and 3, the least busy first
    engine 1   died of itself: what it ran goes to the others on trial, one at a time in each
    all gone   what is left waits for the first engine that is back, as with one engine

Whoever submits may say which engine is to answer (admission knows what each has computed); where
that one takes nothing another does.
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
        """`on_moved` is told of each request that another engine answers from now on."""
        assert clients
        self.clients = clients
        self.on_moved = on_moved
        self._starting: asyncio.Task[None] | None = None
        for number, client in enumerate(clients):
            client.on_orphans = partial(self._move, number)

    # ── life ────────────────────────────────────────────────────────────────────────────────

    @property
    def status(self) -> str:
        """Of all while they begin or end; ready while one is."""
        if self.ready:
            return "ready"
        alive = [client.status for client in self.clients if client.status != "failed"]
        return alive[0] if alive else "failed"

    @property
    def ready(self) -> bool:
        return any(client.ready for client in self.clients)

    @property
    def info(self) -> Ready | None:
        """What one engine serves; None before the first was ready."""
        return next((c.info for c in self.clients if c.info is not None), None)

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self.clients)

    @property
    def statuses(self) -> list[str]:
        """Of each engine."""
        return [client.status for client in self.clients]

    async def start(self) -> None:
        """Start the first, which leaves its packed weights for the others to map; then those."""
        await self.clients[0].start()
        self._starting = asyncio.create_task(self._start_others())

    async def _start_others(self) -> None:
        await self.clients[0].settled()
        for client in self.clients[1:]:
            await client.start()

    async def settled(self) -> None:
        """Wait until each is ready; raises the HeadwayError that keeps one from starting."""
        assert self._starting is not None
        await asyncio.shield(self._starting)
        await asyncio.gather(*(client.settled() for client in self.clients))

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests anywhere and wait for the running ones, at most `timeout_s`."""
        await self._end_starting()
        await asyncio.gather(*(client.drain(timeout_s) for client in self.clients))

    async def stop(self) -> None:
        """End all engines; safe to call twice and at any moment."""
        await self._end_starting()
        await asyncio.gather(*(client.stop() for client in self.clients))

    async def _end_starting(self) -> None:
        """Start no further engine; what kept the first from starting is told by `settled`."""
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
        """Send a request to an engine, to `engine` where that one takes it now."""
        if engine is None or not self._is_free(engine):
            found = self._choose()
            if found is None:
                raise not_ready(self.status)
            if engine is not None:
                self.on_moved(request.request_id, found)
            engine = found
        return self.clients[engine].submit(request, parser_spec, None, resumed_tokens)

    def forget(self, owner: bytes) -> None:
        """Every engine drops the KV blocks of `owner`."""
        for client in self.clients:
            client.forget(owner)

    def _is_free(self, engine: int) -> bool:
        """Whether it answers a newcomer at once."""
        return self.clients[engine].ready and not self.clients[engine].trying

    def _choose(self, without: int | None = None) -> int | None:
        """The engine with the fewest requests of those that are free, else of those that try, else
        that are being started again; None where nobody takes any."""
        takers = [n for n, client in enumerate(self.clients) if client.takes and n != without]
        if without is not None:
            takers = [n for n in takers if self.clients[n].ready]
        if not takers:
            return None
        return min(takers, key=self._order)

    def _heir(self, stream: Stream, engine: int) -> int | None:
        """Who goes on with a request of `engine`, which died."""
        return self._choose(without=engine)

    def _order(self, engine: int) -> tuple[bool, bool, int]:
        client = self.clients[engine]
        return not client.ready, client.trying, client.num_requests

    def _move(self, engine: int, streams: Streams, from_outside: bool) -> None:
        """`engine` died: let its requests go on elsewhere, as far as somebody is there.

        Who was in two engines that were killed from outside is tried as well: what takes all
        memory is killed by the system, not by itself.
        """
        for request_id in sorted(streams):
            stream = streams[request_id]
            if stream.is_complete:
                continue
            target = self._heir(stream, engine)
            if target is None:
                return
            del streams[request_id]
            suspect = stream.num_deaths >= (MAX_DEATHS if from_outside else 1)
            self.clients[target].adopt(stream, on_trial=suspect)
            self.on_moved(request_id, target)
