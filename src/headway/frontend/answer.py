"""From token updates to text: one request's answer as its sequences grow, and as it is awaited.

`Answer` is shared by the server's client and by the offline `LLM`, so that both show the same text.
Given an update it returns what a user may see of it; when a stop string ends a sequence the caller
must abort that sequence in the engine. In the server the engine's client keeps `Streams`: it puts
updates into a `Stream`, and whoever serves the request takes deltas out. It promises an end: the
last delta, or the error that was put in instead.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from headway.core.clock import Clock
from headway.core.errors import RequestError, ServerFaultError
from headway.core.request import Request, SequenceUpdate, TokenLogprobs
from headway.frontend.pressure import joined
from headway.frontend.text import OutputParser, OutputParserSpec, TextStream, Tokenizer
from headway.frontend.text.parts import CallEnds, Content, Part

ResumedTokens = Sequence[list[int] | None]
"""By index what the sequences of a request had elsewhere, None for one that is over; see
Engine.add."""


class Delta:
    """What one sequence gained, as text and as tokens.

    `finish_reason` is None, or once `stop`, `tool_calls`, `length`, `abort` or `error`;
    `stop_reason` the stop string or the stop token id that ended it, None for an end-of-text token
    or length. `incomplete` says that it ended before its grammar was satisfied. `parts` is what
    the text consists of where that is asked for: reasoning, calls and content; it may lag behind
    `text`. Of `num_drafts` guesses of its tokens `num_kept_drafts` were right; `num_forced` of its
    tokens were forced by its grammar.
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
        """Whether it brought text for the user, neither reasoning nor calls."""
        if self.parts is None:
            return bool(self.text)
        return any(isinstance(part, Content) for part in self.parts)


class Answer:
    """The text streams of one request's sequences."""

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

    def pushed(self, update: SequenceUpdate) -> Sequence[tuple[Delta, bool]]:
        """`push` of an update; of several tokens, as guesses bring them, of one after another where
        it matters which of them ends the answer, or belongs to which part of it.

        What is behind a stop string, or after the end, is dropped.
        """
        index = update.index
        if self.finished(index):
            return ()
        if len(update.token_ids) < 2 or not self.one_by_one:
            return (self.push(update),)
        found = []
        for each in singles(update):
            found.append(self.push(each))
            if self.finished(index):
                break
        return found

    def push(self, update: SequenceUpdate) -> tuple[Delta, bool]:
        """What to show of `update`, and whether the engine must abort the sequence.

        After a stop string was found, later updates of that sequence are to be dropped by the
        caller; `finished` tells.
        """
        stream = self._streams[update.index]
        self._num_tokens[update.index] += len(update.token_ids)
        if stream is None:
            delta = Delta(update, "")
        else:
            shown = update.token_ids
            if update.stop_token_id is not None and not (
                self.request.sampling.include_stop_str_in_output
                and update.stop_token_id in self._stop_ids
            ):
                shown = shown[:-1]
            last, may_stop = update.finish_reason is not None, self._may_end(update.index)
            delta = Delta(update, stream.push(shown, last, may_stop=may_stop))
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
        """Whether a sequence has its `min_tokens`, so that its text may end it."""
        return self._num_tokens[index] > self.request.sampling.min_tokens

    def _read(self, delta: Delta) -> bool:
        """Tell the parts of `delta` apart; True when nothing more is wanted of its sequence.

        A stop string or token that cuts a call off leaves no call to run: that end is `stop`.
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
        """Whether a sequence has the one call that was wanted of it."""
        return self._parsers[index].done and self._may_end(index)

    def finished(self, index: int) -> bool:
        """Whether this sequence was ended here; what the engine still sends is dropped."""
        stream = self._streams[index]
        stopped = stream is not None and stream.stopped is not None
        return stopped or bool(self._parsers and self._is_over(index))


def singles(update: SequenceUpdate) -> list[SequenceUpdate]:
    """An update of several tokens as one of each: what comes once comes with the first, the end
    with the last. Of 3 guesses 2 were right: 3 are told with the first token, a right one with each
    of the first two. A forced token is told with itself.
    """
    first_forced = len(update.token_ids) - update.num_forced
    found = [
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
    first, last = found[0], found[-1]
    first.prompt_logprobs, first.num_drafts = update.prompt_logprobs, update.num_drafts
    first.num_cached_tokens = update.num_cached_tokens
    first.first_scheduled_s = update.first_scheduled_s
    last.finish_reason, last.stop_token_id = update.finish_reason, update.stop_token_id
    last.incomplete = update.incomplete
    return found


class Stream:
    """The answer of one request while it arrives; iterate over it, then it is over.

    Each turn gives the deltas that came since the last one. Raises RequestError (refused),
    EngineDownError (died for good) or ServerFaultError (its step failed).
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
        "on_taken",
        "over",
        "parcel",
        "resumed_tokens",
        "was_sent",
    )

    def __init__(self, answer: Answer, abort: Callable[[int | None], None]) -> None:
        self.answer = answer
        self.over = False
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a sequence has its first token, whether or not somebody reads."""
        self.hands_over = False
        """Whether the engine that runs it hands it over behind its next token."""
        self.parcel = b""
        """In which it has left the engine before, until the next one has brought a token."""
        self.on_taken: Callable[[], None] = lambda: None
        """Called with the first token behind a parcel."""
        self.num_deaths = 0
        """Engines that died while they ran this request."""
        self.was_sent = False
        """Whether the engine that runs now was sent it."""
        self.resumed_tokens: list[list[int] | None] = [[] for _ in range(answer.request.sampling.n)]
        """By index the tokens that came, None for a sequence that is over: what resumes it."""
        self.abort = abort
        """Drops one of its sequences in the engine that runs it, or None: all of it."""
        self._arrived: list[SequenceUpdate] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: SequenceUpdate) -> None:
        """Called by the client for each update."""
        self._arrived.append(update)
        if update.first_scheduled_s is not None:
            self.on_begin()
        if self.parcel:
            self.parcel = b""
            self.on_taken()
        had = self.resumed_tokens[update.index]
        if update.finish_reason is not None:
            self.resumed_tokens[update.index] = None
        elif had is not None:
            had += update.token_ids
        self._wake()

    @property
    def is_complete(self) -> bool:
        """Whether the engine has told of the end of every sequence."""
        return all(had is None for had in self.resumed_tokens)

    def fail(self, error: RequestError) -> None:
        """Called by the client when no update will follow."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> list[Delta]:
        """The deltas since the last call, at least one; [] when the answer is complete."""
        while not self.over:
            if not self._arrived:
                if self._error is not None:
                    self.over = True
                    try:
                        raise self._error
                    finally:  # its traceback holds us: a circle with all that the request held
                        self._error = None
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
            deltas = self._take()
            if deltas:
                return deltas
        return []

    def _take(self) -> list[Delta]:
        arrived, self._arrived = self._arrived, []
        answer = self.answer
        if len(arrived) > 1 and not answer.one_by_one:
            arrived = joined(arrived, answer.request.sampling.n)
        deltas = []
        for update in arrived:
            for delta, abort in answer.pushed(update):
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
        """Give up: what still runs of this request is aborted in the engine."""
        self.abort(None)


class Streams(dict[int, Stream]):
    """What one engine answers at present, by request id: opened, fed and ended by its client.

    `abort` drops a request in the engine, or one of its sequences; `on_left` hears of each request
    that the engine refused, or that is wanted no more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        abort: Callable[[int, int | None], None],
        on_left: Callable[[int], None] = lambda request_id: None,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._abort = abort
        self._on_left = on_left

    def open(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """A stream for the answer of a request that the engine gets, behind what it had."""
        request_id = request.request_id
        answer = Answer(request, self._tokenizer, parser_spec)
        stream = self[request_id] = Stream(answer, partial(self._drop, request_id))
        if resumed_tokens:
            stream.resumed_tokens = [known and list(known) for known in resumed_tokens]
        return stream

    def adopt(self, stream: Stream) -> None:
        """Another engine answers this one from now on: this one."""
        request_id = stream.answer.request.request_id
        stream.abort, stream.was_sent = partial(self._drop, request_id), False
        self[request_id] = stream

    def feed(self, updates: list[SequenceUpdate]) -> None:
        """Hand each update to its stream; those of requests that have left are dropped."""
        for update in updates:
            stream = self.get(update.request_id)
            if stream is not None:
                stream.put(update)

    def fail(self, request_id: int, error: RequestError) -> None:
        """The engine has refused this one."""
        stream = self.pop(request_id, None)
        self._on_left(request_id)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: RequestError) -> None:
        """No engine answers those that are here."""
        streams = list(self.values())
        self.clear()
        for stream in streams:
            stream.fail(error)

    async def run_out(self, timeout_s: float, clock: Clock) -> None:
        """Wait until none is left, at most `timeout_s`."""
        deadline_s = clock.now_s() + timeout_s
        while self and clock.now_s() < deadline_s:
            await asyncio.sleep(0.05)

    def _drop(self, request_id: int, index: int | None) -> None:
        """Called by a stream: a sequence of its request is wanted no more, or None: no one is."""
        if index is None:
            stream = self.pop(request_id, None)
            self._on_left(request_id)
            if stream is None or stream.answer.num_unfinished == 0:
                return
        self._abort(request_id, index)


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
