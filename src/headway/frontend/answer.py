"""Output of one request: token updates become text deltas, and a stream delivers them.

`OutputProcessor` is shared by the server and the offline `LLM`, so that both show the same text. It
returns the delta of an update; when a stop string ends a sequence, the caller must abort it in the
engine. The client of an engine has `Streams`: it puts updates into a `Stream`, and the server takes
deltas out. Every stream ends: with the last delta, or with an error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from msgspec.structs import replace

from headway.core.clock import Clock
from headway.core.errors import RequestError, ServerFaultError
from headway.core.request import Request, SequenceUpdate, TokenLogprobs
from headway.frontend.text import OutputParser, OutputParserSpec, TextStream, Tokenizer
from headway.frontend.text.parts import CallEnds, ContentPart, Part

ResumedTokens = Sequence[list[int] | None]
"""By index the tokens of a sequence from another engine, None for an ended one: see Engine.add."""


MAX_BACKLOG_STEPS = 8
"""Updates waiting for one stream from which on they are merged; a short pause is no backlog."""


class SequenceDelta:
    """New text and tokens of one sequence.

    `finish_reason` is None, or once `stop`, `tool_calls`, `length`, `abort` or `error`;
    `stop_reason` the stop string or the stop token id that ended it, None for an end-of-text token
    or length. `incomplete`: the sequence ended before its grammar was satisfied. `parts` splits the
    text into reasoning, calls and content where there is a parser; it may lag behind `text`. Of
    `num_drafts` draft tokens `num_kept_drafts` were accepted; `num_forced` of the tokens were
    forced by the grammar.
    """

    __slots__ = (
        "finish_reason",
        "first_scheduled_s",
        "incomplete",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_drafts",
        "num_forced",
        "num_kept_drafts",
        "parts",
        "prompt_logprobs",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, update: SequenceUpdate, text: str) -> None:
        self.index = update.index
        self.text = text
        self.parts: list[Part] | None = None
        self.token_ids = update.token_ids
        self.finish_reason = update.finish_reason
        self.stop_reason: str | int | None = None
        self.logprobs: list[TokenLogprobs] | None = update.logprobs
        self.prompt_logprobs = update.prompt_logprobs
        self.num_cached_tokens = update.num_cached_tokens
        self.first_scheduled_s = update.first_scheduled_s
        self.incomplete = update.incomplete
        self.num_drafts = update.num_drafts
        self.num_kept_drafts = update.num_kept_drafts
        self.num_forced = update.num_forced

    @property
    def visible(self) -> bool:
        """Return whether it has text for the user, neither reasoning nor calls."""
        if self.parts is None:
            return bool(self.text)
        return any(isinstance(part, ContentPart) for part in self.parts)


class OutputProcessor:
    """Detokenizers and parsers of the sequences of one request."""

    __slots__ = (
        "_num_tokens",
        "_parsers",
        "_stop_ids",
        "_streams",
        "num_unfinished",
        "one_by_one",
        "request",
    )

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        parser_spec: OutputParserSpec | None = None,
    ) -> None:
        sampling = request.sampling
        markers = parser_spec.markers if parser_spec else ()
        shown_ids = frozenset(tokenizer.special(markers).values() if tokenizer else ())
        self._parsers = (
            [OutputParser(parser_spec) for _ in range(sampling.n)] if parser_spec else []
        )
        self.request = request
        self.num_unfinished = sampling.n
        self._num_tokens = [0] * sampling.n
        self.one_by_one = bool(self._parsers or sampling.stop or sampling.logprobs is not None)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._streams: list[TextStream | None] = [
            TextStream(
                tokenizer,
                request.prompt_token_ids,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
                shown_ids=shown_ids,
            )
            if tokenizer
            else None
            for _ in range(sampling.n)
        ]

    def push_all(self, update: SequenceUpdate) -> Sequence[tuple[SequenceDelta, bool]]:
        """Push an update, token by token where a token may end the answer or a part of it.

        Updates have several tokens after accepted drafts. Text after a stop string, or after the
        end, is dropped.
        """
        index = update.index
        if self.finished(index):
            return ()
        if len(update.token_ids) < 2 or not self.one_by_one:
            return (self.push(update),)
        deltas = []
        for each in split_update(update):
            deltas.append(self.push(each))
            if self.finished(index):
                break
        return deltas

    def push(self, update: SequenceUpdate) -> tuple[SequenceDelta, bool]:
        """Return the delta of `update`, and whether the engine must abort the sequence.

        After a stop string the caller must drop later updates of that sequence (see `finished`).
        """
        stream = self._streams[update.index]
        self._num_tokens[update.index] += len(update.token_ids)
        if stream is None:
            delta = SequenceDelta(update, "")
        else:
            shown = update.token_ids
            if update.stop_token_id is not None and not (
                self.request.sampling.include_stop_str_in_output
                and update.stop_token_id in self._stop_ids
            ):
                shown = shown[:-1]
            last, may_stop = update.finish_reason is not None, self._may_end(update.index)
            delta = SequenceDelta(update, stream.push(shown, last, may_stop=may_stop))
        if update.stop_token_id in self._stop_ids:
            delta.stop_reason = update.stop_token_id
        abort = False
        if stream is not None and stream.stopped is not None:
            abort = delta.finish_reason is None
            delta.finish_reason, delta.stop_reason = "stop", stream.stopped
        if self._parsers:
            abort = self._read(delta) or abort
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
        return delta, abort

    def _may_end(self, index: int) -> bool:
        """Return whether a sequence has its `min_tokens`, so that its text may end it."""
        return self._num_tokens[index] > self.request.sampling.min_tokens

    def _read(self, delta: SequenceDelta) -> bool:
        """Parse the parts of `delta`; return True when its sequence must be aborted.

        If a stop string or token cuts a call off, there is no call to run: the reason is `stop`.
        """
        parser = self._parsers[delta.index]
        delta.parts = parser.push(delta.text, delta.finish_reason is not None)
        if delta.finish_reason is None:
            if not self._is_over(delta.index):
                return False
            delta.finish_reason = "tool_calls"
            return True
        ends = [part for part in delta.parts if isinstance(part, CallEnds)]
        cut = delta.stop_reason is not None and not all(end.complete for end in ends)
        if delta.finish_reason == "stop" and parser.num_calls and not cut:
            delta.finish_reason = "tool_calls"
        return False

    def _is_over(self, index: int) -> bool:
        """Return whether a sequence has its single call."""
        return self._parsers[index].done and self._may_end(index)

    def finished(self, index: int) -> bool:
        """Return whether this sequence was ended here; later updates are dropped."""
        stream = self._streams[index]
        stopped = stream is not None and stream.stopped is not None
        return stopped or bool(self._parsers and self._is_over(index))


def split_update(update: SequenceUpdate) -> list[SequenceUpdate]:
    """Split an update of several tokens into one update per token.

    Figures of the whole update go with the first token, the end with the last. Of 3 draft tokens
    with 2 accepted: `num_drafts` 3 with the first token, `num_kept_drafts` 1 with each of the first
    two. A forced token is counted with itself.
    """
    first_forced = len(update.token_ids) - update.num_forced
    updates = [
        SequenceUpdate(
            update.request_id,
            update.index,
            [token_id],
            logprobs=update.logprobs[at : at + 1] if update.logprobs else None,
            num_kept_drafts=int(at < update.num_kept_drafts),
            num_forced=int(at >= first_forced),
        )
        for at, token_id in enumerate(update.token_ids)
    ]
    first, last = updates[0], updates[-1]
    first.prompt_logprobs, first.num_drafts = update.prompt_logprobs, update.num_drafts
    first.num_cached_tokens = update.num_cached_tokens
    first.first_scheduled_s = update.first_scheduled_s
    last.finish_reason, last.stop_token_id = update.finish_reason, update.stop_token_id
    last.incomplete = update.incomplete
    return updates


def merge_backlog(updates: list[SequenceUpdate], num_sequences: int) -> list[SequenceUpdate]:
    """Merge the updates of each sequence of a stream that has fallen behind.

    Updates wait for a stream until the event loop handles it, usually one or two steps. With more
    tokens than the loop can send one by one, steps pile up; merged, eight of them cost one pass of
    the tokenizer and one event. Updates with logprobs, draft tokens or forced tokens stay apart.
    """
    if len(updates) < MAX_BACKLOG_STEPS * num_sequences:
        return updates
    merged: list[SequenceUpdate] = []
    last: dict[int, int] = {}
    """By index of a sequence where its last update is among those merged."""
    for update in updates:
        at = last.get(update.index)
        if at is not None and is_plain(merged[at]) and is_plain(update):
            merged[at] = merge_two(merged[at], update)
        else:
            last[update.index] = len(merged)
            merged.append(update)
    return merged


def is_plain(update: SequenceUpdate) -> bool:
    """Return whether an update has tokens without logprobs, draft tokens and forced tokens."""
    return update.logprobs is None and not (update.num_drafts or update.num_forced)


def merge_two(first: SequenceUpdate, then: SequenceUpdate) -> SequenceUpdate:
    """Merge two updates of one sequence: one-time figures of the first, the end of the second."""
    return replace(
        first,
        token_ids=first.token_ids + then.token_ids,
        finish_reason=then.finish_reason,
        stop_token_id=then.stop_token_id,
        incomplete=then.incomplete,
    )


class Stream:
    """Answer of one request while it arrives: `next` returns the deltas since the last call.

    It raises RequestError (refused), EngineDownError (the engine died for good) or ServerFaultError
    (a step failed).
    """

    __slots__ = (
        "_arrived",
        "_error",
        "_waiter",
        "abort",
        "answer",
        "hands_over",
        "num_deaths",
        "on_begin",
        "on_resume",
        "over",
        "parcel",
        "resumed_tokens",
        "was_sent",
    )

    def __init__(self, answer: OutputProcessor, abort: Callable[[int | None], None]) -> None:
        self.answer = answer
        self.over = False
        self.on_begin: Callable[[], None] = lambda: None
        """Callback for the first token of a sequence, whether or not the stream is read."""
        self.hands_over = False
        """Whether the engine hands the request over after its next token."""
        self.parcel = b""
        """Handover message of the previous engine, until the next one has produced a token."""
        self.on_resume: Callable[[], None] = lambda: None
        """Callback for the first token after a handover."""
        self.num_deaths = 0
        """Engines that died while they ran this request."""
        self.was_sent = False
        """Whether the request was sent to the present engine."""
        self.resumed_tokens: list[list[int] | None] = [[] for _ in range(answer.request.sampling.n)]
        """By index the tokens so far, None for an ended sequence: the input of a resume."""
        self.abort = abort
        """Abort one of its sequences in the engine, or with None all of them."""
        self._arrived: list[SequenceUpdate] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: SequenceUpdate) -> None:
        """Add an update; called by the client."""
        self._arrived.append(update)
        if update.first_scheduled_s is not None:
            self.on_begin()
        if self.parcel:
            self.parcel = b""
            self.on_resume()
        had = self.resumed_tokens[update.index]
        if update.finish_reason is not None:
            self.resumed_tokens[update.index] = None
        elif had is not None:
            had += update.token_ids
        self._wake()

    @property
    def is_complete(self) -> bool:
        """Return whether the engine has reported the end of every sequence."""
        return all(had is None for had in self.resumed_tokens)

    def fail(self, error: RequestError) -> None:
        """End the stream with an error; called by the client."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> list[SequenceDelta]:
        """Return the deltas since the last call, at least one; [] when the answer is complete."""
        while not self.over:
            if not self._arrived:
                if self._error is not None:
                    self.over = True
                    try:
                        raise self._error
                    finally:  # its traceback refers to this stream: a cycle that keeps the request
                        self._error = None
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
            deltas = self._take()
            if deltas:
                return deltas
        return []

    def _take(self) -> list[SequenceDelta]:
        arrived, self._arrived = self._arrived, []
        answer = self.answer
        if len(arrived) > 1 and not answer.one_by_one:
            arrived = merge_backlog(arrived, answer.request.sampling.n)
        deltas = []
        for update in arrived:
            for delta, abort in answer.push_all(update):
                if abort:
                    self.resumed_tokens[update.index] = None
                    self.abort(update.index)
                if delta.finish_reason == "error":
                    self.over = True
                    self.close()
                    raise ServerFaultError()
                deltas.append(delta)
        if answer.num_unfinished == 0:
            self.over = True
        return deltas

    def close(self) -> None:
        """Abort the sequences of this request that still run in the engine."""
        self.abort(None)


class Streams(dict[int, Stream]):
    """The present streams of one engine by request id: opened, fed and ended by its client.

    `abort` aborts a request in the engine, or one of its sequences; `on_remove` is called for each
    request that the engine refused or that was cancelled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        abort: Callable[[int, int | None], None],
        on_remove: Callable[[int], None] = lambda request_id: None,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._abort = abort
        self._on_remove = on_remove

    def open(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Return a new stream for a request; `resumed_tokens` are those it already has."""
        request_id = request.request_id
        answer = OutputProcessor(request, self._tokenizer, parser_spec)
        stream = self[request_id] = Stream(answer, partial(self._drop, request_id))
        if resumed_tokens:
            stream.resumed_tokens = [known and list(known) for known in resumed_tokens]
        return stream

    def adopt(self, stream: Stream) -> None:
        """Take over a stream from another engine."""
        request_id = stream.answer.request.request_id
        stream.abort, stream.was_sent = partial(self._drop, request_id), False
        self[request_id] = stream

    def feed(self, updates: list[SequenceUpdate]) -> None:
        """Pass each update to its stream; updates of removed requests are dropped."""
        for update in updates:
            stream = self.get(update.request_id)
            if stream is not None:
                stream.put(update)

    def fail(self, request_id: int, error: RequestError) -> None:
        """End the stream of a request that the engine refused."""
        stream = self.pop(request_id, None)
        self._on_remove(request_id)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: RequestError) -> None:
        """End all streams with an error."""
        streams = list(self.values())
        self.clear()
        for stream in streams:
            stream.fail(error)

    async def wait_empty(self, timeout_s: float, clock: Clock) -> None:
        """Wait until no stream remains, at most `timeout_s`."""
        deadline_s = clock.now_s() + timeout_s
        while self and clock.now_s() < deadline_s:
            await asyncio.sleep(0.05)

    def _drop(self, request_id: int, index: int | None) -> None:
        """Abort one sequence of a request, or with None the whole request; called by a stream."""
        if index is None:
            stream = self.pop(request_id, None)
            self._on_remove(request_id)
            if stream is None or stream.answer.num_unfinished == 0:
                return
        self._abort(request_id, index)


async def merge(streams: list[Stream]) -> AsyncIterator[tuple[int, list[SequenceDelta]]]:
    """Yield (number of the stream, its next deltas) until all are complete."""
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
