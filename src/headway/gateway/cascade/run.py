"""Cascade of one request: ask the cheap route for a whole answer, check it, then send it or not.

    evidence for its task ─► cheap route, within its time ─► fits, score ≥ least ─► the client
          │ none                  │ fails                        │ rejected
          └───────────────────────┴──────────────────────────────┴──► the dear route, as usual

Nothing is sent before the check passed, so a stream arrives all at once. The ledger records the
cheap route's usage as an attempt of the same request, also when the dear route answers it.
"""

import asyncio
from typing import Any

import aiohttp
from starlette.responses import Response

from headway.edge.event_stream import EventStream, send_response
from headway.edge.http_client import read_bounded
from headway.edge.lanes import unless_disconnected
from headway.gateway.account import Account
from headway.gateway.answers import AnswerContent, parse_answer, parse_stream, without_logprobs
from headway.gateway.ask import (
    STREAM,
    WHOLE,
    Attempt,
    client_headers,
    model_name_replacements,
    replace_each,
)
from headway.gateway.attempts import AttemptError, connection_failure
from headway.gateway.cascade.cascade import Cascade
from headway.gateway.cascade.checks import fits
from headway.gateway.cascade.evidence import VALIDITY_ONLY, TaskEvidence
from headway.gateway.cascade.scoring import Scoring
from headway.gateway.dialects import Chunks, Embeddings, Responses, UpstreamUsage
from headway.gateway.events import Event, RelayEventReader
from headway.gateway.incoming import GatewayRequest, hold_of
from headway.gateway.probe import PROBE_FAILURES
from headway.gateway.state import GatewayState
from headway.gateway.upstream import Upstream

MAX_BYTES = 2**24


async def try_cheap_route(state: GatewayState, incoming: GatewayRequest, account: Account) -> bool:
    """Return whether the cheap route has answered this request."""
    cascade = state.cascades.get(incoming.route.name)
    if cascade is None or isinstance(incoming.dialect, Embeddings):
        return False
    way = evidence_for_request(state, cascade, incoming)
    upstream = state.pools[cascade.row.cheap].choose(incoming.query) if way is not None else None
    if way is None or upstream is None or not cascade.matches_fingerprint("cheap", upstream):
        cascade.count(incoming.task_class, "dear")
        return False
    cheap = CheapAnswer(state, incoming, account, cascade, way, upstream)
    outcome = await unless_disconnected(cheap.run(), incoming.receive)
    cascade.count(incoming.task_class, outcome)
    if outcome != "accepted":
        return False
    hold = hold_of(state, incoming)
    if hold is not None:
        await unless_disconnected(hold.whole(cheap.text), incoming.receive)
    await cheap.send()
    return True


def evidence_for_request(
    state: GatewayState, cascade: Cascade, incoming: GatewayRequest
) -> TaskEvidence | None:
    """Return the evidence for this request; None if it must use the dear route."""
    raw = incoming.raw
    if raw.get("n") not in (None, 1) or raw.get("best_of") not in (None, 1):
        return None
    if raw.get("background") or incoming.query.pinned or isinstance(raw.get("prompt"), list):
        return None
    way = cascade.evidence_for(incoming.task_class)
    if way is None:
        return None
    if way.check == "margin" and (raw.get("logprobs") or not isinstance(incoming.dialect, Chunks)):
        return None  # the client's own log-probabilities must stay as requested
    if way.check == "agree" and incoming.dialect.path != "/v1/chat/completions":
        return None
    dear = state.pools[incoming.route.name].upstreams
    return way if all(cascade.matches_fingerprint("dear", each) for each in dear) else None


class CheapAnswer:
    """One answer of the cheap route, held until it is checked."""

    def __init__(
        self,
        state: GatewayState,
        incoming: GatewayRequest,
        account: Account,
        cascade: Cascade,
        way: TaskEvidence,
        upstream: Upstream,
    ) -> None:
        self._state = state
        self._incoming = incoming
        self._account = account
        self._cascade = cascade
        self._way = way
        self._upstream = upstream
        self._headers: list[tuple[bytes, bytes]] = []
        self._data = b""
        self._usage: UpstreamUsage | None = None
        self.text = ""

    async def run(self) -> str:
        """Return "accepted", "rejected" or "failed"; the attempt is in the ledger."""
        attempt = Attempt(self._state, self._incoming, self._upstream, self._body())
        prompt = output = 0
        try:
            async with asyncio.timeout(self._cascade.row.within_s):
                content = await self._ask(attempt)
            self._upstream.breaker.succeeded()
            usage, estimated = self._usage_or_estimate()
            prompt, output = usage.prompt, usage.output
        except AttemptError as failure:
            return self._failed(attempt, failure)
        except PROBE_FAILURES as error:
            return self._failed(attempt, connection_failure(error))
        except asyncio.CancelledError:
            self._upstream.breaker.record_abort()
            self._unfinished(attempt, "left")
            raise
        finally:
            attempt.end(prompt, output)
        if content.fingerprint:
            self._upstream.fingerprint = content.fingerprint
        self.text = content.text
        accepted = self._cascade.matches_fingerprint(
            "cheap", self._upstream
        ) and await self._accepts(content)
        outcome = "ok" if accepted else "rejected"
        self._account.attempt(self._upstream, outcome, usage, estimated=estimated, of_arm=False)
        if not accepted:
            return "rejected"
        self._account.relayed, self._account.estimated = usage, estimated
        return "accepted"

    def _failed(self, attempt: Attempt, failure: AttemptError) -> str:
        breaker = self._upstream.breaker
        (breaker.failed if failure.counts else breaker.record_abort)()
        self._unfinished(attempt, failure.outcome)
        return "failed"

    def _unfinished(self, attempt: Attempt, outcome: str) -> None:
        """Record an attempt without an answer."""
        usage = self._account.estimate_unfinished(attempt, outcome)
        self._account.attempt(self._upstream, outcome, usage, estimated=any(usage), of_arm=False)

    def _body(self) -> dict[str, Any]:
        raw, dialect = self._incoming.raw, self._incoming.dialect
        if self._incoming.stream:
            raw = dialect.with_usage(raw)
        if self._way.check != "margin":
            return raw
        if dialect.path == "/v1/completions":
            return {**raw, "logprobs": 2}
        return {**raw, "logprobs": True, "top_logprobs": 2}

    async def _ask(self, attempt: Attempt) -> AnswerContent:
        incoming = self._incoming
        async with attempt.answer(STREAM if incoming.stream else WHOLE) as answer:
            self._headers = [
                *client_headers(answer, self._upstream),
                (b"x-headway-attempts", b"1"),
                (b"x-headway-upstream", self._upstream.name.encode("ascii", "replace")),
            ]
            if incoming.stream:
                events = attempt.events(await all_events(answer))
                return await asyncio.to_thread(self._take_stream, events)
            data = attempt.whole(await read_bounded(answer, MAX_BYTES))
        self._usage = incoming.dialect.read_whole(data)
        content = parse_answer(incoming.dialect, data)
        if isinstance(incoming.dialect, Responses):
            name = incoming.dialect.id_of(data)
            self._state.keep_response(name, incoming.owner, self._upstream.name)
        self._data = self._client_bytes(data)
        return content

    def _take_stream(self, events: list[Event]) -> AnswerContent:
        """Keep the bytes that the client will get; ValueError if the stream has no end."""
        dialect, parts, ended = self._incoming.dialect, [], False
        hides_usage = not dialect.asks_for_usage(self._incoming.raw)
        for event in events:
            shown = dialect.read(event, self._usage)
            if shown.error:
                raise ValueError("an error in the stream")
            self._usage = shown.usage or self._usage
            ended = ended or shown.end
            if not (shown.hidden and (hides_usage or shown.usage is None)):
                visible = event if event.data == b"[DONE]" else self._client_event(event)
                parts.append(visible.encoded())
        if not ended:
            raise ValueError("a stream without an end")
        self._data = b"".join(parts)
        return parse_stream(dialect, events)

    def _client_event(self, event: Event) -> Event:
        return event._replace(data=self._client_bytes(event.data))

    def _client_bytes(self, data: bytes) -> bytes:
        """Return the client's form of the data: without log-probabilities of the check."""
        if self._way.check == "margin":
            data = without_logprobs(data)
        return replace_each(data, model_name_replacements(self._incoming, self._upstream))

    async def _accepts(self, content: AnswerContent) -> bool:
        incoming, way = self._incoming, self._way
        if not fits(incoming.raw, content):
            return False
        if way.check == VALIDITY_ONLY or way.least is None:
            return True
        scoring = Scoring(
            state=self._state,
            row=self._cascade.row,
            task=incoming.task_class,
            raw=incoming.raw,
            model=incoming.model,
            upstream=self._upstream,
            answer=content,
            spent=self._record_check,
        )
        score = await scoring.score(way.check)
        return score is not None and score >= way.least

    def _record_check(self, upstream: Upstream, usage: UpstreamUsage) -> None:
        self._account.attempt(upstream, "check", usage, estimated=False, of_arm=False)

    def _usage_or_estimate(self) -> tuple[UpstreamUsage, bool]:
        """Return the usage, and whether it is an estimate."""
        usage = self._account.checked_usage(self._upstream, self._usage)
        if usage is not None:
            return usage, False
        return self._account.estimate(self._upstream, len(self._data)), True

    async def send(self) -> None:
        """Send the answer to the client, after the ledger has it."""
        self._account.first_token()
        await self._account.settle("ok")
        if self._incoming.stream:
            stream = EventStream(self._incoming.send, self._headers)
            stream.stop_pinging()
            await stream.end(self._data)
            return
        response = Response(self._data, media_type=WHOLE)
        await send_response(response, self._incoming.send, self._headers)


async def all_events(answer: aiohttp.ClientResponse) -> list[Event]:
    """Return all events of a stream without comments; ValueError beyond MAX_BYTES."""
    reader, content_events = RelayEventReader(answer.content, MAX_BYTES), list[Event]()
    while (events := await reader.read()) is not None:
        content = [event for event in events if not event.comment]
        if content:
            content_events += content
            reader.note_content()
    return content_events
