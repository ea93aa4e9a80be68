"""A request that generates, from its body to its last byte, and the one place where it ends.

    GenerationEndpoint    reads a body, admits it, opens a session; falls back where it is refused
    Session               an admitted request: prepared, sent to the engine, answered

A `Session` owns the ticket, the streams and the timeline of its request. It closes all of them
however the request ends: answered, refused, shed, cancelled, with its client or engine gone. The
headers of a stream are sent with its first text, or earlier once it has been silent for a second
and the engine has begun: from then on an error is an event. Each stream ends with `[DONE]` or an
error.
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
    ENGINE_WAIT_S,
    GRACE_S,
    PING_INTERVAL_S,
    EventStream,
    send_response,
)
from headway.edge.principal import owner_of, turn_of
from headway.edge.tasks import TaskName
from headway.frontend.answer import SequenceDelta, Stream, merge
from headway.server import kv
from headway.server.fallback import FALLBACK_HEADER, Fallback
from headway.server.generation import (
    AnswerDialect,
    GenerationRequest,
    GenerationRow,
    IncomingRequest,
    Openings,
)
from headway.server.models import ServerState
from headway.server.outcomes import charge_task, request_task
from headway.server.relayed import MarkWriter, check_resume, load_header, pop_relay_field, replay
from headway.server.shorten import apply_class_context
from headway.server.turn import prepare_in_turn
from headway.telemetry.timeline import RequestTimeline

log = logging.getLogger(__name__)


class ClientGoneError(RequestError):
    """The client closed the connection, so no answer can be sent."""


class GenerationEndpoint:
    """A POST endpoint that generates, on raw ASGI because it is the hot path."""

    def __init__(self, state: ServerState, row: GenerationRow) -> None:
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
                session.set_dialect(await prepare_in_turn(self._state, self._row, incoming))
                ticket.set_prompts(self._row.admission_request(incoming.body, session.request))
                if not await self._answer_late(session):
                    await (self._row.respond or Session.answer)(session)
        except ClientGoneError:
            return
        except RequestError as error:
            if not await self._answer_error(error, incoming, session, scope.get("source")):
                raise
        except Exception:
            if session is not None and session.events is not None:
                await session.fail(ServerFaultError())
            raise

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> IncomingRequest:
        """Read the body and check its types, its model and its class; raises RequestError."""
        state, body_spec = self._state, self._row.body_spec
        raw, num_bytes = await bodies.read_object(
            receive, state.options.max_body, body_spec.body, pool=state.pool, user=turn_of(scope)
        )
        arrived_s = state.clock.now_s()
        caller = scope.get("caller") or state.keyring.anonymous
        relayed = pop_relay_field(raw, caller, self._row.id_prefix)
        resume = relayed.resume if relayed is not None else None
        body, ignored = body_spec.read(raw, state.options.strict_api)
        body.model = raw["model"] = state.name(body.model)
        if body.kv is not None:
            kv.request_shares(state.model(body.model).info(), body.kv)
        model = state.model(body.model)
        service_class = model.service_class(body, caller)
        apply_class_context(model, body, service_class)
        return IncomingRequest(
            scope=scope,
            receive=receive,
            send=send,
            raw=raw,
            body=body,
            num_bytes=num_bytes,
            ignored=ignored,
            request_id=resume.id if resume else self._row.id_prefix + scope["request_id"],
            arrived_s=arrived_s,
            caller=caller,
            service_class=service_class,
            owner=owner_of(scope),
            created=resume.created if resume else int(state.clock.wall_s()),
            relayed=relayed,
        )

    async def _answer_late(self, session: "Session") -> bool:
        """Let the fallback answer a request whose first token is predicted late; whether it did."""
        if not (session.ticket.late and self._state.options.fallback_late):
            return False
        return await self._fallback.answer(session.incoming, "late", session.ticket.close)

    async def _answer_error(
        self,
        error: RequestError,
        incoming: IncomingRequest | None,
        session: "Session | None",
        source: RequestSource | None,
    ) -> bool:
        """Answer with `error` or by the fallback; return whether an answer was sent.

        It is not where the engine has not got the request and there is no fallback.
        """
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
        if session is not None and session.timeline is not None:  # counted by `submit`
            return False
        name, is_counted = DEFAULT_CLASS, False
        if incoming is not None:
            if isinstance(error, OverloadedError) and await self._fallback.answer(
                incoming, "queue"
            ):
                return True
            name = incoming.service_class.name
            will_retry = incoming.caller.in_batch and error.retry_after_s is not None
            is_counted = will_retry or "fallback" in incoming.scope  # by the first model
        if not is_counted:
            self._state.rows[0].telemetry.on_rejection(error, service_class=name, source=source)
        return False


class Session:
    """One request from its ticket to its end.

    `async with` closes what it owns and notes on the timeline how it ended; errors propagate.
    """

    __slots__ = (
        *("_in_background", "_owns", "_watcher", "dialect", "events", "headers"),
        *("incoming", "is_charged", "request", "state", "streams", "task"),
        *("ticket", "timeline", "was_sent"),
    )
    dialect: AnswerDialect
    request: GenerationRequest
    task: TaskName

    def __init__(self, state: ServerState, incoming: IncomingRequest, ticket: Ticket) -> None:
        self.state = state
        self.incoming = incoming
        self.ticket = ticket
        incoming.scope.get("meters", []).append(ticket.meter)
        self.streams: list[Stream] = []
        self.timeline: RequestTimeline | None = None
        self.events: EventStream | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.was_sent = self.is_charged = False
        """Whether the engine has all prompts, the task was charged."""
        self._watcher: asyncio.Task[None] | None = None
        self._owns, self._in_background = True, False

    # ── end ─────────────────────────────────────────────────────────────────────────────────

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
        """Close all that it owns; `error` is what ended it. Safe to call twice."""
        if not self._owns:
            return
        num_tokens = 0
        if self.timeline is not None:
            self._end(self.timeline, error)
            num_tokens = self.dialect.progress.num_tokens
        self.ticket.close(num_tokens)
        if self.was_sent and not self.is_charged:
            self.is_charged = True
            charge_task(self.state, self.incoming.owner, self.task, self.dialect.progress)
        for stream in self.streams:
            stream.close()
        if self.events is not None:
            self.events.stop_pinging()

    def _end(self, timeline: RequestTimeline, error: BaseException | None) -> None:
        """Note on the timeline how the request ended, unless that is noted."""
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
            case _:  # cancelled: the client is gone
                timeline.disconnect()

    def hand_over(self) -> "Session":
        """Return a session for the background, which owns what this one owned."""
        other = copy.copy(self)
        self._owns, other._in_background = False, True
        return other

    # ── to the engine ───────────────────────────────────────────────────────────────────────

    def set_dialect(self, dialect: AnswerDialect) -> None:
        """Set the prepared request and the dialect that writes its answer."""
        self.dialect, self.request = dialect, dialect.progress.request
        check_resume(self.incoming.relayed, self.request)
        incoming = self.incoming
        self.task = request_task(
            self.state, incoming.scope, incoming.raw, incoming.owner, self.request
        )
        self.headers = response_headers(incoming, self.request)
        if self.task.num_retry:
            self.request.model.telemetry.registry.add("client_retries")

    def submit(self) -> RequestTimeline:
        """Send every prompt to the engine; raises RequestError where it accepts none now."""
        request = self.request
        model, telemetry = request.model, request.model.telemetry
        timeline = self.timeline = self.dialect.progress.timeline = self._begin_timeline()
        try:
            for number, prompt in enumerate(request.prompts):
                engine_id = next(model.request_ids)
                engine_request = Request(
                    engine_id,
                    prompt,
                    request.sampling,
                    request.caller.principal.salted(request.cache_salt),
                    request.arrived_s,
                    terms=self.ticket.terms(request.terms),
                    kv_read=request.shares.read,
                    kv_keep=request.shares.keep,
                )
                self.ticket.on_sent(number, engine_id)
                stream = model.client.submit(
                    engine_request, request.parser_spec, self.ticket.engine, self._resumed_tokens()
                )
                self.streams.append(stream)
                stream.on_begin = partial(self.ticket.on_first_token, number)
                telemetry.on_submit(timeline, engine_id)
        except RequestError as error:
            telemetry.on_rejection(error, timeline)
            raise
        self.was_sent = True
        if not self._in_background:
            departure = watch_disconnect(self.incoming.receive, self.streams)
            self._watcher = asyncio.create_task(departure)
        return timeline

    def _resumed_tokens(self) -> list[list[int] | None]:
        """Return the tokens that another server has sent, of a stream that is resumed here."""
        relayed = self.incoming.relayed
        return [list(relayed.resume.tokens)] if relayed and relayed.resume else []

    def _begin_timeline(self) -> RequestTimeline:
        """Create the timeline of the request and add it to the live ones."""
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

    # ── answer ──────────────────────────────────────────────────────────────────────────────

    async def answer(self) -> None:
        """Send the request to the engine and write its answer, streamed or whole."""
        if self.request.stream:
            await self.send_chunks()
            return
        response = json_response(await self.collect())
        await send_response(response, self.incoming.send, self.headers)

    async def send_chunks(self) -> None:
        """Stream the answer; a token counts as sent when its text is, an opening does not count."""
        dialect, progress = self.dialect, self.dialect.progress
        timeline = self.submit()
        openings = Openings(dialect, self.request.num_choices)
        events = self.events = EventStream(
            self.incoming.send,
            self.headers,
            dialect.ping(),
            opening=openings.rest,
            due=partial(should_send_headers, timeline, self._may_be_refused()),
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

    def _marks(self, openings: Openings) -> MarkWriter | None:
        """Return the writer of marks for a gateway, None without one; replays a resumed stream."""
        relayed = self.incoming.relayed
        if relayed is None:
            return None
        if relayed.resume is not None:
            openings.rest()
            replay(relayed.resume.tokens, self.streams[0], self.dialect)
        has_marks = relayed.marks and self.request.num_choices == 1
        return MarkWriter(self.dialect.progress) if has_marks else None

    async def collect(self) -> dict[str, Any]:
        """Return the complete answer."""
        timeline, progress = self.submit(), self.dialect.progress
        choices: list[list[SequenceDelta]] = [[] for _ in range(self.request.num_choices)]
        async for number, deltas in merge(self.streams):
            for choice, delta in progress.count(number, deltas):
                choices[choice].append(delta)
                timeline.add_tokens(choice, len(delta.token_ids))
        timeline.complete()
        return self.dialect.whole(choices)

    @property
    def is_open(self) -> bool:
        """Whether the headers of a stream are sent: an error is an event from then on."""
        return self.events is not None and self.events.started

    async def fail(self, error: RequestError) -> None:
        """Answer with `error`: an HTTP status while nothing is sent, else an event."""
        if self.events is not None and self.events.started:
            await self.events.end(self.dialect.failure(error))
            return
        self.incoming.scope["error_code"] = error.code  # Anthropic's shape has no place for it
        await send_response(self.dialect.refusal(error), self.incoming.send, self.headers)

    def _may_be_refused(self) -> bool:
        """Whether the request may still be refused or answered by the fallback.

        Its grammar may not compile, or the engine may shed it.
        """
        sheds = self.request.model.admission.rules.sheds
        falls_back = "fallback" not in self.incoming.scope and self.state.falls_back(
            self.incoming.body.model
        )
        return sheds or falls_back or self.request.sampling.grammar is not None


def response_headers(
    incoming: IncomingRequest, request: GenerationRequest
) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer: ignored fields, KV losses, cuts, load, fallback."""
    headers = []
    if incoming.ignored:
        names = bodies.printable(incoming.ignored)
        log.warning("ignored fields: %s", names)
        headers.append((b"x-headway-ignored-fields", names.encode()))
    if kv_losses := kv.format_header(request.model.client.info, request.shares):
        headers.append((b"x-headway-kv", kv_losses.encode()))
    if request.cut is not None:
        headers.append((b"x-headway-context", request.cut.header_value.encode()))
    if incoming.relayed is not None:
        headers.append(load_header(request.model))
    if "fallback" in incoming.scope:
        headers.append((FALLBACK_HEADER, incoming.scope["fallback"]))
    return headers


async def watch_disconnect(receive: Receive, streams: list[Stream]) -> None:
    """End the streams when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for stream in streams:
        stream.fail(ClientGoneError("The client left."))


def should_send_headers(timeline: RequestTimeline, may_be_refused: bool, silent_s: float) -> bool:
    """Whether a stream without headers has been silent for too long to wait for an error status."""
    if timeline.computed:
        return silent_s >= GRACE_S
    return silent_s >= (PING_INTERVAL_S if may_be_refused else ENGINE_WAIT_S)
