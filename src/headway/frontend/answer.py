"""From token updates to text: one request's answer as its sequences grow.

Shared by the server's client and by the offline `LLM`, so that both show the same text. Given an
update it returns what a user may see of it; when a stop string ends a sequence the caller must
abort that sequence in the engine.
"""

from headway.core.request import Request, SequenceUpdate, TokenLogprobs
from headway.frontend.text import OutputParser, OutputParserSpec, TextStream, Tokenizer
from headway.frontend.text.parts import Content, Part


class Delta:
    """What one sequence gained, as text and as tokens.

    `finish_reason` is None, or once `stop`, `tool_calls`, `length`, `abort` or `error`;
    `stop_reason` the stop string or the stop token id that ended it, None for an end-of-text token
    or length. `incomplete` says that it ended before its grammar was satisfied. `parts` is what
    the text consists of where that is asked for: reasoning, calls and content; it may lag behind
    `text`.
    """

    __slots__ = (
        "finish_reason",
        "first_scheduled_s",
        "incomplete",
        "index",
        "logprobs",
        "num_cached_tokens",
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

    @property
    def visible(self) -> bool:
        """Whether it brought text for the user, neither reasoning nor calls."""
        if self.parts is None:
            return bool(self.text)
        return any(isinstance(part, Content) for part in self.parts)


class Answer:
    """The text streams of one request's sequences."""

    __slots__ = ("_parsers", "_stop_ids", "_streams", "num_unfinished", "request")

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

    def push(self, update: SequenceUpdate) -> tuple[Delta, bool]:
        """What to show of `update`, and whether the engine must abort the sequence.

        After a stop string was found, later updates of that sequence are to be dropped by the
        caller; `finished` tells.
        """
        stream = self._streams[update.index]
        if stream is None:
            delta = Delta(update, "")
        else:
            shown = update.token_ids
            if update.stop_token_id is not None and not (
                self.request.sampling.include_stop_str_in_output
                and update.stop_token_id in self._stop_ids
            ):
                shown = shown[:-1]
            delta = Delta(update, stream.push(shown, update.finish_reason is not None))
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

    def _read(self, delta: Delta) -> bool:
        """Tell the parts of `delta` apart; True when nothing more is wanted of its sequence."""
        parser = self._parsers[delta.index]
        delta.parts = parser.push(delta.text, delta.finish_reason is not None)
        over = parser.done and delta.finish_reason is None
        if over or (delta.finish_reason == "stop" and parser.num_calls):
            delta.finish_reason = "tool_calls"
        return over

    def finished(self, index: int) -> bool:
        """Whether this sequence was ended here; what the engine still sends is dropped."""
        stream = self._streams[index]
        stopped = stream is not None and stream.stopped is not None
        return stopped or bool(self._parsers and self._parsers[index].done)
