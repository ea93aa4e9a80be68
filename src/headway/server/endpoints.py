"""The endpoints that generate: a table of rows, and the way of a body through any of them.

Body → class → admission → prepare → admission again → respond, on raw ASGI, for it is the hot path.
A request that would be refused for load, or be late, may be answered by the fallback instead.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from headway.admit.admission import AdmissionRequest, Ticket
from headway.core.errors import OverloadedError, RequestError, ShedError
from headway.core.service import ServiceClass, choose_class
from headway.core.slo import DEFAULT_CLASS
from headway.edge.auth import header
from headway.edge.event_stream import send_response
from headway.edge.keys import Caller
from headway.edge.principal import owner_of, turn_of
from headway.server import body as bodies
from headway.server.answering import respond
from headway.server.anthropic import messages
from headway.server.anthropic import schema as anthropic_schema
from headway.server.anthropic.schema import MessagesBody
from headway.server.fields import ELSEWHERE
from headway.server.generation import Dialect, Generation
from headway.server.models import State
from headway.server.openai import chat, completions
from headway.server.openai.schema import NO_OPS, ChatBody, CompletionBody
from headway.server.responses import create as responses
from headway.server.responses import schema as responses_schema
from headway.server.responses.schema import ResponsesBody

log = logging.getLogger(__name__)

FALLBACK_HEADER = b"x-headway-fallback"
INLINE_BYTES = 4096
"""The prompt of so small a body is tokenized in a millisecond or two, sooner than in a thread."""
BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)


def accepts(
    body: type[msgspec.Struct],
    no_ops: frozenset[str],
    refused: frozenset[str] = frozenset(),
    unheeded: tuple[str, ...] = (),
) -> bodies.Accepts:
    """What an endpoint takes; beside `refused` it refuses what only others honour."""
    honoured_somewhere = {name for other in BODIES for name in other.__struct_fields__}
    known = no_ops.union(body.__struct_fields__)
    return bodies.Accepts(
        body, no_ops, (refused | ELSEWHERE | honoured_somewhere) - known, unheeded
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """An endpoint that generates: what it takes, how that is prepared and answered."""

    path: str
    accepts: bodies.Accepts
    prepare: Callable[..., Any]
    prefix: str
    respond: Callable[..., Awaitable[None]] = respond
    chats: bool = True
    """Whether a template is rendered."""
    owned: bool = False
    """Whether `prepare` wants the name of the key that asks."""
    prompt: str = "messages"
    """The field of the prompt."""
    lengths: tuple[str, ...] = ()
    """Fields that say how long the answer may be, and are to be kept to the letter."""
    elsewhere: bool = True
    """Whether another server can answer: nothing in the body is known here alone."""


GENERATIONS = (
    GenerationRow(
        path="/v1/chat/completions",
        accepts=accepts(ChatBody, NO_OPS),
        prepare=chat.prepare,
        prefix="chatcmpl-",
        lengths=("max_completion_tokens", "max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/completions",
        accepts=accepts(CompletionBody, NO_OPS),
        prepare=completions.prepare,
        chats=False,
        prefix="cmpl-",
        prompt="prompt",
        lengths=("max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/responses",
        accepts=accepts(ResponsesBody, responses_schema.NO_OPS, responses_schema.REFUSED),
        prepare=responses.prepare,
        prefix=responses.PREFIX,
        respond=responses.respond,
        owned=True,
        prompt="input",
        lengths=("max_output_tokens",),
        elsewhere=False,
    ),
    GenerationRow(
        path="/v1/messages",
        accepts=accepts(
            MessagesBody,
            anthropic_schema.NO_OPS,
            anthropic_schema.REFUSED,
            anthropic_schema.UNHEEDED,
        ),
        prepare=messages.prepare,
        prefix="msg_",
    ),
)


@dataclass(slots=True, kw_only=True)
class Call:
    """One request as it came in, and who asks."""

    raw: dict[str, Any]
    num_bytes: int
    body: Any
    ignored: list[str]
    arrived_s: float
    caller: Caller
    service_class: ServiceClass


class Generate:
    """POST endpoint that generates."""

    def __init__(self, state: State, row: GenerationRow) -> None:
        self._state = state
        self._row = row

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = None
        try:
            call = await self._read(scope, receive)
            generation, dialect, ticket = await self._accept(call, scope, receive)
        except RequestError as error:
            full = isinstance(error, OverloadedError) and call is not None
            if full and await self._fall_back(call, "queue", scope, receive, send):
                return
            name = call.service_class.name if call is not None else DEFAULT_CLASS
            if not (call is not None and call.caller.in_batch and error.retry_after_s is not None):
                self._state.rows[0].telemetry.refused(error, service_class=name)
            raise
        try:
            late = ticket.late and self._state.options.fallback_late
            if late and await self._fall_back(call, "late", scope, receive, send, ticket.close):
                return
            await self._row.respond(self._state, generation, dialect, receive, send)
        except ShedError as error:
            ticket.close()
            if not await self._fall_back(call, "late", scope, receive, send):
                generation.model.telemetry.refused(error, service_class=call.service_class.name)
                await send_response(dialect.refusal(error), send, generation.headers)
        except BaseException:
            ticket.close()
            raise

    async def _read(self, scope: Scope, receive: Receive) -> Call:
        """The request, checked as far as types go; raises RequestError."""
        state = self._state
        raw, num_bytes = await bodies.read_object(
            receive,
            state.options.max_body,
            self._row.accepts.body,
            pool=state.pool,
            user=turn_of(scope),
        )
        arrived_s = state.clock.now_s()
        body, ignored = self._row.accepts.read(raw, state.options.strict_api)
        body.model = raw["model"] = state.name(body.model)
        caller = scope.get("caller") or state.keyring.nobody
        return Call(
            raw=raw,
            num_bytes=num_bytes,
            body=body,
            ignored=ignored,
            arrived_s=arrived_s,
            caller=caller,
            service_class=class_of(state, body, caller),
        )

    async def _accept(
        self, call: Call, scope: Scope, receive: Receive
    ) -> tuple[Generation, Dialect, Ticket]:
        """The request, admitted and encoded; raises RequestError."""
        model = self._state.model(call.body.model)
        num_rows = model.info().max_num_seqs
        ticket = model.admission.arrive(call.caller, call.service_class, num_rows)
        try:
            scope.get("meters", []).append(ticket.meter)
            generation, dialect = await self._prepare(call, scope, receive)
            generation.caller, generation.service_class = call.caller, call.service_class
            ticket.measure(self._asked(call, generation))
            generation.ticket = ticket
            generation.may_be_refused = self._may_be_refused(call, generation, scope)
        except BaseException:
            ticket.close()
            raise
        return generation, dialect, ticket

    async def _prepare(
        self, call: Call, scope: Scope, receive: Receive
    ) -> tuple[Generation, Dialect]:
        """The body rendered and encoded; raises RequestError."""
        row = self._row
        owner = {"owner": owner_of(scope)} if row.owned else {}
        prepare = partial(
            row.prepare, self._state, call.body, row.prefix + scope["request_id"], **owner
        )
        work = partial(prepare, call.arrived_s)
        if row.chats or call.num_bytes > INLINE_BYTES:
            pool, user = self._state.pool, turn_of(scope)
            generation, dialect = await pool.run(user, call.num_bytes, receive, work)
        else:
            generation, dialect = work()
        if call.ignored:
            names = bodies.printable(call.ignored)
            log.warning("ignored fields: %s", names)
            generation.headers.append((b"x-headway-ignored-fields", names.encode()))
        if "fallback" in scope:
            generation.headers.append((FALLBACK_HEADER, scope["fallback"]))
        generation.parent = header(scope, b"traceparent")
        if (header(scope, b"x-stainless-retry-count") or "0") != "0":
            generation.model.telemetry.registry.add("client_retries")
        return generation, dialect

    def _may_be_refused(self, call: Call, generation: Generation, scope: Scope) -> bool:
        """Whether an admitted request may yet be refused, or answered elsewhere.

        Its grammar may not compile; the engine may shed it, and then the fallback may take over.
        """
        sheds = generation.model.admission.rules.sheds
        falls_back = "fallback" not in scope and self._state.falls_back(call.body.model)
        return sheds or falls_back or generation.sampling.grammar is not None

    def _asked(self, call: Call, generation: Generation) -> AdmissionRequest:
        """What admission looks at."""
        given = [name for name in self._row.lengths if getattr(call.body, name) is not None]
        return AdmissionRequest(
            lengths=[len(prompt) for prompt in generation.prompts],
            sampling=generation.sampling,
            max_model_len=generation.model.info().max_model_len,
            prompts=generation.prompts,
            salt=generation.caller.principal.salted(generation.cache_salt).cache_salt,
            slo=generation.slo,
            prompt_param=self._row.prompt,
            answer_param=given[0] if given else None,
        )

    async def _fall_back(
        self,
        call: Call | None,
        reason: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        on_start: Callable[[], None] = lambda: None,
    ) -> bool:
        """Let the fallback answer; False, and nothing was sent, where there is none or it fails.

        `on_start` is called when its answer begins.
        """
        state = self._state
        if call is None or "fallback" in scope or not state.falls_back(call.body.model):
            return False
        if state.upstream is not None and self._row.elsewhere:
            done = await state.upstream.answer(
                call.raw, reason, scope["path"], receive, send, on_start
            )
        elif state.upstream is None:
            done = await self._second(call, reason, scope, receive, send, on_start)
        else:
            done = False
        if done:
            state.rows[0].telemetry.registry.add("fallback_requests", 1, reason)
        return done

    async def _second(
        self,
        call: Call,
        reason: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        on_start: Callable[[], None],
    ) -> bool:
        """The same request to the second engine; False when that refuses it."""
        name = self._state.fallback_model
        value = f"{name}; reason={reason}".encode()
        whole = [msgspec.json.encode({**call.raw, "model": name})]

        async def receive_again() -> Message:
            if whole:
                return {"type": "http.request", "body": whole.pop(), "more_body": False}
            return await receive()

        async def send_begun(message: Message) -> None:
            if message["type"] == "http.response.start":
                on_start()
            await send(message)

        try:
            await self({**scope, "fallback": value, "meters": []}, receive_again, send_begun)
        except RequestError as error:
            log.warning("the fallback %s refused a request: %s", name, error)
            return False
        return True


def class_of(state: State, body: Any, caller: Caller) -> ServiceClass:
    """The class that a body names, else its key's, else the default; raises RequestError."""
    classes = state.model(body.model).telemetry.classes
    chosen = choose_class(
        classes, body.service_class, body.service_tier, default=caller.service_class
    )
    if caller.may_use(chosen.name):
        return chosen
    named = "service_tier" if body.service_class is None and body.service_tier else "service_class"
    whose = "Batches of this key" if caller.in_batch else "This key"
    raise RequestError(
        f"{whose} may not use the class {chosen.name!r}. Leave {named} out, or let the operator "
        "name the class under `classes` in the key's row.",
        param=named,
        code="permission_denied",
        status=403,
    )
