"""A request that generates, from its body to its last byte, and the one place where it ends.

    Generate    the endpoint: a body in, a session opened; who answers where that is refused
    Session     the request once it is let in: its prompts made, sent to the engine, answered

A `Session` owns the ticket, the streams and the timeline of its request and closes all of them,
however it ends: answered, refused, shed, cancelled, its client or its engine gone. The headers of
a stream go with its first text, or before that, once it has been silent for a second and the
engine has begun: from then on an error is an event. No stream ends without `[DONE]` or an error.
"""

import asyncio
import contextlib
import copy
import logging
from functools import partial
from types import TracebackType
from typing import Any

from starlette.types import Receive, Scope, Send

from headway.admit.admission import Ticket
from headway.core.errors import OverloadedError, RequestError, ServerFaultError, ShedError
from headway.core.request import Request
from headway.core.request_source import RequestSource
from headway.core.slo import DEFAULT_CLASS
from headway.edge import body as bodies
from headway.edge.auth import header
from headway.edge.errors import json_response
from headway.edge.event_stream import (
    GRACE_S,
    PING_INTERVAL_S,
    WAIT_S,
    EventStream,
    send_response,
)
from headway.edge.principal import owner_of, turn_of
from headway.edge.tasks import TaskName
from headway.frontend.answer import Delta, Stream, merge
from headway.server import kv
from headway.server.fallback import FALLBACK_HEADER, Fallback
from headway.server.generation import (
    Dialect,
    GenerationRequest,
    GenerationRow,
    Incoming,
    Openings,
)
from headway.server.models import State
from headway.server.outcomes import named_task, spend
from headway.server.relayed import Marks, check_resumed, load_header, replay, take_field
from headway.server.shorten import settle_context
from headway.server.turn import prepared
from headway.telemetry.timeline import RequestTimeline

log = logging.getLogger(__name__)


class ClientGoneError(RequestError):
    """The client closed the connection; nobody reads this."""


class Generate:
    """POST endpoint that generates, on raw ASGI, for it is the hot path."""

    def __init__(self, state: State, row: GenerationRow) -> None:
        self._state = state
        self._row = row
        self._fallback = Fallback(state, row, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = session = None
        try:
            incoming = await self._read(scope, receive, send)
            model = self._state.model(incoming.body.model)
            ticket = model.admission.arrive(
                incoming.caller,
                incoming.service_class,
                model.info().max_num_seqs,
                incoming.num_bytes,
            )
            async with Session(self._state, incoming, ticket) as session:
                session.prepared(await prepared(self._state, self._row, incoming))
                ticket.measure(self._row.admission_request(incoming.body, session.request))
                session.is_admitted = True
                if not await self._answered_late(session):
                    await (self._row.respond or Session.answer)(session)
        except ClientGoneError:
            return
        except RequestError as error:
            if not await self._answer_instead(error, incoming, session, scope.get("source")):
                raise
        except Exception:
            if session is not None and session.events is not None:
                await session.fail(ServerFaultError())
            raise

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> Incoming:
        """The request, checked as far as types go; raises RequestError."""
        state, accepts = self._state, self._row.accepts
        raw, num_bytes = await bodies.read_object(
            receive, state.options.max_body, accepts.body, pool=state.pool, user=turn_of(scope)
        )
        arrived_s = state.clock.now_s()
        caller = scope.get("caller") or state.keyring.anonymous
        relayed = take_field(raw, caller, self._row.prefix)
        resume = relayed.resume if relayed is not None else None
        body, ignored = accepts.read(raw, state.options.strict_api)
        body.model = raw["model"] = state.name(body.model)
        if body.kv is not None:
            kv.shares_of(state.model(body.model).info(), body.kv)
        model = state.model(body.model)
        service_class = model.service_class(body, caller)
        settle_context(model, body, service_class)
        return Incoming(
            scope=scope,
            receive=receive,
            send=send,
            raw=raw,
            body=body,
            num_bytes=num_bytes,
            ignored=ignored,
            request_id=resume.id if resume else self._row.prefix + scope["request_id"],
            arrived_s=arrived_s,
            caller=caller,
            service_class=service_class,
            owner=owner_of(scope),
            created=resume.created if resume else int(state.clock.wall_s()),
            relayed=relayed,
        )

    async def _answered_late(self, session: "Session") -> bool:
        """Whether the fallback has answered a request whose first token would come too late."""
        if not (session.ticket.late and self._state.options.fallback_late):
            return False
        return await self._fallback.answer(session.incoming, "late", session.ticket.close)

    async def _answer_instead(
        self,
        error: RequestError,
        incoming: Incoming | None,
        session: "Session | None",
        source: RequestSource | None,
    ) -> bool:
        """Answer, with `error` or by the fallback; False, and nothing was sent, before the engine
        had the request and where there is no fallback."""
        if session is not None and session.was_sent:
            if isinstance(error, ShedError) and not session.is_open:
                if await self._fallback.answer(session.incoming, "late"):
                    return True
                name = session.request.service_class.name
                session.request.model.telemetry.on_rejection(
                    error, service_class=name, source=source
                )
            await session.fail(error)
            return True
        if session is not None and session.is_admitted:
            return False
        name, comes_again = DEFAULT_CLASS, False
        if incoming is not None:
            if isinstance(error, OverloadedError) and await self._fallback.answer(
                incoming, "queue"
            ):
                return True
            name = incoming.service_class.name
            comes_again = incoming.caller.in_batch and error.retry_after_s is not None
        if not comes_again:
            self._state.rows[0].telemetry.on_rejection(error, service_class=name, source=source)
        return False


class Session:
    """One request from its ticket to its end.

    `async with` closes what it owns and says on the timeline how it ended; what was raised goes on.
    """

    __slots__ = (
        *("_in_background", "_owns", "_watcher", "dialect", "events", "headers"),
        *("incoming", "is_admitted", "is_spent", "request", "state", "streams", "task"),
        *("ticket", "timeline", "was_sent"),
    )
    dialect: Dialect
    request: GenerationRequest
    task: TaskName

    def __init__(self, state: State, incoming: Incoming, ticket: Ticket) -> None:
        self.state = state
        self.incoming = incoming
        self.ticket = ticket
        incoming.scope.get("meters", []).append(ticket.meter)
        self.streams: list[Stream] = []
        self.timeline: RequestTimeline | None = None
        self.events: EventStream | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_admitted = self.was_sent = self.is_spent = False
        """Whether admission has nothing more to say; whether the engine has all of its prompts."""
        self._watcher: asyncio.Task[None] | None = None
        self._owns, self._in_background = True, False

    # ── its end ─────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher

    def close(self, error: BaseException | None = None) -> None:
        """Close all that it owns, once `error` has ended it; safe to call twice."""
        if not self._owns:
            return
        num_tokens = 0
        if self.timeline is not None:
            self._end(self.timeline, error)
            num_tokens = self.dialect.progress.num_tokens
        self.ticket.close(num_tokens)
        if self.was_sent and not self.is_spent:
            self.is_spent = True
            spend(self.state, self.incoming.owner, self.task, self.dialect.progress)
        for stream in self.streams:
            stream.close()
        if self.events is not None:
            self.events.stop_pinging()

    def _end(self, timeline: RequestTimeline, error: BaseException | None) -> None:
        """How it ended, for the timeline, unless that is known."""
        telemetry = self.request.model.telemetry
        if timeline.ended is not None:
            return
        match error:
            case ClientGoneError():
                telemetry.on_sequence_end("abort")
                timeline.disconnect()
            case ShedError() if not (self.is_open or self._in_background):
                timeline.move()
            case RequestError():
                telemetry.on_failure(timeline, error)
            case Exception():
                timeline.fail()
            case _:  # cancelled: nobody is there any more
                timeline.disconnect()

    def hand_over(self) -> "Session":
        """A session for the background, which owns what this one has owned so far."""
        other = copy.copy(self)
        self._owns, other._in_background = False, True
        return other

    # ── its way to the engine ───────────────────────────────────────────────────────────────

    def prepared(self, dialect: Dialect) -> None:
        """Take what its body asks for, and who writes the answer."""
        self.dialect, self.request = dialect, dialect.progress.request
        check_resumed(self.incoming.relayed, self.request)
        asked = self.incoming
        self.task = named_task(self.state, asked.scope, asked.raw, asked.owner, self.request)
        self.headers = response_headers(self.incoming, self.request)
        if self.task.num_retry:
            self.request.model.telemetry.registry.add("client_retries")

    def submit(self) -> RequestTimeline:
        """Send every prompt to the engine; raises RequestError when it takes none of them now."""
        request = self.request
        model, telemetry = request.model, request.model.telemetry
        timeline = self.timeline = self.dialect.progress.timeline = self._begin()
        try:
            for number, prompt in enumerate(request.prompts):
                engine_id = next(model.request_ids)
                asked = Request(
                    engine_id,
                    prompt,
                    request.sampling,
                    request.caller.principal.salted(request.cache_salt),
                    request.arrived_s,
                    terms=self.ticket.terms(request.terms),
                    kv_read=request.shares.read,
                    kv_keep=request.shares.keep,
                )
                self.ticket.sent(number, engine_id)
                stream = model.client.submit(
                    asked, request.parser_spec, self.ticket.engine, self._known()
                )
                self.streams.append(stream)
                stream.on_begin = partial(self.ticket.began, number)
                telemetry.on_submit(timeline, engine_id)
        except RequestError as error:
            telemetry.on_rejection(error, timeline)
            raise
        self.was_sent = True
        if not self._in_background:
            departure = watch_for_departure(self.incoming.receive, self.streams)
            self._watcher = asyncio.create_task(departure)
        return timeline

    def _known(self) -> list[list[int] | None]:
        """What another server had told of the answer, of a stream that goes on here."""
        relayed = self.incoming.relayed
        return [list(relayed.resume.tokens)] if relayed and relayed.resume else []

    def _begin(self) -> RequestTimeline:
        """Its timeline, from now on among the live ones."""
        request = self.request
        telemetry = request.model.telemetry
        for prompt in request.prompts:
            telemetry.prompts.remember(prompt)
        return telemetry.begin(
            request.request_id,
            arrived_s=request.arrived_s,
            num_prompt=request.num_prompt_tokens,
            num_choices=request.num_choices,
            service_class=request.service_class,
            slo=request.slo,
            parent=header(self.incoming.scope, b"traceparent"),
            source=self.incoming.scope.get("source"),
            n=request.sampling.n,
            max_tokens=request.longest_answer,
        )

    # ── its answer ──────────────────────────────────────────────────────────────────────────

    async def answer(self) -> None:
        """Send it to the engine and write what comes back, as it comes or whole."""
        if self.request.stream:
            await self.send_chunks()
            return
        response = json_response(await self.collect())
        await send_response(response, self.incoming.send, self.headers)

    async def send_chunks(self) -> None:
        """Write what arrives; a token has left when its text has, an opening is no token."""
        dialect, progress = self.dialect, self.dialect.progress
        timeline = self.submit()
        openings = Openings(dialect, self.request.num_choices)
        events = self.events = EventStream(
            self.incoming.send,
            self.headers,
            dialect.ping(),
            opening=openings.rest,
            due=partial(is_due, timeline, self._may_be_refused()),
        )
        held: dict[int, int] = {}
        marks = self._marks(openings)
        async for number, deltas in merge(self.streams):
            for choice, delta in progress.count(number, deltas):
                opening = openings.take(choice)
                content = dialect.chunk(choice, delta)
                if marks is not None:
                    content = marks.after(content, delta.token_ids)
                if opening or content:
                    await events.write(opening + content)
                if not content:  # half a character, or what may become a stop string
                    held[choice] = held.get(choice, 0) + len(delta.token_ids)
                    continue
                count = len(delta.token_ids) + (held.pop(choice, 0) if held else 0)
                timeline.add_tokens(choice, count)
        timeline.complete()
        ending = dialect.ending()
        events.stop_pinging()
        await events.end(ending)

    def _marks(self, openings: Openings) -> Marks | None:
        """What tells a gateway which tokens were shown, behind what it goes on from."""
        relayed = self.incoming.relayed
        if relayed is None:
            return None
        if relayed.resume is not None:
            openings.rest()
            replay(relayed.resume.tokens, self.streams[0], self.dialect)
        wanted = relayed.marks and self.request.num_choices == 1
        return Marks(self.dialect.progress) if wanted else None

    async def collect(self) -> dict[str, Any]:
        """The whole answer, once it is complete."""
        timeline, progress = self.submit(), self.dialect.progress
        choices: list[list[Delta]] = [[] for _ in range(self.request.num_choices)]
        async for number, deltas in merge(self.streams):
            for choice, delta in progress.count(number, deltas):
                choices[choice].append(delta)
                timeline.add_tokens(choice, len(delta.token_ids))
        timeline.complete()
        return self.dialect.whole(choices)

    @property
    def is_open(self) -> bool:
        """Whether a stream has its headers: what follows is an event."""
        return self.events is not None and self.events.started

    async def fail(self, error: RequestError) -> None:
        """Answer with `error`: an HTTP status when nothing was sent yet, else an event."""
        if self.events is not None and self.events.started:
            await self.events.end(self.dialect.failure(error))
            return
        self.incoming.scope["error_code"] = error.code  # Anthropic's shape has no place for it
        await send_response(self.dialect.refusal(error), self.incoming.send, self.headers)

    def _may_be_refused(self) -> bool:
        """Whether it may yet be refused, or answered elsewhere.

        Its grammar may not compile; the engine may shed it, and then the fallback may take over.
        """
        sheds = self.request.model.admission.rules.sheds
        falls_back = "fallback" not in self.incoming.scope and self.state.falls_back(
            self.incoming.body.model
        )
        return sheds or falls_back or self.request.sampling.grammar is not None


def response_headers(incoming: Incoming, request: GenerationRequest) -> list[tuple[bytes, bytes]]:
    """What an answer says in its headers of what was left out, and of who gives it."""
    headers = []
    if incoming.ignored:
        names = bodies.printable(incoming.ignored)
        log.warning("ignored fields: %s", names)
        headers.append((b"x-headway-ignored-fields", names.encode()))
    if told := kv.told(request.model.client.info, request.shares):
        headers.append((b"x-headway-kv", told.encode()))
    if request.cut is not None:
        headers.append((b"x-headway-context", request.cut.told.encode()))
    if incoming.relayed is not None:
        headers.append(load_header(request.model))
    if "fallback" in incoming.scope:
        headers.append((FALLBACK_HEADER, incoming.scope["fallback"]))
    return headers


async def watch_for_departure(receive: Receive, streams: list[Stream]) -> None:
    """End the streams when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for stream in streams:
        stream.fail(ClientGoneError("The client left."))


def is_due(timeline: RequestTimeline, may_be_refused: bool, silent_s: float) -> bool:
    """Whether a stream goes without headers for too long: until then errors have a status."""
    if timeline.computed:
        return silent_s >= GRACE_S
    return silent_s >= (PING_INTERVAL_S if may_be_refused else WAIT_S)
