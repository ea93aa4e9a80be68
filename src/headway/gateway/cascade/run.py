"""A request that the cheap route may answer: asked there whole, checked, then given or not.

    evidence for its task ─► cheap route, within its time ─► fits, score ≥ least ─► the client
          │ none                  │ fails                        │ rejected
          └───────────────────────┴──────────────────────────────┴──► the dear route, as ever

Nothing is sent before the check has passed, so a stream comes all at once. What the cheap route
took is in the books as an attempt of the same request, whoever answers it.
"""

import asyncio
from typing import Any

import aiohttp
from starlette.responses import Response

from headway.edge.event_stream import EventStream, send_response
from headway.edge.http_client import read_bounded
from headway.edge.lanes import unless_gone
from headway.gateway.account import Account
from headway.gateway.answers import AnswerContent, parse_answer, parse_stream, without_logprobs
from headway.gateway.ask import STREAM, WHOLE, Attempt, passed_back, renamed, replaced
from headway.gateway.attempts import AttemptError, unanswered
from headway.gateway.cascade.cascade import Cascade
from headway.gateway.cascade.checks import fits
from headway.gateway.cascade.evidence import PLAIN, TaskEvidence
from headway.gateway.cascade.scoring import Scoring
from headway.gateway.dialects import Chunks, Embeddings, Responses, Usage
from headway.gateway.events import Event, EventReader
from headway.gateway.incoming import Incoming, hold_of
from headway.gateway.probe import FAILED
from headway.gateway.state import State
from headway.gateway.upstream import Upstream

MAX_BYTES = 2**24


async def answered(state: State, incoming: Incoming, account: Account) -> bool:
    """Whether the cheap route has answered this request."""
    cascade = state.cascades.get(incoming.route.name)
    if cascade is None or isinstance(incoming.dialect, Embeddings):
        return False
    way = way_of(state, cascade, incoming)
    upstream = state.pools[cascade.row.cheap].choose(incoming.query) if way is not None else None
    if way is None or upstream is None or not cascade.knows("cheap", upstream):
        cascade.count(incoming.task_class, "dear")
        return False
    cheap = CheapAnswer(state, incoming, account, cascade, way, upstream)
    outcome = await unless_gone(cheap.run(), incoming.receive)
    cascade.count(incoming.task_class, outcome)
    if outcome != "accepted":
        return False
    hold = hold_of(state, incoming)
    if hold is not None:
        await unless_gone(hold.whole(cheap.text), incoming.receive)
    await cheap.send()
    return True


def way_of(state: State, cascade: Cascade, incoming: Incoming) -> TaskEvidence | None:
    """The evidence that this request goes by, None where it must be asked of the dear route."""
    raw = incoming.raw
    if raw.get("n") not in (None, 1) or raw.get("best_of") not in (None, 1):
        return None
    if raw.get("background") or incoming.query.pinned or isinstance(raw.get("prompt"), list):
        return None
    way = cascade.way_for(incoming.task_class)
    if way is None:
        return None
    if way.check == "margin" and (raw.get("logprobs") or not isinstance(incoming.dialect, Chunks)):
        return None  # their log-probabilities are not ours to ask for
    if way.check == "agree" and incoming.dialect.path != "/v1/chat/completions":
        return None
    dear = state.pools[incoming.route.name].upstreams
    return way if all(cascade.knows("dear", each) for each in dear) else None


class CheapAnswer:
    """One answer of the cheap route, held until it is checked."""

    def __init__(
        self,
        state: State,
        incoming: Incoming,
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
        self._usage: Usage | None = None
        self.text = ""

    async def run(self) -> str:
        """accepted, rejected or failed; the books know of the attempt."""
        attempt = Attempt(self._state, self._incoming, self._upstream, self._body())
        prompt = output = 0
        try:
            async with asyncio.timeout(self._cascade.row.within_s):
                content = await self._ask(attempt)
            self._upstream.breaker.succeeded()
            usage, estimated = self._counted()
            prompt, output = usage.prompt, usage.output
        except AttemptError as failure:
            return self._failed(attempt, failure)
        except FAILED as error:
            return self._failed(attempt, unanswered(error))
        except asyncio.CancelledError:
            self._upstream.breaker.given_up()
            self._unfinished(attempt, "left")
            raise
        finally:
            attempt.end(prompt, output)
        if content.fingerprint:
            self._upstream.fingerprint = content.fingerprint
        self.text = content.text
        accepted = self._cascade.knows("cheap", self._upstream) and await self._accepts(content)
        outcome = "ok" if accepted else "rejected"
        self._account.attempt(self._upstream, outcome, usage, estimated=estimated, of_arm=False)
        if not accepted:
            return "rejected"
        self._account.relayed, self._account.estimated = usage, estimated
        return "accepted"

    def _failed(self, attempt: Attempt, failure: AttemptError) -> str:
        breaker = self._upstream.breaker
        (breaker.failed if failure.counts else breaker.given_up)()
        self._unfinished(attempt, failure.outcome)
        return "failed"

    def _unfinished(self, attempt: Attempt, outcome: str) -> None:
        """The books of an attempt that gave no answer."""
        usage = self._account.unfinished(attempt, outcome)
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
                *passed_back(answer, self._upstream),
                (b"x-headway-attempts", b"1"),
                (b"x-headway-upstream", self._upstream.name.encode("ascii", "replace")),
            ]
            if incoming.stream:
                events = await all_events(answer)
                return await asyncio.to_thread(self._take_stream, events)
            data = await read_bounded(answer, MAX_BYTES)
        self._usage = incoming.dialect.read_whole(data)
        content = parse_answer(incoming.dialect, data)
        if isinstance(incoming.dialect, Responses):
            name = incoming.dialect.id_of(data)
            self._state.keep_response(name, incoming.owner, self._upstream.name)
        self._data = self._client_bytes(data)
        return content

    def _take_stream(self, events: list[Event]) -> AnswerContent:
        """Keep what the client will see of a stream; ValueError where it has no end."""
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
        """As the client gets it: without what only the check wanted."""
        if self._way.check == "margin":
            data = without_logprobs(data)
        return replaced(data, renamed(self._incoming, self._upstream))

    async def _accepts(self, content: AnswerContent) -> bool:
        incoming, way = self._incoming, self._way
        if not fits(incoming.raw, content):
            return False
        if way.check == PLAIN or way.least is None:
            return True
        scoring = Scoring(
            state=self._state,
            row=self._cascade.row,
            task=incoming.task_class,
            raw=incoming.raw,
            model=incoming.model,
            upstream=self._upstream,
            answer=content,
            spent=self._spent_on_check,
        )
        score = await scoring.score(way.check)
        return score is not None and score >= way.least

    def _spent_on_check(self, upstream: Upstream, usage: Usage) -> None:
        self._account.attempt(upstream, "check", usage, estimated=False, of_arm=False)

    def _counted(self) -> tuple[Usage, bool]:
        """What it took, and whether that is an estimate."""
        usage = self._account.believed(self._upstream, self._usage)
        if usage is not None:
            return usage, False
        return self._account.estimate(self._upstream, len(self._data)), True

    async def send(self) -> None:
        """Give the answer to the client, the books first."""
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
    """The events of a stream to its end, comments left out; ValueError beyond MAX_BYTES."""
    reader, content_events = EventReader(answer.content, MAX_BYTES), list[Event]()
    while (events := await reader.read()) is not None:
        content = [event for event in events if not event.comment]
        if content:
            content_events += content
            reader.note_content()
    return content_events
