"""Engines that compute prompts and engines that go on with the answers, behind the face of one.

    prefill engine   computes the prompt, samples the first token, hands the request over
    server           passes the parcel on to the decode engine with the fewest requests
    decode engine    fetches the blocks that the parcel names, and goes on with the stream

A role is where the server sends a request: every engine can do both. So short prompts, several
answers to one prompt, and whatever comes while one pool is gone are served by one engine alone; and
an engine that changes its role ends what runs there. Where an engine dies, on either side of a
hand-over, its requests are computed again behind the tokens that they were told:

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
TAKEN, REFUSED, STAYED, LOST = "taken", "refused", "stayed", "lost"
"""What came of a hand-over: the next engine has gone on, or refused the parcel and computes the
prompt; no decode engine was there, and the prefill engine goes on; the engine that was to go on
died before its first token, or the client left."""
LOCAL_TOKENS = 64
"""A prompt so short is computed where it is answered: that takes no longer than a hand-over."""


class Pools(Replicas):
    """The first `num_prefill` engines compute prompts, the others go on, until roles change.

    Prompts up to `local_tokens` are computed where they are answered. `on_handed` is told of each
    request that another engine goes on with, as `on_moved` is of those that it begins again;
    `on_outcome` of what came of a hand-over, and seconds from the parcel to the next token of one
    that was taken.
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
        """Told by engine whether it prefills, whenever that changes."""
        self._clock = clock or SystemClock()
        self._given: dict[int, tuple[int, float]] = {}
        """Request → the engine that keeps its blocks, and since when."""
        for number, client in enumerate(clients):
            client.on_handover = partial(self._hear, number)
            client.on_left = partial(self._end, outcome=LOST)

    async def drain(self, timeout_s: float) -> None:
        """First those who hand over, then those who take over."""
        deadline_s = self._clock.now_s() + timeout_s
        await self._end_starting()
        for role in (PREFILL, DECODE):
            own = [c for c, other in zip(self.clients, self.roles, strict=True) if other == role]
            left_s = max(deadline_s - self._clock.now_s(), 0.0)
            await asyncio.gather(*(client.drain(left_s) for client in own))

    def become(self, num_prefill: int) -> None:
        """So many engines prefill from now on; who changes has the fewest requests of its pool.

        What runs there ends there. `on_roles` is told.
        """
        assert 0 < num_prefill < len(self.clients)
        while (now := self.roles.count(PREFILL)) != num_prefill:
            old, new = (DECODE, PREFILL) if now < num_prefill else (PREFILL, DECODE)
            own = [number for number, role in enumerate(self.roles) if role == old]
            self.roles[min(own, key=self._order)] = new
        self.on_roles([role == PREFILL for role in self.roles])

    # ── who answers ─────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Send a request to the prefill engine `engine`, or to who can have it now."""
        role = self._role_of(request)
        target = engine
        if target is None or self.roles[target] != role or not self._is_free(target):
            target = self._first_of(role)
            if target is None:
                raise not_ready(self.status)
            if engine is not None and target != engine:
                self.on_moved(request.request_id, target)
        hands_over = role == PREFILL and self._leaves(target)
        return self.clients[target].submit(
            *(request, parser_spec, None, resumed_tokens), hands_over=hands_over
        )

    def _role_of(self, request: Request) -> str:
        """The pool that a request begins in."""
        is_long = len(request.prompt_token_ids) > self.local_tokens
        return PREFILL if is_long and request.sampling.n == 1 else DECODE

    def _ready(self, role: str, without: int | None = None) -> list[int]:
        """The engines of a role that take requests now."""
        every = range(len(self.clients))
        return [n for n in every if self.roles[n] == role and n != without and self._is_free(n)]

    def _first_of(self, role: str, without: int | None = None) -> int | None:
        """The engine of this role with the fewest requests, else any that takes them."""
        found = self._ready(role, without)
        return min(found, key=self._order) if found else self._choose(without)

    def _leaves(self, engine: int) -> bool:
        """Whether what `engine` computes is to go on in another."""
        return self.roles[engine] == PREFILL and bool(self._ready(DECODE, without=engine))

    # ── from one to another ─────────────────────────────────────────────────────────────────

    def _hear(self, engine: int, news: HandoverNews) -> None:
        """A request has left `engine`, or has come there: where the parcel is refused by name, the
        prompt is computed."""
        match news:
            case HandedOver(request_id, parcel):
                self._hand_over(engine, request_id, parcel)
            case TakenOver(request_id, refusal) if refusal:
                self._end(request_id, REFUSED)

    def _hand_over(self, engine: int, request_id: int, parcel: bytes) -> None:
        """A request has left `engine` behind its first token: another goes on, or it goes on."""
        stream = self.clients[engine].release(request_id)
        if stream is None or stream.is_complete:
            self.clients[engine].drop(request_id)
            return
        found = self._ready(DECODE, without=engine)
        target = min(found, key=self._order) if found else engine
        if not found and not self.clients[engine].ready:
            other = self._choose()
            if other is None:
                stream.fail(died())
                return
            target = other
        stream.hands_over, stream.parcel = False, parcel
        stream.on_taken = partial(self._went_on, request_id)
        self._given[request_id] = engine, self._clock.now_s()
        self.clients[target].adopt(stream, on_trial=False)
        if target == engine:
            self.on_outcome(STAYED, None)
        else:
            self.on_handed(request_id, target)

    def _went_on(self, request_id: int) -> None:
        """The first token behind a parcel is here."""
        given = self._given.get(request_id)
        if given is not None:
            self._end(request_id, TAKEN, self._clock.now_s() - given[1])

    def _end(self, request_id: int, outcome: str, seconds: float | None = None) -> None:
        """Nobody needs the blocks of a parcel any more."""
        given = self._given.pop(request_id, None)
        if given is not None:
            self.clients[given[0]].drop(request_id)
            self.on_outcome(outcome, seconds)

    def _move(self, engine: int, streams: Streams, from_outside: bool) -> None:
        """`engine` died: what it had not gone on with yet is computed again."""
        for request_id, stream in streams.items():
            stream.parcel = b""
            self._end(request_id, LOST)
        super()._move(engine, streams, from_outside)

    def _heir(self, stream: Stream, engine: int) -> int | None:
        """Who computes a request of `engine` again: the pool that it would begin in."""
        role = self._role_of(stream.answer.request)
        target = self._first_of(role, engine)
        stream.hands_over = role == PREFILL and self.roles[engine] == PREFILL
        if target is not None:
            stream.hands_over = role == PREFILL and self._leaves(target)
        return target
