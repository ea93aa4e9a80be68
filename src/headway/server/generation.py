"""A request that generates, the progress of its answer, and the protocol of what writes it.

`prepare` of an endpoint makes a frozen `GenerationRequest` of an `IncomingRequest`, and the
`AnswerDialect` that writes its answer from its `Progress`. `session` runs it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.admit.lengths import AdmissionRequest
from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.core.service import ServiceClass
from headway.core.slo import Slo
from headway.core.terms import Terms
from headway.edge.event_stream import DONE
from headway.edge.keys import Caller
from headway.edge.relayed import Relayed
from headway.frontend.answer import SequenceDelta
from headway.frontend.text import OutputParserSpec
from headway.frontend.text.parts import CallEnds, ParsedOutput
from headway.server import kv
from headway.server.body import BodySpec
from headway.server.context import ContextCut
from headway.server.models import ServedModel
from headway.server.openai.render import usage
from headway.server.openai.tools import ToolUse
from headway.telemetry.timeline import RequestTimeline

# ── incoming ────────────────────────────────────────────────────────────────────────────────


class IncomingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it arrived, with its caller and its ASGI connection.

    `raw` is the body's object and `body` the same with types; `request_id` has the prefix of the
    endpoint. `owner` is the name of the key that owns what is stored of it.
    """

    scope: Scope
    receive: Receive
    send: Send
    raw: dict[str, Any]
    body: Any
    num_bytes: int
    ignored: list[str]
    request_id: str
    arrived_s: float
    caller: Caller
    service_class: ServiceClass
    owner: str
    created: int = 0
    relayed: Relayed | None = None
    """What a gateway asks for besides, or resumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """An endpoint that generates: its body, how a request is prepared and answered."""

    path: str
    body_spec: BodySpec
    prepare: Callable[..., "AnswerDialect"]
    """Called in a thread with the state and an `IncomingRequest`; raises RequestError."""
    id_prefix: str
    """Prefix of the ids of its answers."""
    respond: Callable[..., Awaitable[None]] | None = None
    """Answers a session in place of `Session.answer`, where given."""
    is_chat: bool = True
    """Whether the chat template is rendered."""
    prompt_field: str = "messages"
    """Name of the prompt's field."""
    length_fields: tuple[str, ...] = ()
    """Names of the fields that set the answer's length; admission never shortens a given one."""
    can_fall_back: bool = True
    """Whether another server can answer: false where a body may refer to stored responses."""

    def admission_request(self, body: Any, request: "GenerationRequest") -> AdmissionRequest:
        """Return the request as admission checks it."""
        fields = [name for name in self.length_fields if getattr(body, name) not in (None, -1)]
        return AdmissionRequest(
            lengths=[len(prompt) for prompt in request.prompts],
            sampling=request.sampling,
            max_model_len=request.model.info().max_model_len,
            prompts=request.prompts,
            salt=request.caller.principal.salted(request.cache_salt).cache_salt,
            slo=request.slo,
            prompt_param=self.prompt_field,
            answer_param=fields[0] if fields else None,
        )


# ── request ─────────────────────────────────────────────────────────────────────────────────


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked content of one HTTP request; choice i belongs to prompt i // n."""

    model: ServedModel
    model_name: str
    prompts: list[list[int]]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    wants_timings: bool
    request_id: str
    created: int
    arrived_s: float
    caller: Caller
    service_class: ServiceClass
    slo: Slo | None = None
    priority: int | None = None
    cache_salt: str | None = None
    shares: kv.KVShares = kv.SERVER_SHARES
    cut: ContextCut | None = None
    use: ToolUse | None = None
    parser_spec: OutputParserSpec | None = None

    @property
    def terms(self) -> Terms:
        """Terms of scheduling for the engine, from its class, its key and its own fields."""
        return self.service_class.terms(self.slo, self.caller.weight, self.priority)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def kv_usage(self) -> dict[str, int]:
        """Counts of prompt tokens whose KV is kept and read, where not all are, and of those that
        `context` has cut."""
        counts = kv.usage(self.model.client.info, self.prompts, self.shares)
        return counts | ({"cut": self.cut.num_cut} if self.cut is not None else {})

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    @property
    def longest_answer(self) -> int:
        """Most tokens of an answer: max_tokens, or the rest of the context."""
        info = self.model.client.info
        context = info.max_model_len if info is not None else 0
        room = context - max(map(len, self.prompts), default=0)
        return self.sampling.max_tokens or max(room, 0)

    def envelope(self, kind: str, fingerprint: str) -> dict[str, Any]:
        """Return the first fields of every answer and chunk; `kind` is the value of `object`."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": fingerprint,
        }


# ── progress ────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Progress:
    """State of the answer to a request, from which a dialect writes."""

    request: GenerationRequest
    num_generated: int = 0
    num_cached: int = 0
    num_reasoned: int = 0
    outputs: dict[int, ParsedOutput] = field(default_factory=dict)
    """Choice → its accumulated parts, where answers are parsed for reasoning or calls."""
    timeline: RequestTimeline | None = None
    """Set when the request is sent to the engine."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompts and answers."""
        return self.request.num_prompt_tokens + self.num_generated

    def usage(self) -> dict[str, Any]:
        """Return the `usage` object as it stands."""
        spec = self.request.parser_spec
        reasoned = self.num_reasoned if spec and spec.reasoning else None
        request = self.request
        return usage(
            request.num_prompt_tokens,
            self.num_generated,
            self.num_cached,
            reasoned,
            kv=request.kv_usage,
        )

    def has_calls(self, choice: int) -> bool:
        """Whether a choice has called a tool."""
        output = self.outputs.get(choice)
        return output is not None and bool(output.calls)

    def count(self, number: int, deltas: list[SequenceDelta]) -> list[tuple[int, SequenceDelta]]:
        """Count the deltas of prompt `number`; return (choice, delta) pairs."""
        request, timeline = self.request, self.timeline
        assert timeline is not None
        telemetry, grammar = request.model.telemetry, request.sampling.grammar
        pairs = []
        for delta in deltas:
            choice = number * request.sampling.n + delta.index
            pairs.append((choice, delta))
            self.num_generated += len(delta.token_ids)
            if delta.parts is not None:
                self.accumulate(choice, delta)
            if delta.visible:
                timeline.on_publish()
            timeline.num_drafts += delta.num_drafts
            timeline.num_kept_drafts += delta.num_kept_drafts
            timeline.num_forced += delta.num_forced
            if delta.first_scheduled_s is not None:
                self.num_cached += delta.num_cached_tokens
                timeline.on_scheduled(delta.first_scheduled_s, delta.num_cached_tokens)
            if delta.finish_reason is not None:
                telemetry.on_sequence_end(delta.finish_reason)
                has_calls = self.has_calls(choice)  # `accumulate` counts those
                if delta.incomplete and grammar is not None and not has_calls:
                    telemetry.on_invalid_answer(grammar.kind)
        return pairs

    def accumulate(self, choice: int, delta: SequenceDelta) -> None:
        """Add the parts of `delta` to the output of its choice; count finished calls."""
        output = self.outputs.setdefault(choice, ParsedOutput())
        output.accumulate(delta.parts or ())
        if output.thoughts and not (output.contents or output.calls):
            self.num_reasoned += len(delta.token_ids)
        use, telemetry = self.request.use, self.request.model.telemetry
        for part in delta.parts or ():
            if isinstance(part, CallEnds) and use is not None:
                call = output.calls[part.index]
                telemetry.on_tool_call(fits=use.fault(call.name, call.arguments) is None)

    def timings(self) -> dict[str, Any]:
        """Return {"timings": …} where the request asks for them, else {}."""
        if not self.request.wants_timings or self.timeline is None:
            return {}
        return {"timings": self.timeline.timings()}

    def ending(self, usage_chunk: Callable[[], bytes]) -> bytes:
        """Return the end of an OpenAI stream: usage and timings as asked for, then `[DONE]`."""
        has_usage_chunk = self.request.include_usage or self.request.wants_timings
        return (usage_chunk() if has_usage_chunk else b"") + DONE

    def last_chunk(self, envelope: dict[str, Any], usage: dict[str, Any]) -> bytes:
        """Return the event after that of the last choice: usage and timings as asked for."""
        content = {**envelope, "choices": [], **self.timings()}
        if self.request.include_usage:
            content["usage"] = usage
        return b"data: " + msgspec.json.encode(content) + b"\n\n"


# ── dialect ─────────────────────────────────────────────────────────────────────────────────


class AnswerDialect(Protocol):
    """Writer of the answer to one request, in the format of its endpoint."""

    progress: Progress
    """The request and the progress of its answer."""

    def opening(self, choice: int) -> bytes:
        """Return the chunk that opens a choice, or b""."""
        ...

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        """Return the chunks of a delta, or b"" while no text can be shown."""
        ...

    def ending(self) -> bytes:
        """Return the end of a stream."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """Return the event that ends a stream with an error."""
        ...

    def whole(self, choices: list[list[SequenceDelta]]) -> dict[str, Any]:
        """Return the complete answer from the deltas of each choice."""
        ...

    def refusal(self, error: RequestError) -> Response:
        """Return the HTTP response of an error before anything is sent."""
        ...

    def ping(self) -> bytes:
        """Return the bytes that keep a silent stream alive."""
        ...


class Openings:
    """The chunks that open the choices; each is returned once."""

    def __init__(self, dialect: AnswerDialect, num_choices: int) -> None:
        self._dialect = dialect
        self._unopened = dict.fromkeys(range(num_choices))

    def take(self, choice: int) -> bytes:
        """Return the opening of a choice, b"" if it is open."""
        if choice not in self._unopened:
            return b""
        del self._unopened[choice]
        return self._dialect.opening(choice)

    def rest(self) -> bytes:
        """Return the openings of all choices that are not open."""
        return b"".join([self.take(choice) for choice in tuple(self._unopened)])
