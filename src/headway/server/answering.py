"""How a generation is answered: whole, or streamed as it comes.

Given a `Generation` and its dialect it submits, relays and cleans up. It promises that a client
that leaves frees its blocks, and that a stream never ends without `[DONE]` or an error event. A
stream is opened by its first text, or before that, once it has been silent for a second and the
engine has begun: from then on an error is an event, no status.
"""

import asyncio
import contextlib
from typing import Any

from starlette.types import Receive, Send

from headway.core.errors import RequestError, ServerFaultError, ShedError
from headway.edge.errors import json_response
from headway.edge.event_stream import (
    GRACE_S,
    PING_INTERVAL_S,
    WAIT_S,
    EventStream,
    send_response,
)
from headway.frontend.answer import Delta
from headway.frontend.stream import Stream
from headway.server.generation import (
    ClientGoneError,
    Dialect,
    Generation,
    arriving,
    submit,
    watch_for_departure,
)
from headway.server.models import State
from headway.telemetry.timeline import Timeline


async def respond(
    state: State, generation: Generation, dialect: Dialect, receive: Receive, send: Send
) -> None:
    """Run `generation` and answer, streamed or whole; its timeline ends with it.

    Raises ShedError, and nothing was sent, when the engine sheds it.
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
        if isinstance(error, ShedError):
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
        if isinstance(error, ShedError):
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
    except (ClientGoneError, ShedError):
        raise
    except RequestError as error:
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
    openings = Openings(dialect, len(streams) * generation.sampling.n)
    events = EventStream(
        send,
        generation.headers,
        dialect.ping(),
        opening=openings.rest,
        due=lambda silent_s: silent_s >= longest_silence_s(generation, timeline),
    )
    try:
        await relay(generation, dialect, streams, timeline, events, openings)
    except ClientGoneError:
        raise
    except RequestError as error:
        events.stop_pinging()
        if isinstance(error, ShedError):
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


def longest_silence_s(generation: Generation, timeline: Timeline) -> float:
    """How long a stream may go without headers: until then an error has a status of its own."""
    if timeline.computed:
        return GRACE_S
    return PING_INTERVAL_S if generation.may_be_refused else WAIT_S


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


async def relay(
    generation: Generation,
    dialect: Dialect,
    streams: list[Stream],
    timeline: Timeline,
    events: EventStream,
    openings: Openings,
) -> None:
    """Write what arrives; a token has left when its text has, an opening is no token."""
    held: dict[int, int] = {}
    async for pairs in arriving(generation, streams, timeline):
        for choice, delta in pairs:
            opening = openings.take(choice)
            content = dialect.chunk(choice, delta)
            if opening or content:
                await events.write(opening + content)
            if not content:  # half a character, or what may become a stop string
                held[choice] = held.get(choice, 0) + len(delta.token_ids)
                continue
            count = len(delta.token_ids) + (held.pop(choice, 0) if held else 0)
            timeline.tokens_left(choice, count)
    ending = dialect.ending()
    events.stop_pinging()
    await events.end(ending)


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
