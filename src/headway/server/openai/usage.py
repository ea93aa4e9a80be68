"""Usage in a stream of chunks: null until the last chunk, or a running count in every chunk."""

from typing import Any

import msgspec

from headway.frontend.answer import SequenceDelta
from headway.server.generation import Progress
from headway.server.openai.render import usage
from headway.server.openai.schema import StreamOptions


class Usage:
    """Usage in the chunks of one answer, as `stream_options` asks for it.

    `continuous_usage_stats` puts it into every chunk, unless `include_usage` is false.
    """

    def __init__(self, progress: Progress, options: StreamOptions | None) -> None:
        self._progress = progress
        is_included = options is not None and options.include_usage is not False
        self._continuous = bool(is_included and options and options.continuous_usage_stats)
        self._num_shown = 0

    def head(self, envelope: dict[str, Any]) -> bytes:
        """Return the bytes of an event up to the number of its choice, encoded once."""
        at_end = self._progress.request.include_usage and not self._continuous
        head = b"data: " + msgspec.json.encode(envelope)[:-1]
        return head + (b',"usage":null' if at_end else b"") + b',"choices":[{"index":'

    def count(self, delta: SequenceDelta) -> None:
        """Count the tokens of a delta that is about to be sent."""
        self._num_shown += len(delta.token_ids)

    def tail(self) -> bytes:
        """Return the bytes after the choices of a chunk."""
        if not self._continuous:
            return b""
        progress = self._progress
        request = progress.request
        count = usage(
            request.num_prompt_tokens,
            self._num_shown,
            progress.num_cached,
            kv=request.kv_usage,
        )
        return b',"usage":' + msgspec.json.encode(count)
