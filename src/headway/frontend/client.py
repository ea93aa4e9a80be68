"""Interface of an engine for the server and its batches, wherever it runs.

`ProcessClient` keeps one in a process of its own, `LocalClient` steps one in this process.
`Replicas` and `PrefillDecodePools` present several engines as one.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from headway.core.errors import EngineDownError, HeadwayError
from headway.core.request import Request
from headway.engine import messages
from headway.engine.messages import Ready
from headway.frontend.answer import ResumedTokens, Stream
from headway.frontend.text import OutputParserSpec


class EngineClient(Protocol):
    """Client of a model's engine. Every stream ends: with a last update, or with an error."""

    @property
    def status(self) -> str:
        """starting, loading N%, ready, restarting, draining, failed or stopped."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether the status is ready."""
        ...

    @property
    def info(self) -> Ready | None:
        """Return the introduction of the engine; None before it was first ready."""
        ...

    @property
    def num_restarts(self) -> int:
        """Return the number of restarts of engines that died."""
        ...

    async def start(self) -> None:
        """Begin; returns at once, `wait_ready` waits."""
        ...

    async def wait_ready(self) -> None:
        """Wait until it is ready; raises the HeadwayError that keeps it from starting."""
        ...

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Send a request to the engine; the caller chooses its id, each once.

        With a `parser_spec` the deltas have the parts of their text. The answer continues after the
        `resumed_tokens` of each sequence, which are not sent again. Of several engines `engine` is
        preferred. Raises EngineDownError if no request is accepted now, RequestError if this one
        can never run.
        """
        ...

    def forget(self, owner: bytes) -> None:
        """Drop the KV blocks of `owner` (`Principal.block_owner`) and of owners with that prefix.

        They are erased on disk too. An engine that is started later drops them as well.
        """
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones, at most `timeout_s`; then they fail.

        It does not take requests again.
        """
        ...

    async def stop(self) -> None:
        """End the engine and what still runs; safe to call twice and at any moment."""
        ...


def not_ready(status: str) -> EngineDownError:
    """Return the error of a request that arrives while no engine accepts it."""
    return EngineDownError(f"The model is not ready ({status}).", code="not_ready")


def read_failure(file: Path) -> HeadwayError | None:
    """Return the error that an engine wrote to `file` when it could not start, or None."""
    try:
        failed = messages.decode_failed(file.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    failure = HeadwayError(failed.cause, failed.fix)
    failure.exit_code = failed.exit_code
    return failure


def changed() -> HeadwayError:
    return HeadwayError(
        "The files of the model are not those that the server started with.",
        "Start the server again to serve them.",
    )


def died() -> EngineDownError:
    return EngineDownError("The engine stopped while it ran this request.", code="engine_died")


def gave_up() -> EngineDownError:
    return EngineDownError("The engine cannot be started.", code="engine_failed")
