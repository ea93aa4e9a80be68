"""An answer that is not streamed: asked until somebody gives one, then handed on."""

import asyncio

import aiohttp
from starlette.responses import Response

from headway.edge.event_stream import send_response
from headway.edge.lanes import unless_gone
from headway.gateway.account import Account
from headway.gateway.answers import parse_answer
from headway.gateway.arm import whole_text
from headway.gateway.ask import WHOLE, Attempt, passed_back, renamed, replaced
from headway.gateway.attempts import AttemptError, Way, too_late, unanswered
from headway.gateway.dialects import Dialect, Responses, Usage
from headway.gateway.incoming import Incoming, hold_of
from headway.gateway.probe import FAILED
from headway.gateway.state import State
from headway.gateway.upstream import FAILURES, Upstream

MAX_WHOLE_BYTES = 64 * 2**20


async def answer_whole(state: State, incoming: Incoming, account: Account) -> None:
    """Answer a request that is no stream; raises RequestError."""
    answering = WholeAnswer(state, incoming, account)
    response = await unless_gone(answering.run(), incoming.receive)
    hold = hold_of(state, incoming)
    if hold is not None:
        text = text_of(incoming.dialect, bytes(response.body))
        await unless_gone(hold.whole(text), incoming.receive)
    await account.settle("ok")
    await send_response(response, incoming.send, answering.headers)


def text_of(dialect: Dialect, data: bytes) -> str:
    """The text of a whole answer; RequestError where it cannot be read."""
    try:
        return parse_answer(dialect, data).text
    except FAILED as error:
        raise unanswered(ValueError("no answer of its dialect")).error from error


class WholeAnswer:
    """The attempts at one whole answer."""

    def __init__(self, state: State, incoming: Incoming, account: Account) -> None:
        self._state = state
        self._incoming = incoming
        self._account = account
        self._way = Way(state, incoming)
        self.headers: list[tuple[bytes, bytes]] = []

    async def run(self) -> Response:
        """The answer of the first upstream that gives one; raises RequestError."""
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
        """One attempt, which is in the books however it ends; raises AttemptError."""
        incoming, account = self._incoming, self._account
        attempt = Attempt(self._state, incoming, upstream, incoming.raw)
        counted: Usage | None = None
        outcome = "left"
        try:
            data, counted = await self._answer(upstream, attempt)
            outcome = "ok"
        except AttemptError as failure:
            outcome = failure.outcome
            raise
        except asyncio.CancelledError:
            upstream.breaker.given_up()
            raise
        finally:
            if outcome != "ok":
                usage = account.unfinished(attempt, outcome)
                account.attempt(upstream, outcome, usage, estimated=any(usage))
            done = counted or Usage()
            attempt.end(done.prompt, done.output)
        self._count(upstream, counted, data)
        return replaced(data, renamed(incoming, upstream))

    async def _answer(self, upstream: Upstream, attempt: Attempt) -> tuple[bytes, Usage | None]:
        """(an answer, what its upstream counted); raises AttemptError."""
        try:
            async with asyncio.timeout(self._way.remaining_s) as limit:
                with upstream.hurried(limit):
                    data, answer = await self._read(attempt)
            usage = self._account.believed(upstream, self._incoming.dialect.read_whole(data))
        except FAILURES as error:
            failure = unanswered(error)
            if self._way.remaining_s <= 0:
                failure.error, failure.again = too_late(), False
            raise failure from error
        self.headers = passed_back(answer, upstream)
        upstream.breaker.succeeded()
        return data, usage

    async def _read(self, attempt: Attempt) -> tuple[bytes, aiohttp.ClientResponse]:
        async with attempt.answer(WHOLE) as answer:
            most = min(self._account.most_bytes(attempt.upstream), MAX_WHOLE_BYTES)
            return await attempt.upstream.read(answer, most), answer

    def _count(self, upstream: Upstream, counted: Usage | None, data: bytes) -> None:
        """Take what it cost: as the upstream counted it, else by its bytes."""
        incoming, estimated = self._incoming, counted is None
        usage = counted or self._account.estimate(upstream, len(data))
        if counted is None and incoming.raw.get("background"):  # it has only begun
            usage = self._account.held_at(upstream)
        self._account.relayed, self._account.estimated = usage, estimated
        if self._account.text is not None:
            self._account.text.append(whole_text(data))
        self._account.attempt(upstream, "ok", usage, estimated=estimated)
        if isinstance(incoming.dialect, Responses):
            self._state.keep_response(incoming.dialect.id_of(data), incoming.owner, upstream.name)
