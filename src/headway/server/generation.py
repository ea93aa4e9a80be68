"""What a request that generates asks for, how far its answer is, and what writes the answer.

`prepare` of an endpoint makes of an `Incoming` body a frozen `GenerationRequest`, and the `Dialect`
that writes its answer from its `Progress`. `session` moves it from one to the other.
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
from headway.frontend.answer import Delta
from headway.frontend.text import OutputParserSpec
from headway.frontend.text.parts import CallEnds, Output
from headway.server import kv
from headway.server.body import Accepts
from headway.server.context import Cut
from headway.server.models import ServedModel
from headway.server.openai.render import usage
from headway.server.openai.tools import ToolUse
from headway.telemetry.timeline import RequestTimeline

# ── what comes in ───────────────────────────────────────────────────────────────────────────


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came in, who asks, and the way to answer.

    `raw` is the body's object and `body` the same with types; `request_id` has the prefix of the
    endpoint. `owner` is the name of the key that may ask for what is stored.
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
    """What a gateway wants to know besides, or go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """An endpoint that generates: what it takes, how that is prepared and answered."""

    path: str
    accepts: Accepts
    prepare: Callable[..., "Dialect"]
    """Called in a thread with the state and an `Incoming`; raises RequestError."""
    prefix: str
    """Of the ids of its answers."""
    respond: Callable[..., Awaitable[None]] | None = None
    """Answers a session in a way of its own, where there is one."""
    chats: bool = True
    """Whether a template is rendered."""
    prompt: str = "messages"
    """The field of the prompt."""
    lengths: tuple[str, ...] = ()
    """Fields that say how long the answer may be, and are to be kept to the letter."""
    elsewhere: bool = True
    """Whether another server can answer: nothing in the body is known here alone."""

    def admission_request(self, body: Any, request: "GenerationRequest") -> AdmissionRequest:
        """What admission looks at."""
        given = [name for name in self.lengths if getattr(body, name) not in (None, -1)]
        return AdmissionRequest(
            lengths=[len(prompt) for prompt in request.prompts],
            sampling=request.sampling,
            max_model_len=request.model.info().max_model_len,
            prompts=request.prompts,
            salt=request.caller.principal.salted(request.cache_salt).cache_salt,
            slo=request.slo,
            prompt_param=self.prompt,
            answer_param=given[0] if given else None,
        )


# ── what is asked ───────────────────────────────────────────────────────────────────────────


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks for; choice i belongs to prompt i // n."""

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
    shares: kv.Shares = kv.NONE
    cut: Cut | None = None
    use: ToolUse | None = None
    parser_spec: OutputParserSpec | None = None

    @property
    def terms(self) -> Terms:
        """What the engine is told of its class, its key and its own fields."""
        return self.service_class.terms(self.slo, self.caller.weight, self.priority)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def kv_usage(self) -> dict[str, int]:
        """Prompt tokens whose keys and values are kept and read, where not all are; and those that
        `context` has cut, where it was asked for."""
        found = kv.usage(self.model.client.info, self.prompts, self.shares)
        return found | ({"cut": self.cut.num_cut} if self.cut is not None else {})

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    @property
    def longest_answer(self) -> int:
        """Its max_tokens, or what the context leaves of the longest prompt."""
        info = self.model.client.info
        context = info.max_model_len if info is not None else 0
        left = context - max(map(len, self.prompts), default=0)
        return self.sampling.max_tokens or max(left, 0)

    def envelope(self, kind: str, fingerprint: str) -> dict[str, Any]:
        """What every answer and chunk begins with; `kind` is its `object`."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": fingerprint,
        }


# ── how far it is ───────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Progress:
    """How far the answer to a request is; a dialect writes from it."""

    request: GenerationRequest
    num_generated: int = 0
    num_cached: int = 0
    num_reasoned: int = 0
    outputs: dict[int, Output] = field(default_factory=dict)
    """Choice → what its parts add up to, where the answers are read for them."""
    timeline: RequestTimeline | None = None
    """From when it is sent to the engine."""

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return self.request.num_prompt_tokens + self.num_generated

    def usage(self) -> dict[str, Any]:
        """The `usage` object so far."""
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

    def count(self, number: int, deltas: list[Delta]) -> list[tuple[int, Delta]]:
        """(choice, delta) of what prompt `number` gained, its tokens and its ends counted."""
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
                called = self.has_calls(choice)  # judged by themselves
                if delta.incomplete and grammar is not None and not called:
                    telemetry.on_invalid_answer(grammar.kind)
        return pairs

    def accumulate(self, choice: int, delta: Delta) -> None:
        """Add the parts of `delta` to its output; calls that are over are judged."""
        output = self.outputs.setdefault(choice, Output())
        output.accumulate(delta.parts or ())
        if output.thoughts and not (output.contents or output.calls):
            self.num_reasoned += len(delta.token_ids)
        use, telemetry = self.request.use, self.request.model.telemetry
        for part in delta.parts or ():
            if isinstance(part, CallEnds) and use is not None:
                call = output.calls[part.index]
                telemetry.on_tool_call(fits=use.fault(call.name, call.arguments) is None)

    def timings(self) -> dict[str, Any]:
        """{"timings": …} when they were asked for."""
        if not self.request.wants_timings or self.timeline is None:
            return {}
        return {"timings": self.timeline.timings()}

    def ending(self, usage_chunk: Callable[[], bytes]) -> bytes:
        """How OpenAI's streams of chunks end: usage and timings where asked for, then `[DONE]`."""
        wanted = self.request.include_usage or self.request.wants_timings
        return (usage_chunk() if wanted else b"") + DONE

    def last_chunk(self, envelope: dict[str, Any], usage: dict[str, Any]) -> bytes:
        """The event that follows the last choice's: usage and timings, as asked for."""
        content = {**envelope, "choices": [], **self.timings()}
        if self.request.include_usage:
            content["usage"] = usage
        return b"data: " + msgspec.json.encode(content) + b"\n\n"


# ── who writes the answer ───────────────────────────────────────────────────────────────────


class Dialect(Protocol):
    """How one endpoint writes the answer to one request."""

    progress: Progress
    """What is asked, and how far it is."""

    def opening(self, choice: int) -> bytes:
        """The chunk that opens a choice, or b""."""
        ...

    def chunk(self, choice: int, delta: Delta) -> bytes:
        """The chunks for what a choice gained, or b"" while nothing can be shown."""
        ...

    def ending(self) -> bytes:
        """What closes a stream after the last chunk."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream instead."""
        ...

    def whole(self, choices: list[list[Delta]]) -> dict[str, Any]:
        """The complete answer, from each choice's deltas."""
        ...

    def refusal(self, error: RequestError) -> Response:
        """The HTTP answer when nothing was sent yet."""
        ...

    def ping(self) -> bytes:
        """What keeps a silent stream alive."""
        ...


class Openings:
    """The chunks that open the choices, each handed out once: with its first text, or before."""

    def __init__(self, dialect: Dialect, num_choices: int) -> None:
        self._dialect = dialect
        self._left = dict.fromkeys(range(num_choices))

    def take(self, choice: int) -> bytes:
        """The opening of a choice, b"" when it is open."""
        if choice not in self._left:
            return b""
        del self._left[choice]
        return self._dialect.opening(choice)

    def rest(self) -> bytes:
        """The openings of all that are not open."""
        return b"".join([self.take(choice) for choice in tuple(self._left)])
