"""One generation over HTTP: what was asked, how far it is, and the engine's streams behind it.

Given prepared prompts it submits them and hands out what arrives, counted; a `Dialect` says what a
chunk and a whole answer look like. `answering` sends them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from headway.admit.admission import Ticket
from headway.core.errors import RequestError, ShedError
from headway.core.request import SamplingParams
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS, Slo
from headway.core.terms import Terms
from headway.edge.event_stream import DONE
from headway.edge.keys import Caller, anybody
from headway.frontend.answer import Delta
from headway.frontend.stream import Stream
from headway.frontend.text import OutputParserSpec
from headway.frontend.text.parts import CallEnds, Said
from headway.server.models import ServedModel
from headway.server.openai.render import usage
from headway.server.openai.tools import ToolUse
from headway.telemetry.timeline import Timeline


class ClientGoneError(RequestError):
    """The client closed the connection; nobody reads this."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one HTTP request asks for; choice i belongs to prompt i // n."""

    model: ServedModel
    model_name: str
    prompts: list[list[int]]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    request_id: str
    created: int
    arrived_s: float
    slo: Slo | None = None
    priority: int | None = None
    wants_timings: bool = False
    cache_salt: str | None = None
    parent: str | None = None
    timeline: Timeline | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_reasoned: int = 0
    use: ToolUse | None = None
    parser_spec: OutputParserSpec | None = None
    said: dict[int, Said] = field(default_factory=dict)
    """Choice → what its parts add up to, where the answers are read for them."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    may_be_refused: bool = False
    """Whether the engine may yet refuse it: its stream is opened later, while it waits."""
    caller: Caller = field(default_factory=anybody)
    ticket: Ticket | None = None
    service_class: ServiceClass = field(init=False)

    def __post_init__(self) -> None:
        self.service_class = self.model.telemetry.classes[DEFAULT_CLASS]

    @property
    def terms(self) -> Terms:
        """What the engine is told of its class, its key and its own fields."""
        return self.service_class.terms(self.slo, self.caller.weight, self.priority)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest_answer(self) -> int:
        """Its max_tokens, or what the context leaves of the longest prompt."""
        info = self.model.client.info
        context = info.max_model_len if info is not None else 0
        left = context - max(map(len, self.prompts), default=0)
        return self.sampling.max_tokens or max(left, 0)

    def usage(self) -> dict[str, Any]:
        """The `usage` object so far."""
        reasoned = self.num_reasoned if self.parser_spec and self.parser_spec.reasoning else None
        return usage(self.num_prompt_tokens, self.num_generated, self.num_cached, reasoned)

    def has_calls(self, choice: int) -> bool:
        """Whether a choice has called a tool."""
        said = self.said.get(choice)
        return said is not None and bool(said.calls)

    def hear(self, choice: int, delta: Delta) -> None:
        """Add the parts of `delta` to what was said; calls that are over are judged."""
        said = self.said.setdefault(choice, Said())
        said.take(delta.parts or ())
        if said.thoughts and not (said.contents or said.calls):
            self.num_reasoned += len(delta.token_ids)
        for part in delta.parts or ():
            if isinstance(part, CallEnds) and self.use is not None:
                call = said.calls[part.index]
                fault = self.use.fault(call.name, call.arguments)
                self.model.telemetry.called(fits=fault is None)

    def envelope(self, kind: str, fingerprint: str) -> dict[str, Any]:
        """What every answer and chunk of this generation begins with; `kind` is its `object`."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": fingerprint,
        }

    def timings(self) -> dict[str, Any]:
        """{"timings": …} when they were asked for."""
        if not self.wants_timings or self.timeline is None:
            return {}
        return {"timings": self.timeline.timings()}

    def ending(self, usage_chunk: Callable[[], bytes]) -> bytes:
        """How OpenAI's streams of chunks end: usage and timings where asked for, then `[DONE]`."""
        return (usage_chunk() if self.include_usage or self.wants_timings else b"") + DONE

    def last_chunk(self, envelope: dict[str, Any], usage: dict[str, Any]) -> bytes:
        """The event that follows the last choice's: usage and timings, as asked for."""
        content = {**envelope, "choices": [], **self.timings()}
        if self.include_usage:
            content["usage"] = usage
        return b"data: " + msgspec.json.encode(content) + b"\n\n"

    def begin(self) -> Timeline:
        """The request's timeline, from now on among the live ones."""
        for prompt in self.prompts:
            self.model.telemetry.prompts.remember(prompt)
        self.timeline = self.model.telemetry.begin(
            self.request_id,
            arrived_s=self.arrived_s,
            num_prompt=self.num_prompt_tokens,
            num_choices=len(self.prompts) * self.sampling.n,
            service_class=self.service_class,
            slo=self.slo,
            parent=self.parent,
            n=self.sampling.n,
            max_tokens=self.longest_answer,
        )
        return self.timeline


class Dialect(Protocol):
    """How one endpoint writes answers."""

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


def submit(generation: Generation, timeline: Timeline, streams: list[Stream]) -> None:
    """Send every prompt to the engine; raises EngineDownError when it takes none now."""
    client, telemetry = generation.model.client, generation.model.telemetry
    try:
        for prompt in generation.prompts:
            stream = client.submit(
                prompt,
                generation.sampling,
                principal=generation.caller.principal.salted(generation.cache_salt),
                terms=generation.terms,
                arrived_s=generation.arrived_s,
                parser_spec=generation.parser_spec,
            )
            if generation.ticket is not None:
                number = len(streams)
                generation.ticket.sent(number, stream.answer.request.request_id)
                stream.on_begin = partial(generation.ticket.began, number)
            streams.append(stream)
            telemetry.submitted(timeline, stream.answer.request.request_id)
    except RequestError as error:
        telemetry.refused(error, timeline)
        raise


async def watch_for_departure(receive: Receive, streams: list[Stream]) -> None:
    """End the streams when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for stream in streams:
        stream.fail(ClientGoneError("The client left."))


async def arriving(
    generation: Generation, streams: list[Stream], timeline: Timeline
) -> AsyncIterator[list[tuple[int, Delta]]]:
    """(choice, delta) pairs as they come, with tokens and finishes counted."""
    n, telemetry = generation.sampling.n, generation.model.telemetry
    grammar = generation.sampling.grammar
    try:
        async for offset, deltas in merge(streams):
            pairs = []
            for delta in deltas:
                pairs.append((offset * n + delta.index, delta))
                generation.num_generated += len(delta.token_ids)
                if delta.parts is not None:
                    generation.hear(offset * n + delta.index, delta)
                if delta.visible:
                    timeline.published()
                if delta.first_scheduled_s is not None:
                    generation.num_cached += delta.num_cached_tokens
                    timeline.scheduled(delta.first_scheduled_s, delta.num_cached_tokens)
                if delta.finish_reason is not None:
                    telemetry.sequence_finished(delta.finish_reason)
                    called = generation.has_calls(offset * n + delta.index)  # judged by themselves
                    if delta.incomplete and grammar is not None and not called:
                        telemetry.answer_invalid(grammar.kind)
            yield pairs
    except (ClientGoneError, ShedError):
        raise
    except RequestError as error:
        telemetry.failed(timeline, error)
        raise
    timeline.complete()


async def merge(streams: list[Stream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """(stream's number, its next deltas) until all are complete."""
    if len(streams) == 1:
        while deltas := await streams[0].next():
            yield 0, deltas
        return
    waiting = {asyncio.ensure_future(s.next()): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                deltas = task.result()
                if deltas:
                    waiting[asyncio.ensure_future(streams[number].next())] = number
                    yield number, deltas
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
