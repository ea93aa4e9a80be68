"""Usage in a stream of chunks: null until the last one, or so far in every one."""

from typing import Any

import msgspec

from headway.frontend.answer import Delta
from headway.server.generation import Progress
from headway.server.openai.render import usage
from headway.server.openai.schema import StreamOptions


class Usage:
    """What the chunks of one answer say of usage; `stream_options` asks for it.

    `continuous_usage_stats` says where usage stands, `include_usage` whether there is any: left out
    beside the former it is wanted, false it is not.
    """

    def __init__(self, progress: Progress, options: StreamOptions | None) -> None:
        self._progress = progress
        wanted = options is not None and options.include_usage is not False
        self._continuous = bool(wanted and options and options.continuous_usage_stats)
        self._num_shown = 0

    def head(self, envelope: dict[str, Any]) -> bytes:
        """The bytes of an event up to the number of its choice, encoded once for all chunks."""
        later = self._progress.request.include_usage and not self._continuous
        head = b"data: " + msgspec.json.encode(envelope)[:-1]
        return head + (b',"usage":null' if later else b"") + b',"choices":[{"index":'

    def count(self, delta: Delta) -> None:
        """`delta` is about to be shown."""
        self._num_shown += len(delta.token_ids)

    def tail(self) -> bytes:
        """What stands behind the choices of a chunk."""
        if not self._continuous:
            return b""
        progress = self._progress
        request = progress.request
        so_far = usage(
            request.num_prompt_tokens,
            self._num_shown,
            progress.num_cached,
            kv=request.kv_usage,
        )
        return b',"usage":' + msgspec.json.encode(so_far)
