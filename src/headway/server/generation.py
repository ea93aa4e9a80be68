"""One generation over HTTP: the engine streams behind it, and its answer, whole or in chunks.

Given prepared prompts and a dialect (what a chunk and a whole answer look like) it submits, relays
and cleans up. It promises that a client that leaves frees its blocks, and that a stream never ends
without `[DONE]` or an error event.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send

from headway.core.errors import GIVEN_UP, RequestError, ServerFaultError
from headway.core.request import SamplingParams
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS, Slo
from headway.core.terms import Terms
from headway.engine.answer import Delta
from headway.engine.stream import Stream
from headway.engine.text import Reading
from headway.engine.text.parts import CallEnds, Said
from headway.server.admission import Ticket
from headway.server.errors import json_response
from headway.server.event_stream import DONE, EventStream, send_response
from headway.server.keys import Caller, anybody
from headway.server.models import ServedModel, State
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
    reading: Reading | None = None
    said: dict[int, Said] = field(default_factory=dict)
    """Choice → what its parts add up to, where the answers are read for them."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
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
        reasoned = self.num_reasoned if self.reading and self.reading.thought else None
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


async def respond(
    state: State, generation: Generation, dialect: Dialect, receive: Receive, send: Send
) -> None:
    """Run `generation` and answer, streamed or whole; its timeline ends with it.

    Raises RequestError with the reason GIVEN_UP, and nothing was sent, when the engine sheds it.
    """
    telemetry = generation.model.telemetry
    timeline = generation.begin()
    streams: list[Stream] = []
    watcher = None
    try:
        submit(generation, timeline, streams)
        watcher = asyncio.create_task(watch_for_departure(receive, streams))
        if generation.stream:
            await send_chunks(generation, dialect, streams, timeline, send)
        else:
            await send_whole(generation, dialect, streams, timeline, send)
    except ClientGoneError:
        telemetry.sequence_finished("abort")
        timeline.left()
    except Exception as error:
        if isinstance(error, RequestError) and error.reason == GIVEN_UP:
            timeline.moved()
        timeline.failed()
        raise
    finally:
        settle(generation, timeline, streams)
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


async def run_alone(generation: Generation, dialect: Dialect) -> dict[str, Any]:
    """The whole answer, generated with no client waiting; raises RequestError."""
    timeline = generation.begin()
    streams: list[Stream] = []
    try:
        submit(generation, timeline, streams)
        return await collect(generation, dialect, streams, timeline)
    except Exception as error:
        if isinstance(error, RequestError) and error.reason == GIVEN_UP:
            generation.model.telemetry.failed(timeline, error)
        timeline.failed()
        raise
    finally:
        settle(generation, timeline, streams)


def settle(generation: Generation, timeline: Timeline, streams: list[Stream]) -> None:
    """It is over, one way or another: count it, and end what still runs of it."""
    timeline.left()  # cancelled: nobody is there any more
    if generation.ticket is not None:
        generation.ticket.close(generation.num_prompt_tokens + generation.num_generated)
    for stream in streams:
        stream.close()


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
                reading=generation.reading,
            )
            if generation.ticket is not None:
                generation.ticket.sent(len(streams), stream.answer.request.request_id)
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
                    if generation.ticket is not None:
                        generation.ticket.began(offset)
                    timeline.scheduled(delta.first_scheduled_s, delta.num_cached_tokens)
                if delta.finish_reason is not None:
                    telemetry.sequence_finished(delta.finish_reason)
                    called = generation.has_calls(offset * n + delta.index)  # judged by themselves
                    if delta.incomplete and grammar is not None and not called:
                        telemetry.answer_invalid(grammar.kind)
            yield pairs
    except ClientGoneError:
        raise
    except RequestError as error:
        if error.reason != GIVEN_UP:
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


async def send_whole(
    generation: Generation,
    dialect: Dialect,
    streams: list[Stream],
    timeline: Timeline,
    send: Send,
) -> None:
    """Collect everything, then answer once."""
    try:
        response = json_response(await collect(generation, dialect, streams, timeline))
    except ClientGoneError:
        raise
    except RequestError as error:
        if error.reason == GIVEN_UP:
            raise
        response = dialect.refusal(error)
    await send_response(response, send, generation.headers)


async def collect(
    generation: Generation, dialect: Dialect, streams: list[Stream], timeline: Timeline
) -> dict[str, Any]:
    """The whole answer, once it is complete."""
    choices: list[list[Delta]] = [[] for _ in range(len(streams) * generation.sampling.n)]
    async for pairs in arriving(generation, streams, timeline):
        for choice, delta in pairs:
            choices[choice].append(delta)
            timeline.tokens_left(choice, len(delta.token_ids))
    return dialect.whole(choices)


async def send_chunks(
    generation: Generation,
    dialect: Dialect,
    streams: list[Stream],
    timeline: Timeline,
    send: Send,
) -> None:
    """Relay chunk by chunk; an error before the first is an HTTP error, later an error event."""
    events = EventStream(send, generation.headers, dialect.ping())
    opened: set[int] = set()
    held: dict[int, int] = {}
    try:
        async for pairs in arriving(generation, streams, timeline):
            for choice, delta in pairs:
                data = b""
                if choice not in opened:
                    opened.add(choice)
                    data = dialect.opening(choice)
                content = dialect.chunk(choice, delta)
                if data or content:
                    await events.write(data + content)
                if not content:  # half a character, or what may become a stop string
                    held[choice] = held.get(choice, 0) + len(delta.token_ids)
                    continue
                count = len(delta.token_ids) + (held.pop(choice, 0) if held else 0)
                timeline.tokens_left(choice, count)
        ending = dialect.ending()
        events.stop_pinging()
        await events.end(ending)
    except ClientGoneError:
        raise
    except RequestError as error:
        events.stop_pinging()
        if error.reason == GIVEN_UP:
            if not events.started:
                raise
            generation.model.telemetry.failed(timeline, error)
        await send_failure(events, dialect, error, send, generation.headers)
    except Exception:
        events.stop_pinging()
        await send_failure(events, dialect, ServerFaultError(), send, generation.headers)
        raise
    finally:
        events.stop_pinging()


async def send_failure(
    events: EventStream,
    dialect: Dialect,
    error: RequestError,
    send: Send,
    headers: list[tuple[bytes, bytes]],
) -> None:
    """An HTTP error when nothing was sent yet, else an error event that ends the stream."""
    if events.started:
        await events.end(dialect.failure(error))
        return
    await send_response(dialect.refusal(error), send, headers)
