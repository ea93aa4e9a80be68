"""What one request holds and takes: tokens and dollars of its key, its rows of the ledger.

`async with` holds before the first attempt and settles however the request ends; what is told to a
client as complete is on disk before its last byte.
"""

import logging
from types import TracebackType

from headway.core.errors import RequestError
from headway.gateway import ledger
from headway.gateway.arm import is_invalid, tell
from headway.gateway.dialects import Usage
from headway.gateway.incoming import Incoming
from headway.gateway.money import dollars_of
from headway.gateway.state import State
from headway.gateway.upstream import Upstream

log = logging.getLogger(__name__)

UNKNOWN_ANSWER = 256
"""Tokens that an answer of no given length is held as."""


class Account:
    """The books of one request."""

    def __init__(self, state: State, incoming: Incoming) -> None:
        self._state = state
        self._incoming = incoming
        self._meter = incoming.caller.meter
        self._purse = state.purses.of(incoming.owner)
        self._held_tokens, self._held_dollars = 0, 0.0
        self._open = self._told_arm = False
        self.num_attempts = 0
        self.dollars = 0.0
        self.relayed = Usage()
        """What the client was told of, in all attempts together."""
        self.estimated = False
        self.ttft_s: float | None = None
        self.text: list[str] | None = None
        """The answer's text, where the form of the answer is looked at."""
        if incoming.arm is not None and is_invalid(incoming.raw, "") is not None:
            self.text = []

    async def __aenter__(self) -> "Account":
        self._hold()
        incoming, state = self._incoming, self._state
        self._open = True
        state.budget.request()
        state.ledger.write(
            ledger.BEGIN,
            incoming.request_id,
            incoming.owner,
            incoming.task,
            incoming.task_class,
            incoming.model,
            state.clock.wall_s(),
            self._num_prompt(),
        )
        return self

    def _num_prompt(self) -> int:
        """Tokens of the prompt, as its bytes tell."""
        pool = self._state.pools[self._incoming.route.name]
        return round(pool.upstreams[0].speed.tokens_of(self._incoming.prompt_bytes))

    def _hold(self) -> None:
        """Keep what it may cost; raises RequestError 429."""
        incoming, prompt = self._incoming, self._num_prompt()
        longest = incoming.asked.answer or UNKNOWN_ANSWER
        spare, param = incoming.caller.in_batch, incoming.answer_param
        self._held_tokens = self._meter.hold(
            prompt, longest, param is not None, param or "messages", spare=spare
        )
        if self._purse is None:
            return
        upstreams = self._state.pools[incoming.route.name].upstreams
        usage = Usage(prompt, 0, longest)
        most = max(dollars_of(each.price, usage, each.speed) for each in upstreams)
        try:
            self._purse.hold(most)
        except RequestError:
            self._meter.settle(self._held_tokens, 0)
            raise
        self._held_dollars = most

    def first_token(self) -> None:
        """The first token goes to the client."""
        if self.ttft_s is None:
            self.ttft_s = self._state.clock.now_s() - self._incoming.began_s
            self._state.metrics.first_token(self.ttft_s)

    def attempt(
        self,
        upstream: Upstream,
        outcome: str,
        usage: Usage,
        *,
        estimated: bool,
        ttft_s: float | None = None,
        of_arm: bool = True,
    ) -> None:
        """An attempt is over and took `usage` of its upstream.

        The first one that is `of_arm` is told to the rollout of its model.
        """
        dollars = dollars_of(upstream.price, usage, upstream.speed)
        self.num_attempts += 1
        self.dollars += dollars
        state = self._state
        state.metrics.add("attempts", upstream=upstream.name, outcome=outcome)
        state.metrics.add("dollars", dollars, upstream=upstream.name)
        state.ledger.write(
            ledger.ATTEMPT,
            *(self._incoming.request_id, self.num_attempts, upstream.name, outcome),
            *(usage.prompt, usage.cached, usage.output, int(estimated), dollars, ttft_s),
        )
        if of_arm and not self._told_arm and self._incoming.arm is not None:
            self._told_arm = True
            self._tell_arm(upstream, outcome, usage, dollars)

    def _tell_arm(self, upstream: Upstream, outcome: str, usage: Usage, dollars: float) -> None:
        """What the first attempt says of its arm of a rollout."""
        incoming = self._incoming
        assert incoming.arm is not None
        tell(
            incoming.arm,
            upstream,
            outcome,
            usage=usage,
            seconds=self._state.clock.now_s() - incoming.began_s,
            ttft_s=self.ttft_s,
            dollars=dollars if upstream.row.price is not None else None,
            invalid=None if self.text is None else is_invalid(incoming.raw, "".join(self.text)),
        )

    def progress(self, output: int) -> None:
        """So many tokens of the answer have been relayed until now."""
        self._state.ledger.write(ledger.PROGRESS, output, self.dollars, self._incoming.request_id)

    async def settle(self, status: str) -> None:
        """The request is over; return when its row is written. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        state, incoming, used = self._state, self._incoming, self.relayed
        self._meter.settle(self._held_tokens, used.prompt + used.output)
        if self._purse is not None:
            self._purse.settle(self._held_dollars, self.dollars)
        state.tasks.spend(
            incoming.owner, incoming.task, incoming.task_class, incoming.model, self.dollars
        )
        state.metrics.add("requests", route=incoming.model, status=status)
        for kind, count in zip(("prompt", "cached", "output"), used, strict=True):
            state.metrics.add("tokens", count, route=incoming.model, kind=kind)
        state.ledger.write(
            ledger.SETTLE,
            *(state.clock.wall_s(), status, self.num_attempts),
            *(used.prompt, used.cached, used.output, int(self.estimated), self.dollars),
            *(incoming.model, incoming.request_id),
        )
        await state.ledger.flushed()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._open:
            return
        code = error.code or "refused" if isinstance(error, RequestError) else "left"
        await self.settle("ok" if error is None else code)
