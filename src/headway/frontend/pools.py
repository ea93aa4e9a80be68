"""Disaggregated prefill and decode: engines of two roles behind one client.

    prefill engine   computes the prompt, samples the first token, hands the request over
    server           passes the parcel on to the decode engine with the fewest requests
    decode engine    fetches the blocks that the parcel names, and goes on with the stream

A role decides only where the server sends a request: every engine can do both. So one engine alone
serves short prompts, several answers to one prompt, and all requests while one pool is down; an
engine that changes its role finishes its running requests. If an engine dies, on either side of a
handover, its requests are recomputed after the tokens already sent:

    prefill engine 0 dies, its parcel is not yet fetched   the decode engine computes the prompt
    decode engine 1 dies                                   prefill engine 0 computes, 2 goes on
    no decode engine is there                              the prefill engine goes on
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from headway.core.clock import Clock, SystemClock
from headway.core.request import Request
from headway.engine.messages import HandedOver, HandoverNews, TakenOver
from headway.frontend.answer import ResumedTokens, Stream, Streams
from headway.frontend.client import died, not_ready
from headway.frontend.process import ProcessClient
from headway.frontend.replicas import Replicas
from headway.frontend.text import OutputParserSpec

PREFILL, DECODE = "prefill", "decode"
RESUMED, REFUSED, STAYED, LOST = "taken", "refused", "stayed", "lost"
"""Outcomes of a handover: the next engine resumed; it refused the parcel and computes the prompt;
there was no decode engine, so the prefill engine continues; the next engine died before its first
token, or the client disconnected."""
LOCAL_TOKENS = 64
"""Prompts up to this length run in a decode engine alone: that is as fast as a handover."""


class PrefillDecodePools(Replicas):
    """The first `num_prefill` engines prefill, the others decode, until roles change.

    Prompts up to `local_tokens` stay in one engine. Callbacks: `on_handed` for each request that
    another engine continues, `on_moved` for each that another engine restarts, `on_outcome` with
    the outcome of a handover and the seconds from the parcel to the next token, if resumed.
    """

    def __init__(
        self,
        clients: Sequence[ProcessClient],
        num_prefill: int,
        *,
        local_tokens: int = LOCAL_TOKENS,
        on_moved: Callable[[int, int], None] = lambda request_id, engine: None,
        on_handed: Callable[[int, int], None] = lambda request_id, engine: None,
        on_outcome: Callable[[str, float | None], None] = lambda outcome, seconds: None,
        clock: Clock | None = None,
    ) -> None:
        assert 0 < num_prefill < len(clients)
        super().__init__(clients, on_moved=on_moved)
        self.roles = [PREFILL] * num_prefill + [DECODE] * (len(clients) - num_prefill)
        self.local_tokens = local_tokens
        self.on_handed, self.on_outcome = on_handed, on_outcome
        self.on_roles: Callable[[list[bool]], None] = lambda begins: None
        """Callback when roles change, with whether each engine prefills."""
        self._clock = clock or SystemClock()
        self._handovers: dict[int, tuple[int, float]] = {}
        """Request → (engine that keeps its blocks, time of the handover)."""
        for number, client in enumerate(clients):
            client.on_handover = partial(self._on_handover, number)
            client.on_remove = partial(self._end, outcome=LOST)

    async def drain(self, timeout_s: float) -> None:
        """Drain the prefill engines first, then the decode engines."""
        deadline_s = self._clock.now_s() + timeout_s
        await self._end_starting()
        for role in (PREFILL, DECODE):
            own = [c for c, other in zip(self.clients, self.roles, strict=True) if other == role]
            remaining_s = max(deadline_s - self._clock.now_s(), 0.0)
            await asyncio.gather(*(client.drain(remaining_s) for client in own))

    def set_num_prefill(self, num_prefill: int) -> None:
        """Set the number of prefill engines; those with the fewest requests change their role.

        Running requests stay where they are. `on_roles` is called.
        """
        assert 0 < num_prefill < len(self.clients)
        while (now := self.roles.count(PREFILL)) != num_prefill:
            old, new = (DECODE, PREFILL) if now < num_prefill else (PREFILL, DECODE)
            own = [number for number, role in enumerate(self.roles) if role == old]
            self.roles[min(own, key=self._order)] = new
        self.on_roles([role == PREFILL for role in self.roles])

    # ── routing ─────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Send a request to `engine` if it is free and has the role, else to another engine."""
        role = self._role_of(request)
        target = engine
        if target is None or self.roles[target] != role or not self._is_free(target):
            target = self._first_of(role)
            if target is None:
                raise not_ready(self.status)
            if engine is not None and target != engine:
                self.on_moved(request.request_id, target)
        hands_over = role == PREFILL and self._should_hand_over(target)
        return self.clients[target].submit(
            *(request, parser_spec, None, resumed_tokens), hands_over=hands_over
        )

    def _role_of(self, request: Request) -> str:
        """Return the role of the engine in which a request begins."""
        is_long = len(request.prompt_token_ids) > self.local_tokens
        return PREFILL if is_long and request.sampling.n == 1 else DECODE

    def _ready(self, role: str, without: int | None = None) -> list[int]:
        """Return the engines of a role that accept requests now."""
        every = range(len(self.clients))
        return [n for n in every if self.roles[n] == role and n != without and self._is_free(n)]

    def _first_of(self, role: str, without: int | None = None) -> int | None:
        """Return the engine of a role with the fewest requests, else any that accepts requests."""
        ready = self._ready(role, without)
        return min(ready, key=self._order) if ready else self._choose(without)

    def _should_hand_over(self, engine: int) -> bool:
        """Return whether `engine` hands its requests over to another."""
        return self.roles[engine] == PREFILL and bool(self._ready(DECODE, without=engine))

    # ── handover ────────────────────────────────────────────────────────────────────────────

    def _on_handover(self, engine: int, news: HandoverNews) -> None:
        """Handle a handover message of `engine`: a parcel, or the receipt of one.

        An engine that refuses a parcel computes the prompt.
        """
        match news:
            case HandedOver(request_id, parcel):
                self._hand_over(engine, request_id, parcel)
            case TakenOver(request_id, refusal) if refusal:
                self._end(request_id, REFUSED)

    def _hand_over(self, engine: int, request_id: int, parcel: bytes) -> None:
        """Pass a request on after its first token, or back to `engine` without another one."""
        stream = self.clients[engine].release(request_id)
        if stream is None or stream.is_complete:
            self.clients[engine].drop(request_id)
            return
        ready = self._ready(DECODE, without=engine)
        target = min(ready, key=self._order) if ready else engine
        if not ready and not self.clients[engine].ready:
            other = self._choose()
            if other is None:
                stream.fail(died())
                return
            target = other
        stream.hands_over, stream.parcel = False, parcel
        stream.on_resume = partial(self._on_resume, request_id)
        self._handovers[request_id] = engine, self._clock.now_s()
        self.clients[target].adopt(stream, on_trial=False)
        if target == engine:
            self.on_outcome(STAYED, None)
        else:
            self.on_handed(request_id, target)

    def _on_resume(self, request_id: int) -> None:
        """Finish a handover at the first token of the next engine."""
        given = self._handovers.get(request_id)
        if given is not None:
            self._end(request_id, RESUMED, self._clock.now_s() - given[1])

    def _end(self, request_id: int, outcome: str, seconds: float | None = None) -> None:
        """Free the blocks of a parcel and report the outcome."""
        given = self._handovers.pop(request_id, None)
        if given is not None:
            self.clients[given[0]].drop(request_id)
            self.on_outcome(outcome, seconds)

    def _failover(self, engine: int, streams: Streams, from_outside: bool) -> None:
        """Restart the requests of a dead engine elsewhere; open handovers are lost."""
        for request_id, stream in streams.items():
            stream.parcel = b""
            self._end(request_id, LOST)
        super()._failover(engine, streams, from_outside)

    def _failover_target(self, stream: Stream, engine: int) -> int | None:
        """Return the engine that restarts a request of a dead one, by the role it begins in."""
        role = self._role_of(stream.answer.request)
        target = self._first_of(role, engine)
        stream.hands_over = role == PREFILL and self.roles[engine] == PREFILL
        if target is not None:
            stream.hands_over = role == PREFILL and self._should_hand_over(target)
        return target
