"""Accounting of one request: tokens and dollars reserved for its key, and its rows of the ledger.

    reserved  prompt + prompts x choices x (max_tokens, or the context length without it)
    settled   usage of its attempts, as reported by upstreams or estimated

`async with` reserves before the first attempt and settles however the request ends. Usage that a
client sees in a complete answer is on disk before the last byte of the answer is sent. All requests
of a key reserve from one balance.
"""

import logging
from types import TracebackType

import msgspec

from headway.core.errors import RequestError
from headway.gateway import ledger, request_log
from headway.gateway.arm import add_attempt_sample, is_invalid
from headway.gateway.ask import Attempt
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.incoming import GatewayRequest
from headway.gateway.money import dollars_of
from headway.gateway.state import GatewayState
from headway.gateway.upstream import Upstream

log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 16_384
"""Answer tokens of a request without `max_tokens`, at an upstream of unknown context length."""
LARGEST_CONTEXT = 2**20
"""Upper bound of prompt or answer tokens in reported usage, at an unknown context length."""
MIN_ANSWER_BYTES, BYTES_PER_TOKEN, BYTES_PER_DETAILED_TOKEN, BYTES_PER_VECTOR = (
    2**20,
    256,
    8192,
    2**18,
)
"""Bytes of a whole answer: fixed part; per token without and with log-probabilities; per vector."""
MAX_PROMPT_ECHOES = 8
"""Multiple of the prompt's bytes that is allowed in an answer: some answers repeat it, escaped."""
CLIENT_GONE_STATUSES = ("left", "client_left")
"""Statuses of a request whose client disconnected: its key pays for what the upstream computed."""
NO_WORK_OUTCOMES = ("connect", "refused", "busy", "away", "untranslated")
"""Outcomes of an attempt for which the upstream did no work."""


class Account:
    """Accounting of one request."""

    is_free = False
    """Whether it costs nothing, so that nothing is reserved."""

    def __init__(self, state: GatewayState, incoming: GatewayRequest) -> None:
        self._state = state
        self._incoming = incoming
        self._meter = incoming.caller.meter
        self._budgets = state.budgets_of(incoming.owner)
        self._reserved_tokens, self._reserved_dollars = 0, 0.0
        self._open = self._has_arm_sample = False
        self._upstream, self._last = "", UpstreamUsage()
        """Name of the upstream of the last attempt, and its usage."""
        self.num_attempts = 0
        self.dollars = 0.0
        self.relayed = UpstreamUsage()
        """Usage that was relayed to the client, summed over all attempts."""
        self.estimated = False
        self.ttft_s: float | None = None
        self.text: list[str] | None = None
        """Parts of the answer's text, kept where a rollout checks `response_format`."""
        if incoming.arm is not None and is_invalid(incoming.raw, "") is not None:
            self.text = []

    async def __aenter__(self) -> "Account":
        if not self.is_free:
            self._hold()
        incoming, state = self._incoming, self._state
        self._open = True
        if not self.is_free:
            state.budget.request()
        state.ledger.write(
            ledger.BEGIN,
            incoming.request_id,
            incoming.owner,
            incoming.task,
            incoming.task_class,
            incoming.model,
            state.clock.wall_s(),
            0 if self.is_free else self._num_prompt(),
            state.team_of(incoming.owner),
            msgspec.json.encode(incoming.tags).decode(),
        )
        return self

    def _num_prompt(self) -> int:
        """Estimate the tokens of the prompt from its bytes."""
        pool = self._state.pools[self._incoming.route.name]
        return self._prompt_at(pool.upstreams[0])

    def _prompt_at(self, upstream: Upstream) -> int:
        """Estimate the tokens of the prompt at this upstream; at least its number of token ids."""
        incoming = self._incoming
        return max(round(upstream.speed.tokens_of(incoming.prompt_bytes)), incoming.num_ids)

    def _max_output(self, upstream: Upstream, unknown: int) -> int:
        """Return the maximum tokens of all answers.

        For an unknown context it is the length that the client states, else `unknown`.
        """
        incoming = self._incoming
        stated = min(incoming.query.answer or 0, LARGEST_CONTEXT)
        context = upstream.context or max(unknown, stated)
        return min(stated or context, context) * incoming.num_answers

    def max_usage_at(self, upstream: Upstream) -> UpstreamUsage:
        """Return the maximum usage of the request at this upstream."""
        return UpstreamUsage(
            self._prompt_at(upstream), 0, self._max_output(upstream, UNKNOWN_CONTEXT)
        )

    def _hold(self) -> None:
        """Reserve the maximum cost over all upstreams; raises RequestError 429."""
        incoming, state = self._incoming, self._state
        rows = state.with_fallbacks(incoming.route)
        upstreams = [each for row in rows for each in state.pools[row.name].upstreams]
        most = [(each, self.max_usage_at(each)) for each in upstreams]
        self._reserve_tokens(max(usage.output for _, usage in most))
        if not self._budgets:
            return
        dollars = max(dollars_of(each.price, usage, each.speed) for each, usage in most)
        for number, budget in enumerate(self._budgets):
            try:
                budget.hold(dollars)
            except RequestError:
                self._meter.settle(self._reserved_tokens, 0)
                for held in self._budgets[:number]:
                    held.release(dollars)
                raise
        self._reserved_dollars = dollars

    def _reserve_tokens(self, output: int) -> None:
        """Reserve tokens of the key's minute.

        A request without `max_tokens` gets the length that still fits.
        """
        incoming, prompt, meter = self._incoming, self._num_prompt(), self._meter
        param, spare = incoming.answer_param, incoming.caller.in_batch
        given = param is not None or not incoming.num_answers
        if not given and meter.tokens is not None and prompt + output > meter.tokens.per_minute:
            each = max(1, (meter.tokens.per_minute - prompt) // incoming.num_answers)
            incoming.raw[incoming.dialect.lengths[0]] = each
            output = each * incoming.num_answers
        self._reserved_tokens = meter.hold(prompt + output, param or "messages", spare=spare)

    # ── what attempts take ──────────────────────────────────────────────────────────────────

    def checked_usage(
        self, upstream: Upstream, usage: UpstreamUsage | None
    ) -> UpstreamUsage | None:
        """Return the usage that an upstream reported, or None if the request cannot have used it.

        A negative count, or more than the request allows, counts in the metric `usage_refused`.
        No tokens at all are no report: so a translation shows an answer without usage.
        """
        if usage is None or not any(usage):
            return None
        incoming = self._incoming
        prompts = max(incoming.num_prompts, incoming.num_answers)
        most_prompt = (upstream.context or LARGEST_CONTEXT) * prompts
        fits = 0 <= usage.cached <= usage.prompt <= most_prompt
        if fits and 0 <= usage.output <= self._max_output(upstream, LARGEST_CONTEXT):
            return usage
        self._state.metrics.add("usage_refused", upstream=upstream.name)
        return None

    def max_bytes_at(self, upstream: Upstream) -> int:
        """Return the maximum bytes of a whole answer, with log-probabilities where requested."""
        incoming = self._incoming
        wants = any(incoming.raw.get(name) for name in ("logprobs", "top_logprobs", "include"))
        tokens = self._max_output(upstream, LARGEST_CONTEXT)
        vectors = incoming.num_prompts * BYTES_PER_VECTOR if not incoming.num_answers else 0
        base = MIN_ANSWER_BYTES + MAX_PROMPT_ECHOES * incoming.prompt_bytes
        return base + tokens * (BYTES_PER_DETAILED_TOKEN if wants else BYTES_PER_TOKEN) + vectors

    def estimate(self, upstream: Upstream, num_bytes: int, output: float = 0.0) -> UpstreamUsage:
        """Estimate the usage of an attempt that its upstream did not report.

        The answer's tokens are those of `num_bytes`, or `output` where that is more.
        """
        output = max(upstream.speed.tokens_of(num_bytes), output)
        most = self._max_output(upstream, LARGEST_CONTEXT)
        return UpstreamUsage(self._prompt_at(upstream), 0, min(round(output), most))

    def estimate_unfinished(
        self, attempt: Attempt, outcome: str, num_bytes: int | None = None
    ) -> UpstreamUsage:
        """Estimate the usage of a failed attempt from its bytes, or from its duration without."""
        if outcome in NO_WORK_OUTCOMES or outcome.startswith("status_"):
            return UpstreamUsage()
        upstream, speed = attempt.upstream, attempt.upstream.speed
        made = speed.estimate_output(attempt.flight) if num_bytes is None else 0.0
        return self.estimate(upstream, num_bytes or 0, made)

    def first_token(self) -> None:
        """Record the time to first token, when the first token is sent to the client."""
        if self.ttft_s is None:
            self.ttft_s = self._state.clock.now_s() - self._incoming.began_s
            self._state.metrics.first_token(self.ttft_s)

    def attempt(
        self,
        upstream: Upstream,
        outcome: str,
        usage: UpstreamUsage,
        *,
        estimated: bool,
        ttft_s: float | None = None,
        of_arm: bool = True,
    ) -> None:
        """Record an attempt that is over and used `usage` at its upstream.

        The first attempt with `of_arm` becomes the request's sample in the rollout of its model.
        """
        dollars = dollars_of(upstream.price, usage, upstream.speed)
        self._last, self._upstream = usage, upstream.name
        self.num_attempts += 1
        self.dollars += dollars
        upstream.record(outcome, ttft_s)
        state = self._state
        state.metrics.add("attempts", upstream=upstream.name, outcome=outcome)
        state.metrics.add("dollars", dollars, upstream=upstream.name)
        state.ledger.write(
            ledger.ATTEMPT,
            *(self._incoming.request_id, self.num_attempts, upstream.name, outcome),
            *(usage.prompt, usage.cached, usage.output, int(estimated), dollars, ttft_s),
        )
        if of_arm and not self._has_arm_sample and self._incoming.arm is not None:
            self._has_arm_sample = True
            self._add_arm_sample(upstream, outcome, usage, dollars)

    def _add_arm_sample(
        self, upstream: Upstream, outcome: str, usage: UpstreamUsage, dollars: float
    ) -> None:
        """Add the result of the first attempt to its arm of the rollout."""
        incoming = self._incoming
        assert incoming.arm is not None
        add_attempt_sample(
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
        """Record the number of answer tokens that were relayed until now."""
        self._state.ledger.write(ledger.PROGRESS, output, self.dollars, self._incoming.request_id)

    async def settle(self, status: str, error: BaseException | None = None) -> None:
        """Settle the request, which ended with `error` or None; returns when its row is on disk.

        Safe to call twice.
        """
        if not self._open:
            return
        self._open = False
        state, incoming, used = self._state, self._incoming, self.relayed
        if status in CLIENT_GONE_STATUSES and not any(used):
            used, self.estimated = self._last, True
        self._meter.settle(self._reserved_tokens, used.prompt + used.output)
        for budget in self._budgets:
            budget.settle(self._reserved_dollars, self.dollars)
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

    def _log(self, used: UpstreamUsage, error: BaseException | None) -> None:
        """Write the request's line to the request log, if there is one."""
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
        code = (
            error.code or "refused" if isinstance(error, RequestError) else CLIENT_GONE_STATUSES[0]
        )
        await self.settle("ok" if error is None else code, error)
