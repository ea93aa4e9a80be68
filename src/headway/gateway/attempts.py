"""Failover of one request over upstreams, within one deadline and one retry budget.

    pool of its model, by policy ─► the others of that pool ─► pools of its fallbacks

The first attempt is free, and so is the next one after an upstream that serves nothing now, or has
no word for a field of the request, which cost no work. Each further attempt takes from the retry
budget, and waits for room in the budget while an upstream is available. A failure caused by the
client ends the sequence, and so does the deadline. A request without an answer ends with 502, 503
or 504.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import aiohttp
import msgspec

from headway.core.errors import EngineDownError, OverloadedError, RequestError
from headway.edge.http_client import read_bounded
from headway.gateway.arm import excluded_upstreams
from headway.gateway.breaker import WINDOW_S
from headway.gateway.config import GatewayModelRow
from headway.gateway.incoming import GatewayRequest
from headway.gateway.providers import ALL_ENDPOINTS
from headway.gateway.state import GatewayState
from headway.gateway.upstream import FAILURES, UNREADABLE, Upstream

MAX_ERROR_BYTES, MAX_MESSAGE = 64 * 1024, 500
RETRIED_STATUSES = {429, 502, 503, 504}
"""Statuses after which another upstream is tried."""
RETRIED_CODES = {"context_length_exceeded", "model_not_found", "unsupported_parameter"}
"""Error codes that another upstream may not return."""
TOO_LONG = ("maximum context length", "prompt is too long")
TOO_LONG_TYPES = ("exceed_context_size_error",)
"""`context_length_exceeded` in the words of vLLM and Anthropic, and llama-server's type."""
OVERLOADED_STATUSES = (429, 529)
RETRY_WAIT_S, RETRY_POLL_S = WINDOW_S, 0.05
"""Seconds that a retry waits for room in the budget, and between two looks at it."""
OVERLOAD_CODES = {"overloaded", "rate_limit_exceeded"}
"""Error codes of an upstream that is overloaded."""
UNAVAILABLE_CODES = {"not_ready", "shutting_down"}
"""Error codes of a Headway server that loads, drains, or restarts its engine."""


FREE_OUTCOMES = ("away", "untranslated")
"""Outcomes of attempts that cost no work: a server that serves nothing now; a request with a field
that the upstream's dialect does not have, which is not sent."""


class AttemptError(Exception):
    """Failure of an attempt; `outcome` is its label in the metric.

    `counts` says whether it counts as a failure of the upstream, `again` whether another upstream
    may be tried, `error` what the client gets if none is left.
    """

    def __init__(
        self, outcome: str, error: RequestError, *, counts: bool = True, again: bool = True
    ) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.error = error
        self.counts = counts
        self.again = again


class AttemptSequence:
    """The sequence of attempts of one request."""

    def __init__(self, state: GatewayState, incoming: GatewayRequest) -> None:
        self._state = state
        self._incoming = incoming
        self._failed_upstreams: set[Upstream] = set()
        self._refused: set[Upstream] = set()
        """Upstreams that would refuse this request again."""
        self._last: RequestError | None = None
        self._is_second_round = False
        self._waits = True
        """Whether a retry waits for the budget; False after an overloaded upstream."""
        self._was_free = False
        """Whether the last attempt cost its upstream nothing: the next one is free as well."""
        self.num_attempts = 0

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the deadline."""
        return self._incoming.deadline_s - self._state.clock.now_s()

    async def next(
        self, *, free: bool = False, only: Callable[[Upstream], bool] = lambda each: True
    ) -> Upstream:
        """Return the next upstream to try, one of `only`; raises RequestError if there is none.

        With `free` the attempt takes nothing from the budget: each stream may be resumed once, and
        a failure of a canary is retried once. After each upstream failed once, all are tried again.
        """
        budget, now_s = self._state.budget, self._state.clock.now_s
        retries = self._incoming.route.retries
        if retries is not None and self.num_attempts > retries:
            raise self._last or self._no_upstream_error()
        free = free or not self.num_attempts or self._is_second_for_canary()
        until_s = now_s() + RETRY_WAIT_S
        upstream = self._chosen(only)
        free = free or (self._was_free and not upstream.is_unavailable)
        while not (free or budget.take()):
            waits = (
                self._waits and not upstream.is_unavailable and upstream.breaker.state == "closed"
            )
            if not waits or now_s() >= until_s:
                self._state.metrics.add("retries_denied")
                raise self._last or self._no_upstream_error()
            await asyncio.sleep(RETRY_POLL_S)
            upstream = self._chosen(only)
        self.num_attempts += 1
        return upstream

    def _chosen(self, only: Callable[[Upstream], bool]) -> Upstream:
        """Return the next upstream without the budget; raises RequestError if there is none."""
        if self.remaining_s <= 0:
            raise self._last or deadline_error()
        upstream = next(self._candidates(only), None)
        if upstream is None and self._failed_upstreams and not self._is_second_round:
            self._is_second_round = True
            self._failed_upstreams.clear()
            upstream = next(self._candidates(only), None)
        if upstream is None:
            raise self._last or self._no_upstream_error()
        return upstream

    def _no_upstream_error(self) -> RequestError:
        """Return the error for no upstream: now, or always if none has a feature of the request."""
        incoming, pools = self._incoming, self._state.pools
        upstreams = [each for row in self._routes() for each in pools[row.name].upstreams]
        missing = incoming.query.needs.difference(*(each.can for each in upstreams))
        return (
            unsupported_feature_error(incoming, min(missing))
            if missing
            else no_upstream_error(incoming)
        )

    def _is_second_for_canary(self) -> bool:
        """Return whether this is the retry after a canary on trial failed the request."""
        arm = self._incoming.arm
        return self.num_attempts == 1 and arm is not None and arm[1] and arm[0].share < 1

    def _candidates(self, only: Callable[[Upstream], bool]) -> Iterator[Upstream]:
        """Yield the best upstream of each pool, the model's own first; then ignoring breakers."""
        unfit = {each for each in self._state.upstreams.values() if not only(each)}
        unfit |= self._refused
        query, arm = self._incoming.query, self._incoming.arm
        for last in (False, True):
            for route in self._routes():
                pool = self._state.pools[route.name]
                for others in excluded_upstreams(arm, route, pool.upstreams):
                    upstream = pool.choose(
                        query, unfit | self._failed_upstreams | others, last=last
                    )
                    if upstream is not None:
                        yield upstream

    def _routes(self) -> list[GatewayModelRow]:
        return self._state.with_fallbacks(self._incoming.route)

    def failed(self, upstream: Upstream, failure: AttemptError) -> None:
        """Record a failed attempt; raises its error if no other upstream may be tried."""
        if failure.counts:
            upstream.breaker.failed()
        else:
            upstream.breaker.record_abort()
        self._was_free = failure.outcome in FREE_OUTCOMES
        upstream.is_unavailable = upstream.is_unavailable or failure.outcome == "away"
        self._failed_upstreams.add(upstream)
        if failure.outcome in ("refused", "untranslated"):
            self._refused.add(upstream)
        self._last, self._waits = failure.error, failure.outcome != "busy"
        if not failure.again:
            raise failure.error


def no_upstream_error(incoming: GatewayRequest) -> RequestError:
    """Return the error of a request that no upstream can answer now."""
    return EngineDownError(
        f"No upstream of {incoming.model[:80]} can answer this request now.", code="no_upstream"
    )


def unsupported_feature_error(incoming: GatewayRequest, need: str) -> RequestError:
    """Return the error of a request for tools, schemas or images that no upstream supports."""
    fields = {
        "tools": ("tools",),
        "schemas": ("response_format", "text"),
        "images": ("messages", "input"),
    }.get(need, ())
    verb = "serves" if need in ALL_ENDPOINTS else "understands"
    return RequestError(
        f"No upstream of {incoming.model[:80]} {verb} {need}.",
        param=next((name for name in fields if name in incoming.raw), None),
        code="unsupported_parameter",
        status=400,
    )


def deadline_error() -> RequestError:
    return RequestError(
        "The deadline of this request is over.", code="deadline_exceeded", status=504
    )


def connection_failure(error: BaseException) -> AttemptError:
    """Map an exception of a connection, or of an unreadable answer, to an AttemptError."""
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
    """Fields of an error body that the gateway reads."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None
    type: str | None = None


class ErrorBody(msgspec.Struct):
    """Body of an error, as OpenAI's or Anthropic's API defines it."""

    error: ErrorDetail | str | None = None


async def status_failure(upstream: Upstream, answer: aiohttp.ClientResponse) -> AttemptError:
    """Map an answer with another status than 200 to an AttemptError."""
    status = answer.status
    detail = await read_error(answer)
    code = detail.code if isinstance(detail.code, str) and is_word(detail.code) else None
    if status == 404 and detail.type == "not_found_error":
        code = "model_not_found"
    is_too_long = any(each in detail.message for each in TOO_LONG)
    if status == 400 and (detail.type in TOO_LONG_TYPES or is_too_long):
        code = "context_length_exceeded"
    retry_after_s = seconds_of(answer.headers.get("retry-after"))
    if status in (401, 403):
        error = RequestError(
            "The upstream refuses the gateway's key.", code="upstream_refused", status=502
        )
        return AttemptError("refused", error)
    if status < 400:  # a redirect, or an answer of another kind: 204 has no body
        return connection_failure(ValueError(f"status {status}"))
    if status in OVERLOADED_STATUSES or code in OVERLOAD_CODES:
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
        again = status in RETRIED_STATUSES or upstream.provider is not None
        if upstream.is_headway and status == 503 and code in UNAVAILABLE_CODES:
            return AttemptError("away", error, counts=False)
        return AttemptError(f"status_{status}", error, again=again)
    error = RequestError(
        message_of(upstream, detail, status),
        param=detail.param if detail.param and detail.param.isprintable() else None,
        code=code,
        status=status,
        retry_after_s=retry_after_s,
    )
    again = code in RETRIED_CODES
    return AttemptError("refused", error, counts=False, again=again)


def message_of(upstream: Upstream, detail: ErrorDetail, status: int) -> str:
    """Return a Headway server's message; a foreign one may name internals of the upstream."""
    if upstream.is_headway and detail.message.isprintable() and detail.message:
        return detail.message[:MAX_MESSAGE]
    return f"The upstream refuses this request with status {status}."


async def read_error(answer: aiohttp.ClientResponse) -> ErrorDetail:
    """Return the error of a body; its fields are empty where the body has none."""
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
    """Return whether the text can be an error code, such as invalid_value."""
    return 0 < len(text) <= 64 and text.isascii() and text.replace("_", "a").isalnum()


def seconds_of(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date."""
    return float(text) if text and text.isdecimal() and len(text) < 6 else None


async def run_in_task(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` in a task of its own: each chunk then wakes up four frames, not sixteen."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await task
