"""The way of one request through upstreams: which is next, within one deadline and one budget.

    pool of its model, by its policy ─► the others of that pool ─► pools of its fallbacks

The first attempt is free, as is the next behind one who said that it serves nothing now, which
costs nobody work; each further one takes from the retry budget, and waits a while for room in it
where an upstream stands ready. A failure that is the client's making ends the way, as does
the deadline; what cannot be answered is 502, 503 or 504.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import aiohttp
import msgspec

from headway.core.errors import EngineDownError, OverloadedError, RequestError
from headway.edge.http_client import read_bounded
from headway.gateway.arm import barred
from headway.gateway.breaker import WINDOW_S
from headway.gateway.config import ModelRow
from headway.gateway.incoming import Incoming
from headway.gateway.state import State
from headway.gateway.upstream import FAILURES, UNREADABLE, Upstream

MAX_ERROR_BYTES, MAX_MESSAGE = 64 * 1024, 500
AGAIN = {429, 502, 503, 504}
"""Statuses after which another upstream is asked."""
ELSEWHERE = {"context_length_exceeded", "model_not_found", "unsupported_parameter"}
"""Codes of a refusal that another upstream may not share."""
TOO_LONG, TOO_LONG_TYPES = "maximum context length", ("exceed_context_size_error",)
"""How vLLM, in its message, and llama-server say `context_length_exceeded`."""
PATIENCE_S, TURN_S = WINDOW_S, 0.05
"""So long a retry waits for room in the budget, which comes back within its window."""
BUSY = {"overloaded", "rate_limit_exceeded"}
"""Codes of an upstream that lives and has too much to do."""
AWAY = {"not_ready", "shutting_down"}
"""Codes of a Headway server that serves nothing now: it loads, drains, or its engine restarts."""


class AttemptError(Exception):
    """An attempt failed: `outcome` names how, for the metric; `counts` against the upstream.

    `again` says whether another may be asked, `error` what the client is told if nobody else is.
    """

    def __init__(
        self, outcome: str, error: RequestError, *, counts: bool = True, again: bool = True
    ) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.error = error
        self.counts = counts
        self.again = again


class Way:
    """The attempts of one request."""

    def __init__(self, state: State, incoming: Incoming) -> None:
        self._state = state
        self._incoming = incoming
        self._without: set[Upstream] = set()
        self._refused: set[Upstream] = set()
        """Those that will say the same of this request however often they are asked."""
        self._last: RequestError | None = None
        self._is_second_round = False
        self._waits = True
        """Whether a retry waits for the budget: not where all have too much to do."""
        self._was_away = False
        """Whether the last one that was asked serves nothing now."""
        self.num_attempts = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until its deadline."""
        return self._incoming.deadline_s - self._state.clock.now_s()

    async def next(
        self, *, free: bool = False, only: Callable[[Upstream], bool] = lambda each: True
    ) -> Upstream:
        """The upstream to ask now, one of `only`; raises RequestError where there is none.

        With `free` the budget is not asked: each stream may go on once, and what a canary fails
        is tried once more. When all have failed once they are tried a second time.
        """
        budget, now_s = self._state.budget, self._state.clock.now_s
        free = free or not self.num_attempts or self._is_second_for_canary()
        until_s = now_s() + PATIENCE_S
        upstream = self._chosen(only)
        free = free or (self._was_away and not upstream.is_away)
        while not (free or budget.take()):
            waits = self._waits and not upstream.is_away and upstream.breaker.state == "closed"
            if not waits or now_s() >= until_s:
                self._state.metrics.add("retries_denied")
                raise self._last or self._no_upstream_error()
            await asyncio.sleep(TURN_S)
            upstream = self._chosen(only)
        self.num_attempts += 1
        return upstream

    def _chosen(self, only: Callable[[Upstream], bool]) -> Upstream:
        """Whom to ask now, whatever the budget says; raises RequestError where there is nobody."""
        if self.remaining_s <= 0:
            raise self._last or too_late()
        upstream = next(self._candidates(only), None)
        if upstream is None and self._without and not self._is_second_round:
            self._is_second_round = True
            self._without.clear()
            upstream = next(self._candidates(only), None)
        if upstream is None:
            raise self._last or self._no_upstream_error()
        return upstream

    def _no_upstream_error(self) -> RequestError:
        """Nobody can be asked: now, or ever where none understands what the request needs."""
        incoming, pools = self._incoming, self._state.pools
        upstreams = [each for row in self._routes() for each in pools[row.name].upstreams]
        missing = incoming.query.needs.difference(*(each.can for each in upstreams))
        return not_understood(incoming, min(missing)) if missing else no_upstream_error(incoming)

    def _is_second_for_canary(self) -> bool:
        """Whether a canary on trial has failed this request: its client must not notice."""
        arm = self._incoming.arm
        return self.num_attempts == 1 and arm is not None and arm[1] and arm[0].share < 1

    def _candidates(self, only: Callable[[Upstream], bool]) -> Iterator[Upstream]:
        """The best of each pool, the model's own first; then again, whatever breakers say."""
        unfit = {each for each in self._state.upstreams.values() if not only(each)}
        unfit |= self._refused
        query, arm = self._incoming.query, self._incoming.arm
        for last in (False, True):
            for route in self._routes():
                pool = self._state.pools[route.name]
                for others in barred(arm, route, pool.upstreams):
                    upstream = pool.choose(query, unfit | self._without | others, last=last)
                    if upstream is not None:
                        yield upstream

    def _routes(self) -> list[ModelRow]:
        return self._state.with_fallbacks(self._incoming.route)

    def failed(self, upstream: Upstream, failure: AttemptError) -> None:
        """An attempt there has failed; raises its error where nobody else may be asked."""
        if failure.counts:
            upstream.breaker.failed()
        else:
            upstream.breaker.given_up()
        self._was_away = failure.outcome == "away"
        upstream.is_away = upstream.is_away or self._was_away
        self._without.add(upstream)
        if failure.outcome == "refused":
            self._refused.add(upstream)
        self._last, self._waits = failure.error, failure.outcome != "busy"
        if not failure.again:
            raise failure.error


def no_upstream_error(incoming: Incoming) -> RequestError:
    """There is no upstream to ask."""
    return EngineDownError(
        f"No upstream of {incoming.model[:80]} can answer this request now.", code="no_upstream"
    )


def not_understood(incoming: Incoming, need: str) -> RequestError:
    """No upstream of its model understands tools, schemas or images."""
    fields = {
        "tools": ("tools",),
        "schemas": ("response_format", "text"),
        "images": ("messages", "input"),
        "embeddings": (),
    }[need]
    return RequestError(
        f"No upstream of {incoming.model[:80]} understands {need}.",
        param=next((name for name in fields if name in incoming.raw), None),
        code="unsupported_parameter",
        status=400,
    )


def too_late() -> RequestError:
    return RequestError(
        "The deadline of this request is over.", code="deadline_exceeded", status=504
    )


def unanswered(error: BaseException) -> AttemptError:
    """A connection that failed, an answer that did not come, or is none."""
    if isinstance(error, TimeoutError):
        message, code, outcome = "did not answer in time", "upstream_timeout", "timeout"
        status = 504
    elif isinstance(error, aiohttp.ClientConnectorError):
        message, code, outcome, status = "cannot be reached", "upstream_unreachable", "connect", 502
    elif isinstance(error, UNREADABLE):
        message, code, outcome, status = "gave no answer that can be read", "lied", "lied", 502
    else:
        message, code, outcome, status = "broke off", "upstream_failed", "reset", 502
    return AttemptError(outcome, RequestError(f"The upstream {message}.", code=code, status=status))


class ErrorDetail(msgspec.Struct):
    """What the error of an upstream says of itself."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None
    type: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of an error: OpenAI's, or Anthropic's."""

    error: ErrorDetail | str | None = None


async def refused(upstream: Upstream, answer: aiohttp.ClientResponse) -> AttemptError:
    """What an answer that is no 200 means."""
    status = answer.status
    detail = await read_error(answer)
    code = detail.code if isinstance(detail.code, str) and is_word(detail.code) else None
    if status == 400 and (detail.type in TOO_LONG_TYPES or TOO_LONG in detail.message):
        code = "context_length_exceeded"
    retry_after_s = seconds_of(answer.headers.get("retry-after"))
    if status in (401, 403):
        error = RequestError(
            "The upstream refuses the gateway's key.", code="upstream_refused", status=502
        )
        return AttemptError("refused", error)
    if status < 400:  # a redirect, or an answer of another kind: 204 has no body
        return unanswered(ValueError(f"status {status}"))
    if status == 429 or code in BUSY:
        busy = OverloadedError(
            "The upstreams have too much to do.",
            reason="upstream",
            retry_after_s=retry_after_s or 1.0,
        )
        return AttemptError("busy", busy, counts=False)
    if status >= 500:
        error = RequestError(
            f"The upstream failed with status {status}.",
            code=code if upstream.is_headway else "upstream_failed",
            status=503 if status == 503 else 502 if status != 504 else 504,
            retry_after_s=(retry_after_s or 1.0) if status == 503 else None,
        )
        if upstream.is_headway and status == 503 and code in AWAY:
            return AttemptError("away", error, counts=False)
        return AttemptError(f"status_{status}", error, again=status in AGAIN)
    error = RequestError(
        message_of(upstream, detail, status),
        param=detail.param if detail.param and detail.param.isprintable() else None,
        code=code,
        status=status,
        retry_after_s=retry_after_s,
    )
    again = code in ELSEWHERE
    return AttemptError("refused", error, counts=False, again=again)


def message_of(upstream: Upstream, detail: ErrorDetail, status: int) -> str:
    """A Headway server's own words; another's may name what is nobody's business."""
    if upstream.is_headway and detail.message.isprintable() and detail.message:
        return detail.message[:MAX_MESSAGE]
    return f"The upstream refuses this request with status {status}."


async def read_error(answer: aiohttp.ClientResponse) -> ErrorDetail:
    """The error in a body, as far as there is one."""
    try:
        async with asyncio.timeout(5.0):
            data = await read_bounded(answer, MAX_ERROR_BYTES)
        body = msgspec.json.decode(data, type=ErrorBody)
    except FAILURES:
        return ErrorDetail()
    if isinstance(body.error, str):
        return ErrorDetail(message=body.error)
    return body.error or ErrorDetail()


def is_word(text: str) -> bool:
    """Whether this can be a code: invalid_value."""
    return 0 < len(text) <= 64 and text.isascii() and text.replace("_", "a").isalnum()


def seconds_of(text: str | None) -> float | None:
    """A retry-after header in seconds; a date is not read."""
    return float(text) if text and text.isdecimal() and len(text) < 6 else None


async def in_its_own_task(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it as for a task: what wakes up for each chunk is four calls deep, not sixteen."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await task
