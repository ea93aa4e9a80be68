"""What one request holds and takes: tokens and dollars of its key, its rows of the ledger.

    held      prompt + prompts x choices x (the longest answer, or the context without one)
    settled   what its attempts took, as upstreams counted it or by an estimate

`async with` holds before the first attempt and settles however the request ends; what is told to a
client as complete is on disk before its last byte. All requests of a key hold from one balance.
"""

import logging
from types import TracebackType

from headway.core.errors import RequestError
from headway.gateway import ledger, request_log
from headway.gateway.arm import is_invalid, tell
from headway.gateway.ask import Attempt
from headway.gateway.dialects import Usage
from headway.gateway.incoming import Incoming
from headway.gateway.money import dollars_of
from headway.gateway.state import State
from headway.gateway.upstream import Upstream

log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 16_384
"""Tokens of an answer of no given length, where an upstream does not say how long it may be."""
LARGEST_CONTEXT = 2**20
"""Tokens that a prompt or an answer is believed to have, where an upstream tells no context."""
LEAST_BYTES, TOKEN_BYTES, DETAIL_BYTES, VECTOR_BYTES = 2**20, 256, 8192, 2**18
"""Bytes of a whole answer beside its tokens; of a token, without and with log-probabilities; of an
embedding."""
ECHO = 8
"""How often an answer may have the bytes of its prompt: some repeat it, escaped."""
CLIENT_GONE = ("left", "client_left")
"""How a request ends whose client has gone: what its upstream computed counts for its key."""
IDLE = ("connect", "refused", "busy", "away")
"""Outcomes of an attempt for which its upstream did no work."""


class Account:
    """The books of one request."""

    def __init__(self, state: State, incoming: Incoming) -> None:
        self._state = state
        self._incoming = incoming
        self._meter = incoming.caller.meter
        self._purse = state.purses.of(incoming.owner)
        self._held_tokens, self._held_dollars = 0, 0.0
        self._open = self._told_arm = False
        self._upstream, self._last = "", Usage()
        """Whom the last attempt asked, and what it took."""
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
        return self._prompt_at(pool.upstreams[0])

    def _prompt_at(self, upstream: Upstream) -> int:
        """Tokens of the prompt there: by its bytes, and no fewer than it has token ids."""
        incoming = self._incoming
        return max(round(upstream.speed.tokens_of(incoming.prompt_bytes)), incoming.num_ids)

    def _most_output(self, upstream: Upstream, unknown: int) -> int:
        """Tokens of all its answers at most; `unknown` are those of one where nothing says it."""
        incoming, context = self._incoming, upstream.context or unknown
        return min(incoming.query.answer or context, context) * incoming.num_answers

    def held_at(self, upstream: Upstream) -> Usage:
        """What the request may take there, which is held before it is forwarded."""
        return Usage(self._prompt_at(upstream), 0, self._most_output(upstream, UNKNOWN_CONTEXT))

    def _hold(self) -> None:
        """Keep what it may cost; raises RequestError 429."""
        incoming, state = self._incoming, self._state
        rows = state.with_fallbacks(incoming.route)
        upstreams = [each for row in rows for each in state.pools[row.name].upstreams]
        most = [(each, self.held_at(each)) for each in upstreams]
        self._hold_tokens(max(usage.output for _, usage in most))
        if self._purse is None:
            return
        dollars = max(dollars_of(each.price, usage, each.speed) for each, usage in most)
        try:
            self._purse.hold(dollars)
        except RequestError:
            self._meter.settle(self._held_tokens, 0)
            raise
        self._held_dollars = dollars

    def _hold_tokens(self, output: int) -> None:
        """Keep so many tokens of the minute; answers of no given length may be shortened to it."""
        incoming, prompt, meter = self._incoming, self._num_prompt(), self._meter
        param, spare = incoming.answer_param, incoming.caller.in_batch
        given = param is not None or not incoming.num_answers
        if not given and meter.tokens is not None and prompt + output > meter.tokens.per_minute:
            each = max(1, (meter.tokens.per_minute - prompt) // incoming.num_answers)
            incoming.raw[incoming.dialect.lengths[0]] = each
            output = each * incoming.num_answers
        self._held_tokens = meter.hold(prompt + output, param or "messages", spare=spare)

    # ── what attempts take ──────────────────────────────────────────────────────────────────

    def believed(self, upstream: Upstream, usage: Usage | None) -> Usage | None:
        """Usage as an upstream sent it; None, and counted, where the request cannot have taken it:
        a negative count, or more than was asked for."""
        if usage is None:
            return None
        incoming = self._incoming
        prompts = max(incoming.num_prompts, incoming.num_answers)
        most_prompt = (upstream.context or LARGEST_CONTEXT) * prompts
        fits = 0 <= usage.cached <= usage.prompt <= most_prompt
        if fits and 0 <= usage.output <= self._most_output(upstream, LARGEST_CONTEXT):
            return usage
        self._state.metrics.add("usage_refused", upstream=upstream.name)
        return None

    def most_bytes(self, upstream: Upstream) -> int:
        """Bytes of a whole answer at most: a token with log-probabilities has its alternatives."""
        incoming = self._incoming
        wants = any(incoming.raw.get(name) for name in ("logprobs", "top_logprobs", "include"))
        tokens = self._most_output(upstream, LARGEST_CONTEXT)
        vectors = incoming.num_prompts * VECTOR_BYTES if not incoming.num_answers else 0
        base = LEAST_BYTES + ECHO * incoming.prompt_bytes
        return base + tokens * (DETAIL_BYTES if wants else TOKEN_BYTES) + vectors

    def estimate(self, upstream: Upstream, num_bytes: int, output: float = 0.0) -> Usage:
        """What an attempt took that no upstream counted: an answer of so many bytes, or `output`
        tokens where that is more."""
        output = max(upstream.speed.tokens_of(num_bytes), output)
        most = self._most_output(upstream, LARGEST_CONTEXT)
        return Usage(self._prompt_at(upstream), 0, min(round(output), most))

    def unfinished(self, attempt: Attempt, outcome: str, num_bytes: int | None = None) -> Usage:
        """What an attempt took that is over: by the bytes of its answer, by its time without."""
        if outcome in IDLE or outcome.startswith("status_"):
            return Usage()
        upstream, speed = attempt.upstream, attempt.upstream.speed
        made = speed.made(attempt.flight) if num_bytes is None else 0.0
        return self.estimate(upstream, num_bytes or 0, made)

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
        self._last, self._upstream = usage, upstream.name
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

    async def settle(self, status: str, error: BaseException | None = None) -> None:
        """The request is over, ended by `error` if by any; return when its row is written. Safe to
        call twice."""
        if not self._open:
            return
        self._open = False
        state, incoming, used = self._state, self._incoming, self.relayed
        if status in CLIENT_GONE and not any(used):
            used, self.estimated = self._last, True
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
        self._log(used, error)
        await state.ledger.flushed()

    def _log(self, used: Usage, error: BaseException | None) -> None:
        """Its line in the log, where requests have lines."""
        state, incoming = self._state, self._incoming
        if state.request_log is not None:
            request_log.write(
                state.request_log,
                incoming,
                upstream=self._upstream,
                used=used,
                attempts=self.num_attempts,
                dollars=self.dollars,
                ttft_s=self.ttft_s,
                e2e_s=state.clock.now_s() - incoming.began_s,
                error=error,
            )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._open:
            return
        code = error.code or "refused" if isinstance(error, RequestError) else CLIENT_GONE[0]
        await self.settle("ok" if error is None else code, error)
