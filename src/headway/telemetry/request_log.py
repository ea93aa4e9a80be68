"""Request log of a server: one line per ended request, and one per minute with totals.

A line is a struct, the message of a log record: the writing thread formats it, and in JSON it is a
field of its own. It has neither prompts nor answers, and `core.logs` escapes text of the client.
A fault of the server is always logged at level error.

    chatcmpl-3f2a 200 interactive 312+128 tokens, 256 cached, queue 3 ms, TTFT 83 ms, TPOT 12 ms,
    in all 1.61 s, met; POST /v1/chat/completions, key alice, client job-7

(one line). A refused request has the id of its answer's `x-request-id`.
"""

import logging
import re
from typing import Protocol

import msgspec

from headway.core.errors import RequestError
from headway.core.request_source import RequestSource
from headway.core.slo import DEFAULT_CLASS
from headway.telemetry.goodput import (
    DISCONNECTED,
    FAILED,
    INVALID,
    MOVED,
    OK,
    REFUSED,
    EndedRequest,
)
from headway.telemetry.snapshot import WindowStats
from headway.telemetry.timeline import RequestTimeline

log = logging.getLogger("headway.requests")
MINUTE_S = 60
WORD = re.compile(r'[^\s,;"]*')
CLIENT_DISCONNECTED_STATUS = 499
CLIENT_DISCONNECTED = "client_left"
"""Error code of a request whose client disconnected before its body was complete."""


class SourcedLine(msgspec.Struct, kw_only=True):
    """Origin of a request, common to all of its log lines."""

    request_id: str = "-"
    client_request_id: str | None = None
    trace_id: str | None = None
    key: str | None = None
    method: str | None = None
    path: str = ""

    def origin(self) -> str:
        """Return "; POST /v1/completions, key alice, client job-7, trace 4bf92f35…"."""
        if self.method is None:
            return ""
        named = ("key", self.key), ("client", self.client_request_id), ("trace", self.trace_id)
        parts = [f"{name} {word(value)}" for name, value in named if value is not None]
        return "; " + ", ".join([f"{self.method} {word(self.path)}", *parts])


def word(text: str) -> str:
    """Return one word as it is, else in quotes: an id `x, key bob` must not look like a key."""
    if WORD.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class RequestLine(SourcedLine, kw_only=True):
    """Log line of one request.

    `status` is the HTTP status, 499 where the client disconnected; `code` the error's; `id` that of
    the answer, or of the request where there was no answer.
    """

    id: str
    status: int
    service_class: str = msgspec.field(name="class")
    outcome: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    missed: tuple[str, ...] | None = None
    preemptions: int = 0
    code: str | None = None

    def __str__(self) -> str:
        times = (("queue", self.queue_s), ("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        parts = [f"{self.prompt_tokens}+{self.output_tokens} tokens, {self.cached_tokens} cached"]
        parts += [f"{name} {duration(value)}" for name, value in times if value is not None]
        if self.e2e_s is not None:
            parts.append(f"in all {duration(self.e2e_s)}")
        if self.preemptions:
            parts.append(f"preempted {self.preemptions} times")
        parts.append(self._end())
        return f"{self.id} {self.status} {self.service_class} {', '.join(parts)}{self.origin()}"

    def _end(self) -> str:
        if self.outcome != OK:
            return self.outcome if self.code is None else f"{self.outcome}: {self.code}"
        return f"missed {' and '.join(self.missed)}" if self.missed else "met"


class MinuteLine(msgspec.Struct, kw_only=True):
    """Log line with the totals of the last minute of one model."""

    model: str
    requests_per_s: float
    failed: int
    running: int
    waiting: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    attainment: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    kv_usage: float
    cache_hit_rate: float | None
    verdict: str

    def __str__(self) -> str:
        parts = [
            f"{self.requests_per_s:.2g} requests/s ended, {self.failed} failed or refused",
            f"{self.running} run, {self.waiting} wait",
            f"{self.input_tokens_per_s:.0f} tok/s in, {self.output_tokens_per_s:.0f} out",
        ]
        for name, p50, p95 in (
            ("TTFT", self.ttft_p50_s, self.ttft_p95_s),
            ("TPOT", self.tpot_p50_s, self.tpot_p95_s),
        ):
            if p50 is not None and p95 is not None:
                parts.append(f"{name} p50 {duration(p50)} p95 {duration(p95)}")
        if self.attainment is not None:
            parts.append(f"{self.attainment:.0%} met their objectives")
        parts.append(f"KV {self.kv_usage:.0%}, cache hits {self.cache_hit_rate or 0.0:.0%}")
        return f"{self.model}, last minute: {'; '.join(parts)}; {self.verdict}"


class LoggedModel(Protocol):
    """Part of `Telemetry` that `log_minute` reads."""

    names: list[str]

    @property
    def num_live(self) -> int: ...

    def window(self, seconds: int) -> WindowStats: ...


class RequestLog:
    """Writer of a line per ended or refused request; without `every` only for failed ones."""

    def __init__(self, every: bool = True) -> None:
        self.every = every

    def log_end(self, timeline: RequestTimeline, ended: EndedRequest) -> None:
        """Log an ended request; one moved to the fallback is logged there."""
        level, source = self.level(ended.outcome), timeline.source
        if ended.outcome == MOVED:
            return
        if source is not None:
            source.is_logged = True
        if level is None:
            return
        error = timeline.error
        status = {OK: 200, DISCONNECTED: CLIENT_DISCONNECTED_STATUS}.get(ended.outcome, 500)
        line = RequestLine(
            id=timeline.request_id,
            status=error.status if error is not None else status,
            service_class=ended.service_class,
            outcome=ended.outcome,
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            cached_tokens=timeline.cached_tokens,
            queue_s=ended.queue_s,
            ttft_s=ended.ttft_s,
            tpot_s=ended.tpot_s,
            e2e_s=ended.e2e_s,
            missed=ended.missed,
            preemptions=timeline.num_preemptions,
            code=error.code if error is not None else None,
            **({} if source is None else source.fields()),
        )
        log.log(level, line)

    def log_rejection(
        self,
        error: RequestError,
        outcome: str,
        service_class: str = DEFAULT_CLASS,
        source: RequestSource | None = None,
    ) -> None:
        """Log a request refused before it ran: for key, path, body, a limit, or server state."""
        if source is not None:
            source.is_logged = True
        level = self.level(outcome)
        if level is not None:
            line = RequestLine(
                id="-" if source is None else source.request_id,
                status=error.status,
                service_class=service_class or DEFAULT_CLASS,
                outcome=outcome,
                code=error.reason or error.code,
                **({} if source is None else source.fields()),
            )
            log.log(level, line)

    def log_error_answer(self, error: RequestError, source: RequestSource) -> None:
        """Log a request answered with an error, unless its line is already written."""
        if not source.is_logged and error.code != CLIENT_DISCONNECTED:
            self.log_rejection(error, outcome_of(error), source=source)

    def level(self, outcome: str) -> int | None:
        """Return the log level for an outcome, None for no line."""
        level = logging.ERROR if outcome == FAILED else logging.INFO
        is_enabled = (self.every or level == logging.ERROR) and log.isEnabledFor(level)
        return level if is_enabled else None


def outcome_of(error: RequestError) -> str:
    """Return the outcome of a request answered with `error`: 502 → failed, 429 → refused."""
    if error.status in (429, 503):
        return REFUSED
    return FAILED if error.status >= 500 else INVALID


def log_minute(model: LoggedModel) -> None:
    """Log the totals of the last minute if any request arrived, ran or ended in it."""
    window = model.window(MINUTE_S)
    mean = window.steps.mean
    if not (window.arrivals_per_s or window.finished_per_s or model.num_live):
        return
    judged = sum(each.num_judged for each in window.classes)
    ttft, tpot = window.latency["ttft"], window.latency["tpot"]
    line = MinuteLine(
        model=model.names[0],
        requests_per_s=window.finished_per_s,
        failed=window.num_failed,
        running=round(mean.running) if mean else 0,
        waiting=round(mean.waiting) if mean else 0,
        input_tokens_per_s=window.input_tokens_per_s,
        output_tokens_per_s=window.output_tokens_per_s,
        attainment=sum(each.num_met for each in window.classes) / judged if judged else None,
        ttft_p50_s=ttft.p50,
        ttft_p95_s=ttft.p95,
        tpot_p50_s=tpot.p50,
        tpot_p95_s=tpot.p95,
        kv_usage=window.steps.kv_usage_max,
        cache_hit_rate=window.cache_hit_rate,
        verdict=window.verdict.kind,
    )
    log.info(line)


def duration(seconds: float) -> str:
    """Format seconds: 0.0123 → 12.3 ms, 0.25 → 250 ms, 1.5 → 1.50 s, 90 → 90 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms"
