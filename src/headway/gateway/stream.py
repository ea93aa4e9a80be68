"""Relay of a stream, which resumes at another upstream if its upstream fails.

    no token was shown         another upstream is tried, as for any attempt
    marks name the tokens      a Headway server resumes after these tokens, token for token
    `resume: text`             another upstream continues the text as the prefix of its answer
    otherwise                  an error event; a stream never ends silently

In a marked stream an event is shown when its mark has arrived, so the shown tokens are known.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from headway.core.errors import RequestError
from headway.edge.event_stream import ENGINE_WAIT_S, PING, EventStream
from headway.edge.lanes import wait_disconnect
from headway.edge.relayed import Relayed, Resume
from headway.gateway.account import Account
from headway.gateway.ask import (
    STREAM,
    Attempt,
    client_headers,
    model_name_replacements,
    relayed_field,
    replace_each,
)
from headway.gateway.attempts import (
    AttemptError,
    AttemptSequence,
    connection_failure,
    deadline_error,
    run_in_task,
)
from headway.gateway.dialects import MALFORMED, Chunks, EventClass, UpstreamUsage
from headway.gateway.endings import Ending, continuation_body, identity_of
from headway.gateway.events import Event, RelayEventReader
from headway.gateway.incoming import GatewayRequest, hold_of
from headway.gateway.marks import TokenMarks
from headway.gateway.state import GatewayState
from headway.gateway.timeouts import FirstTokenTimeout, SilenceTimeout
from headway.gateway.upstream import FAILURES, SILENCE_S, Upstream

MAX_STREAM_BYTES, MAX_HELD_BYTES, PROGRESS_S = 64 * 2**20, 2**24, 1.0
MAX_RESUMPTIONS = 3
"""Maximum resumptions of one stream; from the second on they take from the retry budget."""


class StreamedAnswer:
    """One stream, over all its attempts."""

    def __init__(self, state: GatewayState, incoming: GatewayRequest, account: Account) -> None:
        self._state = state
        self._incoming = incoming
        self._account = account
        self._way = AttemptSequence(state, incoming)
        self._dialect = incoming.dialect
        self._ending = Ending(incoming)
        self._events: EventStream | None = None
        self._hold = hold_of(state, incoming)
        self._headers: list[tuple[bytes, bytes]] = []
        self._opening = b""
        """Events before the first token, until they are sent."""
        self._accepted = self._opened = self._shown = self._finished = self._over = False
        self._is_client_gone = self._is_text_resumed = False
        self._hides_usage = not self._dialect.asks_for_usage(incoming.raw)
        self._resume: Resume | None = None
        """Identity of the stream and its tokens, in a marked stream."""
        self._text: list[str] = []
        self._progress_s = time.monotonic() + PROGRESS_S
        self._num_resumed = 0
        self._model = ""
        """Name of the model at the first upstream."""

    # ── attempts ────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Relay the stream to its end; raises RequestError if nothing was sent."""
        task = asyncio.current_task()
        assert task is not None
        leaving = asyncio.create_task(self._watch(task))
        self._events = EventStream(
            self._incoming.send,
            self._headers,
            self._ending.ping or PING,
            opening=self._take_opening,
            due=lambda silent_s: (
                silent_s >= (ENGINE_WAIT_S if self._accepted else 7 * ENGINE_WAIT_S)
            ),
        )
        try:
            async with self._state.until_shutdown():
                await self._relay()
        except asyncio.CancelledError as gone:
            if not self._is_client_gone:
                raise
            task.uncancel()
            await self._account.settle("left", gone)
        except RequestError as error:
            if not self._events.started:
                raise
            await self._account.settle(error.code or "failed", error)
            await self._events.end(self._ending.failure(error))
        finally:
            self._events.stop_pinging()
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving

    async def _watch(self, task: "asyncio.Task[Any]") -> None:
        await wait_disconnect(self._incoming.receive)
        self._is_client_gone = True
        task.cancel()

    async def _relay(self) -> None:
        """Make attempts until the stream is complete; raises RequestError if it cannot be."""
        raw, free = self._incoming.raw, False
        while not self._over:
            upstream = await self._way.next(free=free, only=self._may_resume)
            try:
                await _StreamAttempt(self, upstream, raw).run()
            except AttemptError as failure:
                if self._finished and isinstance(self._dialect, Chunks):
                    upstream.breaker.failed()
                    await self._end_without_upstream()
                    return
                self._way.failed(upstream, failure)
                if self._opened or self._shown:
                    raw, free = self._resumed(upstream, failure)

    def _may_resume(self, upstream: Upstream) -> bool:
        """Return whether an upstream may resume the stream: after tokens only one with marks."""
        if not self._shown:
            return True
        if self._resume is None:
            return upstream.continues_text
        there = upstream.model_for(self._incoming.model)
        return upstream.relays and there == self._model

    def _resumed(self, upstream: Upstream, failure: AttemptError) -> tuple[dict[str, Any], bool]:
        """Return (the resuming body, whether the attempt is free); raises the failure's error."""
        self._num_resumed += 1
        raw, route = self._incoming.raw, self._incoming.route
        if self._num_resumed > MAX_RESUMPTIONS or route.resume == "none":
            raise failure.error
        if self._resume is None:
            body = continuation_body(raw, "".join(self._text)) if route.resume == "text" else None
            if body is None and self._shown:
                raise failure.error
            raw, self._is_text_resumed = body or raw, self._shown
        self._state.metrics.add("resumed", how="text" if self._is_text_resumed else "exact")
        return raw, self._num_resumed == 1

    async def _end_without_upstream(self) -> None:
        """End a stream of which all but the end was shown."""
        self._over = True
        await self._finish(self._tail() + b"data: [DONE]\n\n")

    def _tail(self) -> bytes:
        """Return a chunk with the usage that the upstream did not send, if the client wants it."""
        return b"" if self._hides_usage else self._ending.chunk(self._account.relayed)

    async def _finish(self, data: bytes) -> None:
        """Settle the request, then send the last bytes."""
        assert self._events is not None
        if self._hold is not None:
            data = await self._hold.rest(data)
        data = self._take_opening() + data
        self._account.first_token()
        self._events.stop_pinging()
        await self._account.settle("ok")
        await self._events.end(data)

    # ── the client's side ───────────────────────────────────────────────────────────────────

    def reset_opening(self) -> None:
        """Reset the state of an attempt of which nothing was sent."""
        self._opening, self._ending.identity, self._resume = b"", None, None
        self._text.clear()

    def _take_opening(self) -> bytes:
        """Return the events before the first token, which are sent early if that takes long."""
        opening, self._opening = self._opening, b""
        self._opened = self._opened or bool(opening)
        return opening

    async def write(self, data: bytes) -> None:
        """Write events that show content, after the opening events."""
        assert self._events is not None
        if self._hold is not None:
            data = await self._hold.take(data)
            if not data:
                return
        self._account.first_token()
        await self._events.write(self._take_opening() + data)

    def note_progress(self, tell: Callable[[], None]) -> None:
        """Record the number of tokens once a second; `tell` updates the count."""
        if time.monotonic() > self._progress_s:
            self._progress_s = time.monotonic() + PROGRESS_S
            tell()
            self._account.progress(self._account.relayed.output)


class _StreamAttempt:
    """One attempt at a stream."""

    def __init__(self, stream: StreamedAnswer, upstream: Upstream, raw: dict[str, Any]) -> None:
        self._stream = stream
        self._upstream = upstream
        incoming = self._incoming = stream._incoming
        dialect = self._dialect = incoming.dialect
        self._is_resumed = stream._opened or stream._shown
        if not self._is_resumed:
            stream.reset_opening()
        self._was = stream._account.relayed
        body = dialect.with_usage(raw)
        self._is_marked = (
            upstream.relays and incoming.route.resume != "none" and dialect.may_resume(raw)
        )
        self._before = len(stream._resume.tokens) if stream._resume is not None else 0
        if self._is_marked:
            resume = stream._resume if self._is_resumed else None
            body = {**body, **relayed_field(Relayed(marks=True, resume=resume))}
        self._skips_opening = self._is_resumed and not (self._is_marked and stream._resume)
        self._pairs = model_name_replacements(incoming, upstream)
        self._attempt = Attempt(stream._state, incoming, upstream, body)
        self._usage: UpstreamUsage | None = None
        self._marks = TokenMarks()
        self._held, self._has_identity = b"", False
        self._held_is_final = False
        """Whether the events that wait for their mark end the answer."""
        self._size = 0
        self._reader: RelayEventReader | None = None
        self._first_token_timeout: FirstTokenTimeout | None = None

    async def run(self) -> None:
        """Relay this upstream's stream to its end; raises AttemptError if it fails."""
        stream, upstream, attempt = self._stream, self._upstream, self._attempt
        outcome, was_s = "left", stream._account.ttft_s
        try:
            await self._read()
            outcome = "ok"
            upstream.breaker.succeeded()
        except AttemptError as failure:
            outcome = failure.outcome
            raise
        except FAILURES as error:
            broken = connection_failure(error)
            if stream._way.remaining_s <= 0:
                broken.error, broken.again = deadline_error(), False
            outcome = broken.outcome
            raise broken from error
        except (asyncio.CancelledError, RequestError):  # client disconnected, or held back
            upstream.breaker.record_abort()
            raise
        finally:
            if self._first_token_timeout is not None:
                self._first_token_timeout.end()
            self._update_relayed()
            usage, estimated = self._usage_or_estimate(outcome)
            ttft_s = stream._account.ttft_s if was_s is None else None
            stream._account.attempt(upstream, outcome, usage, estimated=estimated, ttft_s=ttft_s)
            attempt.end(usage.prompt if not estimated else 0, usage.output)
        if stream._ending.data is not None:
            await stream._finish(stream._ending.data)

    async def _read(self) -> None:
        stream, way, upstream = self._stream, self._stream._way, self._upstream
        first_s, budget = self._incoming.route.first_token_s, stream._state.budget
        async with asyncio.timeout(way.remaining_s) as limit:
            self._first_token_timeout = FirstTokenTimeout(limit, budget, first_s)
            with (
                SilenceTimeout(limit, SILENCE_S) as silence,
                upstream.expire_when_down(limit) as here,
            ):
                async with self._attempt.answer(STREAM) as answer:
                    here()
                    stream._accepted = True
                    if not (stream._opened or stream._shown):
                        stream._headers[:] = [
                            *client_headers(answer, upstream),
                            (b"x-headway-attempts", str(way.num_attempts).encode()),
                            (b"x-headway-upstream", upstream.name.encode("ascii", "replace")),
                        ]
                    await run_in_task(self._relay(answer, silence))

    async def _relay(self, answer: aiohttp.ClientResponse, silence: SilenceTimeout) -> None:
        """Read events and relay them; the events of one read become one write."""
        stream = self._stream
        reader = self._reader = RelayEventReader(answer.content, MAX_STREAM_BYTES, silence)
        while not stream._over:
            events = await reader.read()
            if events is None:
                self._end_of_bytes()
                return
            ready: list[bytes] = []
            try:
                for event in self._attempt.events(events):
                    ready.append(self._take(event))
            finally:  # events before an error are shown
                if stream._over and stream._account.ttft_s is None and any(ready[:-1]):
                    await stream.write(b"".join(ready[:-1]))  # the first token is not delayed
                    del ready[:-1]
                if stream._over:
                    stream._ending.data = b"".join(ready)
                elif any(ready):
                    await stream.write(b"".join(ready))
                    stream.note_progress(self._update_relayed)
            if not stream._over and len(self._held) + len(stream._opening) > MAX_HELD_BYTES:
                raise ValueError("too many bytes before a token or its mark")

    def _end_of_bytes(self) -> None:
        """Handle the end of the connection: complete if only the end event is missing."""
        stream = self._stream
        if not (stream._finished and isinstance(self._dialect, Chunks)):
            raise aiohttp.ClientPayloadError("the stream has no end")
        stream._over = True
        self._update_relayed()
        stream._ending.data = stream._tail() + b"data: [DONE]\n\n"

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def _take(self, event: Event) -> bytes:
        """Return the client's bytes of an event; raises AttemptError, ValueError or MALFORMED."""
        stream = self._stream
        if stream._over:
            return b""
        if event.comment:
            return self._mark(event.comment)
        try:
            shown = self._dialect.read(event, self._usage)
        except MALFORMED as error:
            raise ValueError("an event that is no JSON") from error
        if shown.error:
            raise connection_failure(ValueError("an error in the stream"))
        if shown.usage is not None:
            self._usage = shown.usage
        if shown.end:
            return self._end(event)
        if shown.hidden and (stream._hides_usage or shown.usage is None):
            return b""
        if shown.content and not self._has_identity:
            self._learn_identity(event)
        data = self._encoded(event)
        if not shown.content:
            return self._passed(event, shown, data)
        if self._is_marked and not stream._ending.is_unmarked_content(event):
            self._held += data
            self._held_is_final = self._held_is_final or shown.finished
            self._note(shown)
            return b""
        self._note(shown)
        stream._finished = stream._finished or shown.finished
        self._record_token(shown)
        return data

    def _encoded(self, event: Event) -> bytes:
        data = event.encoded()
        return replace_each(data, self._pairs) if self._pairs else data

    def _note(self, shown: EventClass) -> None:
        """Count an event's content, which is shown now or with its mark."""
        stream = self._stream
        if self._reader is not None:
            self._reader.note_content()
        self._size += shown.size
        if shown.text and stream._account.text is not None:
            stream._account.text.append(shown.text)
        if shown.text and stream._resume is None:
            stream._text.append(shown.text)

    def _passed(self, event: Event, shown: EventClass, data: bytes) -> bytes:
        """Handle an event without a token: part of the opening, or between content."""
        stream = self._stream
        if stream._shown and (shown.usage is not None or not self._skips_opening):
            return data
        self._learn_identity(event)
        if self._skips_opening:
            return b""
        stream._ending.note_opening(event, self._upstream, stream._state, self._incoming)
        stream._opening += data
        return b""

    def _learn_identity(self, event: Event) -> None:
        """Learn the stream's identity; the first event of a completion already shows a token."""
        stream, ending = self._stream, self._stream._ending
        self._has_identity = True
        if self._skips_opening:
            self._pairs += [
                pair for pair in ending.identity_replacements(event) if pair not in self._pairs
            ]
            return
        if ending.identity is None:
            ending.identity = identity_of(self._dialect, event)
        if self._is_marked and stream._resume is None and ending.identity is not None:
            stream._resume = Resume(*ending.identity)

    def _record_token(self, shown: EventClass | None = None) -> None:
        """Record that a token is shown: from now on only the deadline of the request holds."""
        self._stream._shown = self._stream._opened = True
        self._stream._model = self._stream._model or self._upstream.model_for(self._incoming.model)
        if self._first_token_timeout is not None:
            self._first_token_timeout.end()
            self._first_token_timeout = None
            self._attempt.upstream.speed.began(self._attempt.flight)
        self._attempt.flight.num_tokens += 1

    def _mark(self, comment: bytes) -> bytes:
        """Return the held events that this mark releases."""
        count = self._marks.take(comment) if self._is_marked else None
        if count is None or not self._held:
            return b""
        held, self._held = self._held, b""
        self._stream._finished = self._stream._finished or self._held_is_final
        self._record_token()
        self._attempt.flight.num_tokens += count - 1
        return held

    def _end(self, event: Event) -> bytes:
        """End the stream; held events are shown with its end."""
        self._stream._over = True
        held, self._held = self._held, b""
        if self._stream._is_text_resumed and isinstance(self._dialect, Chunks):
            held += self._stream._ending.chunk(None)
        return held + self._encoded(event)

    # ── usage ───────────────────────────────────────────────────────────────────────────────

    def _update_relayed(self) -> None:
        """Update the relayed tokens: exact by marks, else estimated by bytes."""
        was, account = self._was, self._stream._account
        if self._marks.has_marks:
            usage, resume = self._marked_usage(), self._stream._resume
            if resume is not None:
                resume.tokens[self._before :] = self._marks.tokens()
            shown = self._before + usage.output
            account.relayed = UpstreamUsage(
                was.prompt or usage.prompt, was.cached or usage.cached, shown
            )
        elif not self._is_marked and self._size:
            now = account.estimate(self._upstream, self._size)
            relayed = UpstreamUsage(was.prompt or now.prompt, 0, was.output + now.output)
            account.relayed, account.estimated = relayed, True

    def _marked_usage(self) -> UpstreamUsage:
        """Return the usage by marks; only the output tokens if the other counts are impossible."""
        usage, account = self._marks.usage(), self._stream._account
        return account.checked_usage(self._upstream, usage) or UpstreamUsage(
            0, 0, len(self._marks.tokens())
        )

    def _usage_or_estimate(self, outcome: str) -> tuple[UpstreamUsage, bool]:
        """Return (usage of this attempt, whether it is estimated), and update the relayed sum."""
        account, upstream = self._stream._account, self._upstream
        usage = account.checked_usage(upstream, self._usage) if outcome == "ok" else None
        if usage is not None:
            own = usage.output
            if self._is_marked and self._is_resumed:  # its count includes the tokens before
                own -= self._before
                account.relayed = usage
            else:
                account.relayed = UpstreamUsage(
                    self._was.prompt or usage.prompt,
                    self._was.cached or usage.cached,
                    self._was.output + usage.output,
                )
            account.estimated = self._is_resumed and not self._is_marked
            return UpstreamUsage(usage.prompt + self._before, usage.cached, max(0, own)), False
        if self._marks.has_marks:
            account.estimated = False
            marked = self._marked_usage()
            return UpstreamUsage(marked.prompt + self._before, marked.cached, marked.output), False
        usage = account.estimate_unfinished(self._attempt, outcome, self._size)
        account.estimated = account.estimated or any(usage)
        return usage, any(usage)
