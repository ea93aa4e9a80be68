"""A stream on its way through the gateway: relayed as it comes, gone on with where it breaks.

    nothing shown yet          another upstream is asked, as for any attempt
    marks tell what was shown  a Headway server goes on behind these tokens, token for token
    `resume: text`             another goes on with the text as the beginning of its answer
    else                       an error event: never silence

Of a marked stream an event is shown when its mark is here, so that what was shown is known.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from headway.core.errors import RequestError
from headway.edge.event_stream import PING, WAIT_S, EventStream
from headway.edge.lanes import departure
from headway.edge.relayed import Relayed, Resume
from headway.gateway.account import Account
from headway.gateway.ask import STREAM, Attempt, passed_back, relayed_field, renamed, replaced
from headway.gateway.attempts import AttemptError, Way, in_its_own_task, too_late, unanswered
from headway.gateway.dialects import MALFORMED, Chunks, Shown, Usage
from headway.gateway.endings import Ending, continued, identity_of
from headway.gateway.events import Event, EventReader
from headway.gateway.incoming import Incoming, hold_of
from headway.gateway.marks import Marks
from headway.gateway.patience import Patience, Silence
from headway.gateway.state import State
from headway.gateway.upstream import FAILURES, SILENCE_S, Upstream

MAX_STREAM_BYTES, MAX_HELD_BYTES, PROGRESS_S = 64 * 2**20, 2**24, 1.0
MOST_RESUMED = 3
"""How often one stream may go on elsewhere; after the first time the budget is asked."""


class StreamedAnswer:
    """One stream, over all its attempts."""

    def __init__(self, state: State, incoming: Incoming, account: Account) -> None:
        self._state = state
        self._incoming = incoming
        self._account = account
        self._way = Way(state, incoming)
        self._dialect = incoming.dialect
        self._ending = Ending(incoming)
        self._events: EventStream | None = None
        self._hold = hold_of(state, incoming)
        self._headers: list[tuple[bytes, bytes]] = []
        self._opening = b""
        """What was received before anything that shows a token, until it is sent."""
        self._accepted = self._opened = self._shown = self._finished = self._over = False
        self._is_client_gone = self._by_text = False
        self._hides_usage = not self._dialect.asks_for_usage(incoming.raw)
        self._resume: Resume | None = None
        """What the stream is known by and its tokens, where marks tell."""
        self._text: list[str] = []
        self._progress_s = time.monotonic() + PROGRESS_S
        self._num_resumed = 0
        self._model = ""
        """What the model is called at the upstream that began."""

    # ── the way ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Relay until it ends; raises RequestError while nothing was sent."""
        task = asyncio.current_task()
        assert task is not None
        leaving = asyncio.create_task(self._watch(task))
        self._events = EventStream(
            self._incoming.send,
            self._headers,
            self._ending.ping or PING,
            opening=self._take_opening,
            due=lambda silent_s: silent_s >= (WAIT_S if self._accepted else 7 * WAIT_S),
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
        await departure(self._incoming.receive)
        self._is_client_gone = True
        task.cancel()

    async def _relay(self) -> None:
        """Attempts until the stream is complete; raises RequestError where it cannot be."""
        raw, free = self._incoming.raw, False
        while not self._over:
            upstream = await self._way.next(free=free, only=self._may_go_on)
            try:
                await _Attempted(self, upstream, raw).run()
            except AttemptError as failure:
                if self._finished and isinstance(self._dialect, Chunks):
                    upstream.breaker.failed()
                    await self._end_here()
                    return
                self._way.failed(upstream, failure)
                if self._opened or self._shown:
                    raw, free = self._resumed(upstream, failure)

    def _may_go_on(self, upstream: Upstream) -> bool:
        """Whether an upstream can be the next: behind tokens that were shown only one of marks."""
        if not self._shown or self._resume is None:
            return True
        there = upstream.model_for(self._incoming.model)
        return upstream.relays and there == self._model

    def _resumed(self, upstream: Upstream, failure: AttemptError) -> tuple[dict[str, Any], bool]:
        """(the body that goes on, whether that is free); raises the failure's error."""
        self._num_resumed += 1
        raw, route = self._incoming.raw, self._incoming.route
        if self._num_resumed > MOST_RESUMED or route.resume == "none":
            raise failure.error
        if self._resume is None:
            body = continued(raw, "".join(self._text)) if route.resume == "text" else None
            if body is None and self._shown:
                raise failure.error
            raw, self._by_text = body or raw, self._shown
        self._state.metrics.add("resumed", how="text" if self._by_text else "exact")
        return raw, self._num_resumed == 1

    async def _end_here(self) -> None:
        """All was shown but for the end of the stream, which is ours to write."""
        self._over = True
        await self._finish(self._tail() + b"data: [DONE]\n\n")

    def _tail(self) -> bytes:
        """The usage that an upstream did not come to tell, where the client asked for it."""
        return b"" if self._hides_usage else self._ending.chunk(self._account.relayed)

    async def _finish(self, data: bytes) -> None:
        """The books first, then the last bytes."""
        assert self._events is not None
        if self._hold is not None:
            data = await self._hold.rest(data)
        data = self._take_opening() + data
        self._account.first_token()
        self._events.stop_pinging()
        await self._account.settle("ok")
        await self._events.end(data)

    # ── the client's side ───────────────────────────────────────────────────────────────────

    def begin_anew(self) -> None:
        """Nothing was sent: what another attempt has opened is not this one's."""
        self._opening, self._ending.identity, self._resume = b"", None, None
        self._text.clear()

    def _take_opening(self) -> bytes:
        """What opens the stream where its first token takes long."""
        opening, self._opening = self._opening, b""
        self._opened = self._opened or bool(opening)
        return opening

    async def write(self, data: bytes) -> None:
        """Events that show something, behind what opens the stream."""
        assert self._events is not None
        if self._hold is not None:
            data = await self._hold.take(data)
            if not data:
                return
        self._account.first_token()
        await self._events.write(self._take_opening() + data)

    def note_progress(self, tell: Callable[[], None]) -> None:
        """Write down once a second how far the answer is, as `tell` counts it."""
        if time.monotonic() > self._progress_s:
            self._progress_s = time.monotonic() + PROGRESS_S
            tell()
            self._account.progress(self._account.relayed.output)


class _Attempted:
    """One attempt at a stream."""

    def __init__(self, stream: StreamedAnswer, upstream: Upstream, raw: dict[str, Any]) -> None:
        self._stream = stream
        self._upstream = upstream
        incoming = self._incoming = stream._incoming
        dialect = self._dialect = incoming.dialect
        self._goes_on = stream._opened or stream._shown
        if not self._goes_on:
            stream.begin_anew()
        self._was = stream._account.relayed
        body = dialect.with_usage(raw)
        self._is_marked = (
            upstream.relays and incoming.route.resume != "none" and dialect.may_resume(raw)
        )
        self._before = len(stream._resume.tokens) if stream._resume is not None else 0
        if self._is_marked:
            resume = stream._resume if self._goes_on else None
            body = {**body, **relayed_field(Relayed(marks=True, resume=resume))}
        self._skips_opening = self._goes_on and not (self._is_marked and stream._resume)
        self._pairs = renamed(incoming, upstream)
        self._attempt = Attempt(stream._state, incoming, upstream, body)
        self._usage: Usage | None = None
        self._marks = Marks()
        self._held, self._is_known = b"", False
        self._held_finished = False
        """Whether what waits for its mark ends the answer."""
        self._size = 0
        self._reader: EventReader | None = None
        self._patience: Patience | None = None

    async def run(self) -> None:
        """Relay this upstream's stream to its end; raises AttemptError where it breaks."""
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
            broken = unanswered(error)
            if stream._way.remaining_s <= 0:
                broken.error, broken.again = too_late(), False
            outcome = broken.outcome
            raise broken from error
        except (asyncio.CancelledError, RequestError):  # who asked has left, or a score held it
            upstream.breaker.given_up()
            raise
        finally:
            if self._patience is not None:
                self._patience.end()
            self._tell_shown()
            usage, estimated = self._counted(outcome)
            ttft_s = stream._account.ttft_s if was_s is None else None
            stream._account.attempt(upstream, outcome, usage, estimated=estimated, ttft_s=ttft_s)
            attempt.end(usage.prompt if not estimated else 0, usage.output)
        if stream._ending.data is not None:
            await stream._finish(stream._ending.data)

    async def _read(self) -> None:
        stream, way, upstream = self._stream, self._stream._way, self._upstream
        first_s, budget = self._incoming.route.first_token_s, stream._state.budget
        async with asyncio.timeout(way.remaining_s) as limit:
            self._patience = Patience(limit, budget, first_s)
            with Silence(limit, SILENCE_S) as silence, upstream.hurried(limit) as here:
                async with self._attempt.answer(STREAM) as answer:
                    here()
                    stream._accepted = True
                    if not (stream._opened or stream._shown):
                        stream._headers[:] = [
                            *passed_back(answer, upstream),
                            (b"x-headway-attempts", str(way.num_attempts).encode()),
                            (b"x-headway-upstream", upstream.name.encode("ascii", "replace")),
                        ]
                    await in_its_own_task(self._relay(answer, silence))

    async def _relay(self, answer: aiohttp.ClientResponse, silence: Silence) -> None:
        """Read events and hand them on, those of one read in one write."""
        stream = self._stream
        reader = self._reader = EventReader(answer.content, MAX_STREAM_BYTES, silence)
        while not stream._over:
            events = await reader.read()
            if events is None:
                self._end_of_bytes()
                return
            ready: list[bytes] = []
            try:
                for event in events:
                    ready.append(self._take(event))
            finally:  # what came before an error is shown all the same
                if stream._over and stream._account.ttft_s is None and any(ready[:-1]):
                    await stream.write(b"".join(ready[:-1]))  # a first token waits for no books
                    del ready[:-1]
                if stream._over:
                    stream._ending.data = b"".join(ready)
                elif any(ready):
                    await stream.write(b"".join(ready))
                    stream.note_progress(self._tell_shown)
            if not stream._over and len(self._held) + len(stream._opening) > MAX_HELD_BYTES:
                raise ValueError("too many bytes before a token or its mark")

    def _end_of_bytes(self) -> None:
        """The upstream has closed: complete if only the end of the stream is missing."""
        stream = self._stream
        if not (stream._finished and isinstance(self._dialect, Chunks)):
            raise aiohttp.ClientPayloadError("the stream has no end")
        stream._over = True
        self._tell_shown()
        stream._ending.data = stream._tail() + b"data: [DONE]\n\n"

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def _take(self, event: Event) -> bytes:
        """What the client gets of an event now; raises AttemptError, ValueError or MALFORMED."""
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
            raise unanswered(ValueError("an error in the stream"))
        if shown.usage is not None:
            self._usage = shown.usage
        if shown.end:
            return self._end(event)
        if shown.hidden and (stream._hides_usage or shown.usage is None):
            return b""
        if shown.content and not self._is_known:
            self._know(event)
        data = self._encoded(event)
        if not shown.content:
            return self._passed(event, shown, data)
        if self._is_marked and not stream._ending.is_after(event):
            self._held += data
            self._held_finished = self._held_finished or shown.finished
            self._note(shown)
            return b""
        self._note(shown)
        stream._finished = stream._finished or shown.finished
        self._showed(shown)
        return data

    def _encoded(self, event: Event) -> bytes:
        data = event.encoded()
        return replaced(data, self._pairs) if self._pairs else data

    def _note(self, shown: Shown) -> None:
        """What an event adds, which is shown now or with its mark."""
        stream = self._stream
        if self._reader is not None:
            self._reader.note_content()
        self._size += shown.size
        if shown.text and stream._account.text is not None:
            stream._account.text.append(shown.text)
        if shown.text and stream._resume is None:
            stream._text.append(shown.text)

    def _passed(self, event: Event, shown: Shown, data: bytes) -> bytes:
        """An event that shows no token: of the opening, or beside the content."""
        stream = self._stream
        if stream._shown and (shown.usage is not None or not self._skips_opening):
            return data
        self._know(event)
        if self._skips_opening:
            return b""
        stream._ending.note_opening(event, self._upstream, stream._state, self._incoming)
        stream._opening += data
        return b""

    def _know(self, event: Event) -> None:
        """What the stream is known by; the first event of a completion shows a token already."""
        stream, ending = self._stream, self._stream._ending
        self._is_known = True
        if self._skips_opening:
            self._pairs += [pair for pair in ending.as_before(event) if pair not in self._pairs]
            return
        if ending.identity is None:
            ending.identity = identity_of(self._dialect, event)
        if self._is_marked and stream._resume is None and ending.identity is not None:
            stream._resume = Resume(*ending.identity)

    def _showed(self, shown: Shown | None = None) -> None:
        """A token is shown: from now on the deadline of the whole request alone holds."""
        self._stream._shown = self._stream._opened = True
        self._stream._model = self._stream._model or self._upstream.model_for(self._incoming.model)
        if self._patience is not None:
            self._patience.end()
            self._patience = None
            self._attempt.upstream.speed.began(self._attempt.flight)
        self._attempt.flight.num_tokens += 1

    def _mark(self, comment: bytes) -> bytes:
        """The mark of what is held: it may be shown now."""
        count = self._marks.take(comment) if self._is_marked else None
        if count is None or not self._held:
            return b""
        held, self._held = self._held, b""
        self._stream._finished = self._stream._finished or self._held_finished
        self._showed()
        self._attempt.flight.num_tokens += count - 1
        return held

    def _end(self, event: Event) -> bytes:
        """The stream is complete; what is held is shown with its end."""
        self._stream._over = True
        held, self._held = self._held, b""
        if self._stream._by_text and isinstance(self._dialect, Chunks):
            held += self._stream._ending.chunk(None)
        return held + self._encoded(event)

    # ── what it took ────────────────────────────────────────────────────────────────────────

    def _tell_shown(self) -> None:
        """Tokens relayed so far: by the marks, or an estimate by the bytes."""
        was, account = self._was, self._stream._account
        if self._marks.has_marks:
            usage, resume = self._marked_usage(), self._stream._resume
            if resume is not None:
                resume.tokens[self._before :] = self._marks.tokens()
            shown = self._before + usage.output
            account.relayed = Usage(was.prompt or usage.prompt, was.cached or usage.cached, shown)
        elif not self._is_marked and self._size:
            now = account.estimate(self._upstream, self._size)
            relayed = Usage(was.prompt or now.prompt, 0, was.output + now.output)
            account.relayed, account.estimated = relayed, True

    def _marked_usage(self) -> Usage:
        """What the marks tell; of the tokens alone where the rest cannot be."""
        usage, account = self._marks.usage(), self._stream._account
        return account.believed(self._upstream, usage) or Usage(0, 0, len(self._marks.tokens()))

    def _counted(self, outcome: str) -> tuple[Usage, bool]:
        """(what this attempt took, whether that is an estimate); the client's sum is noted."""
        account, upstream = self._stream._account, self._upstream
        usage = account.believed(upstream, self._usage) if outcome == "ok" else None
        if usage is not None:
            own = usage.output
            if self._is_marked and self._goes_on:  # it counts what was shown before as well
                own -= self._before
                account.relayed = usage
            else:
                account.relayed = Usage(
                    self._was.prompt or usage.prompt,
                    self._was.cached or usage.cached,
                    self._was.output + usage.output,
                )
            account.estimated = self._goes_on and not self._is_marked
            return Usage(usage.prompt + self._before, usage.cached, max(0, own)), False
        if self._marks.has_marks:
            account.estimated = False
            marked = self._marked_usage()
            return Usage(marked.prompt + self._before, marked.cached, marked.output), False
        usage = account.unfinished(self._attempt, outcome, self._size)
        account.estimated = account.estimated or any(usage)
        return usage, any(usage)
