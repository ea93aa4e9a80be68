"""What the server and its batches need of an engine, wherever it runs and however many there are.

`ProcessClient` keeps one in a process of its own, `LocalClient` steps one in this process. Several
behind one address have the same face: whoever asks does not know which of them answers.
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
    """A model's engine. Every stream that it gives ends: with a last update, or with an error."""

    @property
    def status(self) -> str:
        """starting, loading N%, ready, restarting, draining, failed or stopped."""
        ...

    @property
    def ready(self) -> bool:
        """Whether its status is ready."""
        ...

    @property
    def info(self) -> Ready | None:
        """What it serves; None before it was ready for the first time."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often an engine was started in the place of one that had died."""
        ...

    async def start(self) -> None:
        """Begin; returns at once, `settled` waits."""
        ...

    async def settled(self) -> None:
        """Wait until it is ready; raises the HeadwayError that keeps it from starting."""
        ...

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        """Give a request to the engine; its id is the caller's to choose, each once.

        With a `parser_spec` the deltas come with the parts that their text consists of. It goes on
        behind the `resumed_tokens` of each sequence, which do not come again. Of several engines
        `engine` is the one that is to answer; another does where that one cannot. Raises
        EngineDownError where it takes no requests now, RequestError where this one can never run.
        """
        ...

    def forget(self, owner: bytes) -> None:
        """Nobody finds again the KV blocks of `owner` (`Principal.block_owner`), or of those whose
        names begin so; a disk erases them. An engine that is started later is told as well."""
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
    """The error of a request that comes while no engine takes it."""
    return EngineDownError(f"The model is not ready ({status}).", code="not_ready")


def read_failure(file: Path) -> HeadwayError | None:
    """Why an engine could not start, as it has left it in `file`."""
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
