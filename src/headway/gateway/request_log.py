"""Request log: one line per generation request, written after its settlement.

    3f2a… 200 chat at local-2 312+128 tokens, 256 cached, TTFT 83 ms, in all 1.61 s, 2 attempts, ok;
    POST /v1/chat/completions, key alice, client job-7

(one line). A request that is refused earlier has the same line as at a server, with `code`.
"""

from headway.core.errors import RequestError
from headway.core.request_source import RequestSource
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.incoming import GatewayRequest
from headway.telemetry.goodput import DISCONNECTED, FAILED, OK
from headway.telemetry.request_log import (
    CLIENT_DISCONNECTED,
    CLIENT_DISCONNECTED_STATUS,
    RequestLog,
    SourcedLine,
    duration,
    log,
    outcome_of,
    word,
)


class GatewayLine(SourcedLine, kw_only=True):
    """Log line of a request: `upstream` is that of the last attempt, `outcome` the end."""

    id: str
    status: int
    model: str
    upstream: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    attempts: int
    dollars: float
    ttft_s: float | None
    e2e_s: float
    code: str | None

    def __str__(self) -> str:
        parts = [f"{self.prompt_tokens}+{self.output_tokens} tokens, {self.cached_tokens} cached"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {duration(self.ttft_s)}")
        parts.append(f"in all {duration(self.e2e_s)}")
        if self.attempts > 1:
            parts.append(f"{self.attempts} attempts")
        if self.dollars:
            parts.append(f"${self.dollars:.3g}")
        parts.append(self.outcome if self.code is None else f"{self.outcome}: {self.code}")
        model = word(self.model)
        where = f"{model} at {self.upstream}" if self.upstream else model
        return f"{self.id} {self.status} {where} {', '.join(parts)}{self.origin()}"


def write(
    requests: RequestLog,
    incoming: GatewayRequest,
    *,
    upstream: str,
    used: UpstreamUsage,
    attempts: int,
    dollars: float,
    ttft_s: float | None,
    e2e_s: float,
    error: BaseException | None,
) -> None:
    """Write the line of a settled request; `error` is the exception that ended it, or None."""
    outcome, status, code = end_of(error)
    source: RequestSource | None = incoming.scope.get("source")
    if source is not None:
        source.is_logged = True
    level = requests.level(outcome)
    if level is None:
        return
    line = GatewayLine(
        id=incoming.request_id,
        status=status,
        model=incoming.model,
        upstream=upstream,
        outcome=outcome,
        prompt_tokens=used.prompt,
        output_tokens=used.output,
        cached_tokens=used.cached,
        attempts=attempts,
        dollars=dollars,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        code=code,
        **({} if source is None else source.fields()),
    )
    log.log(level, line)


def end_of(error: BaseException | None) -> tuple[str, int, str | None]:
    """Return (outcome, status, code) of a request; cancellation means a disconnected client."""
    if error is None:
        return OK, 200, None
    if isinstance(error, RequestError) and error.code != CLIENT_DISCONNECTED:
        return outcome_of(error), error.status, error.reason or error.code
    if isinstance(error, Exception) and not isinstance(error, RequestError):
        return FAILED, 500, "internal_error"
    return DISCONNECTED, CLIENT_DISCONNECTED_STATUS, None
