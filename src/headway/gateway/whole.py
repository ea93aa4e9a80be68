"""Answer of a request without streaming, over all its attempts, or from the cache.

The cache is off unless a model's row has `cache: 10m`. It has whole answers to the same body of the
same key, whatever its name: keys never share answers, nor do classes of tasks where a scorer or a
cascade treats each in its way. Not cached are streams, stored responses, requests of a rollout, and
what a client sends with `cache-control: no-cache`.
"""

import asyncio
import hashlib

import aiohttp
import msgspec
from starlette.responses import Response

from headway.edge.auth import header
from headway.edge.event_stream import send_response
from headway.edge.lanes import unless_disconnected
from headway.gateway.account import Account
from headway.gateway.answers import parse_answer
from headway.gateway.arm import whole_text
from headway.gateway.ask import (
    WHOLE,
    Attempt,
    client_headers,
    model_name_replacements,
    replace_each,
)
from headway.gateway.attempts import (
    AttemptError,
    AttemptSequence,
    connection_failure,
    deadline_error,
)
from headway.gateway.dialects import Dialect, Responses, UpstreamUsage
from headway.gateway.incoming import GatewayRequest, hold_of
from headway.gateway.probe import PROBE_FAILURES
from headway.gateway.state import GatewayState
from headway.gateway.upstream import FAILURES, Upstream

MAX_WHOLE_BYTES = 64 * 2**20
NOT_COMPARED = ("metadata",)
"""Fields that do not change an answer."""
HIT = [(b"x-headway-cache", b"hit")]


async def answer_whole(state: GatewayState, incoming: GatewayRequest, account: Account) -> None:
    """Answer a request without streaming; raises RequestError."""
    answering = WholeAnswer(state, incoming, account)
    response = await unless_disconnected(answering.run(), incoming.receive)
    hold = hold_of(state, incoming)
    if hold is not None:
        text = text_of(incoming.dialect, bytes(response.body))
        await unless_disconnected(hold.whole(text), incoming.receive)
    await account.settle("ok")
    await send_response(response, incoming.send, answering.headers)
    digest = digest_of(state, incoming)
    if digest is not None:
        state.cache.add(digest, bytes(response.body), incoming.route.cache_s or 0.0)


def digest_of(state: GatewayState, incoming: GatewayRequest) -> bytes | None:
    """Return what makes two requests the same one; None for one that is not cached."""
    raw = incoming.raw
    is_stored = isinstance(incoming.dialect, Responses) and raw.get("store") is not False
    if incoming.route.cache_s is None or incoming.stream or incoming.arm is not None or is_stored:
        return None
    if "no-" in (header(incoming.scope, b"cache-control") or ""):
        return None
    body = {name: value for name, value in raw.items() if name not in NOT_COMPARED}
    names = state.config.forward_headers
    sent = [header(incoming.scope, name.encode()) for name in names]
    route, key = incoming.route, incoming.caller.principal.cache_owner
    task = incoming.task_class if route.hold or route.cascade else ""
    parts = [incoming.owner, key, incoming.dialect.path, route.name, task, sent, body]
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).digest()


async def answer_from_cache(state: GatewayState, incoming: GatewayRequest) -> bool:
    """Answer a request that was answered before; False where it was not."""
    digest = digest_of(state, incoming)
    data = state.cache.find(digest) if digest is not None else None
    if data is None:
        return False
    account = Account(state, incoming)
    account.is_free = True
    async with account:
        await account.settle("cached")
    await send_response(Response(data, media_type=WHOLE), incoming.send, HIT)
    return True


def text_of(dialect: Dialect, data: bytes) -> str:
    """Return the text of a whole answer; RequestError if it is malformed."""
    try:
        return parse_answer(dialect, data).text
    except PROBE_FAILURES as error:
        raise connection_failure(ValueError("no answer of its dialect")).error from error


class WholeAnswer:
    """Attempts at one whole answer."""

    def __init__(self, state: GatewayState, incoming: GatewayRequest, account: Account) -> None:
        self._state = state
        self._incoming = incoming
        self._account = account
        self._way = AttemptSequence(state, incoming)
        self.headers: list[tuple[bytes, bytes]] = []

    async def run(self) -> Response:
        """Return the first upstream's answer that succeeds; raises RequestError."""
        while True:
            upstream = await self._way.next()
            try:
                data = await self._ask(upstream)
            except AttemptError as failure:
                self._way.failed(upstream, failure)
                continue
            self.headers += [
                (b"x-headway-attempts", str(self._way.num_attempts).encode()),
                (b"x-headway-upstream", upstream.name.encode("ascii", "replace")),
            ]
            return Response(data, media_type=WHOLE)

    async def _ask(self, upstream: Upstream) -> bytes:
        """Make one attempt and record it; raises AttemptError."""
        incoming, account = self._incoming, self._account
        attempt = Attempt(self._state, incoming, upstream, incoming.raw)
        counted: UpstreamUsage | None = None
        outcome = "left"
        try:
            data, counted = await self._answer(upstream, attempt)
            outcome = "ok"
        except AttemptError as failure:
            outcome = failure.outcome
            raise
        except asyncio.CancelledError:
            upstream.breaker.record_abort()
            raise
        finally:
            if outcome != "ok":
                usage = account.estimate_unfinished(attempt, outcome)
                account.attempt(upstream, outcome, usage, estimated=any(usage))
            done = counted or UpstreamUsage()
            attempt.end(done.prompt, done.output)
        self._count(upstream, counted, data)
        return replace_each(data, model_name_replacements(incoming, upstream))

    async def _answer(
        self, upstream: Upstream, attempt: Attempt
    ) -> tuple[bytes, UpstreamUsage | None]:
        """Return (the answer, the reported usage); raises AttemptError."""
        try:
            async with asyncio.timeout(self._way.remaining_s) as limit:
                with upstream.expire_when_down(limit):
                    data, answer = await self._read(attempt)
            usage = self._account.checked_usage(upstream, self._incoming.dialect.read_whole(data))
        except FAILURES as error:
            failure = connection_failure(error)
            if self._way.remaining_s <= 0:
                failure.error, failure.again = deadline_error(), False
            raise failure from error
        self.headers = client_headers(answer, upstream)
        upstream.breaker.succeeded()
        return data, usage

    async def _read(self, attempt: Attempt) -> tuple[bytes, aiohttp.ClientResponse]:
        async with attempt.answer(WHOLE) as answer:
            most = min(self._account.max_bytes_at(attempt.upstream), MAX_WHOLE_BYTES)
            return attempt.whole(await attempt.upstream.read(answer, most)), answer

    def _count(self, upstream: Upstream, counted: UpstreamUsage | None, data: bytes) -> None:
        """Record the usage: as reported, else estimated by bytes."""
        incoming, estimated = self._incoming, counted is None
        usage = counted or self._account.estimate(upstream, len(data))
        if counted is None and incoming.raw.get("background"):  # the answer is not complete yet
            usage = self._account.max_usage_at(upstream)
        self._account.relayed, self._account.estimated = usage, estimated
        if self._account.text is not None:
            self._account.text.append(whole_text(data))
        self._account.attempt(upstream, "ok", usage, estimated=estimated)
        if isinstance(incoming.dialect, Responses):
            self._state.keep_response(incoming.dialect.id_of(data), incoming.owner, upstream.name)
