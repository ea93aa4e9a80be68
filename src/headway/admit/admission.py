"""Admission: the limits of a key and of a class, and the waits that the server can promise.

The server decides by itself, without a message to the engine, so a refusal comes at once. What
needs no prompt is checked before the prompt is rendered, the rest before it is sent:

    (edge.auth)   requests of the key at once and per minute, of every POST       429
    arrive        the same of a class, requests in the queue                      429, 503
    set_prompts   length of prompt and answer, tokens per minute                  400, 429
                  seconds until the first token, long prompts in the queue        429, 503

429 is a limit of the caller, 503 means that the server is full. Where no request is ahead of it on
its engine, a request is not refused for its predicted wait.

A request without an objective (of the default class, where the operator states no objectives for
it) is judged as others are while it can meet those of its class. Otherwise it is not refused but
becomes best effort: it is queued in the order of arrival behind the other requests of its user,
with ten times `--max-queue-wait` as its deadline, so that requests with an objective go first.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

import msgspec

from headway.admit.engine_queues import EngineQueue, EngineQueues
from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lengths import (
    AdmissionRequest,
    check_prompt_lengths,
    limit_answer,
    longest_answer,
    max_output_tokens,
    shorten_answers,
)
from headway.admit.prefixes import ComputedPrefixes, page_hashes
from headway.admit.queue import QueueOrder
from headway.config.scheduler_config import SchedulerConfig
from headway.core.clock import Clock
from headway.core.errors import OverloadedError
from headway.core.service import UNLIMITED, KeyLimits, ServiceClass
from headway.core.slo import Slo
from headway.core.terms import Terms
from headway.edge.keys import Caller
from headway.edge.rates import MAX_RETRY_S, Meter, rate_limit_error

QUEUE_PER_SLOT, MIN_QUEUE_REQUESTS = 4, 256
"""Requests that may wait: for each slot of the engines; lower bound of the whole queue."""
BEST_EFFORT_WAIT_S = 60.0
"""Default of the maximum predicted wait of a best-effort request. It leaves time for the answer
within the timeout of a client, often one to ten minutes."""
BEST_EFFORT_DEADLINE_WAITS = 10.0
"""Deadline of a best-effort request, in maximum waits: behind the deadlines of all objectives, and
far enough that a wrong forecast makes no request late. Requests overtake a late one: with deadlines
of one wait, p95 of the wait was 10.7 s where 4 s are allowed."""
MAX_QUEUE_BYTES = 128 * 1024**2
"""Bytes of the bodies of waiting requests; a chat of 10,000 tokens has 40 kB."""
PRESSURE_SLACK_SHARE = 0.5
"""Share of (objective − own prefill) that a request may wait under pressure. Forecasts err, and a
late request that ages takes time from those in time; half is enough to keep every slot busy (lab
log, 2026-11-22)."""
MAX_WAIT_RATIO, MAX_WAIT_RATIO_UNREACHABLE = 1.25, 2.0
"""Maximum wait as a multiple of the objective: normally, and where the prompt alone takes longer. A
first token that is a little late is of use (lab log, 2026-11-22)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits from the options; None is derived from the engine's size or from the class."""

    max_queue: int | None = None
    max_queue_bytes: int = MAX_QUEUE_BYTES
    max_queue_wait_s: float | None = None
    max_long_queue: int = 32
    scheduler: SchedulerConfig = SchedulerConfig()
    order: QueueOrder = QueueOrder.DEADLINE
    """The order of the engine's policy."""
    prefix_cache: bool = True

    @property
    def best_effort_s(self) -> float:
        """Seconds from arrival to the deadline of a best-effort request."""
        return BEST_EFFORT_DEADLINE_WAITS * self.queue_wait_s

    @property
    def queue_wait_s(self) -> float:
        """Maximum predicted wait of a best-effort request."""
        return BEST_EFFORT_WAIT_S if self.max_queue_wait_s is None else self.max_queue_wait_s

    @property
    def sheds(self) -> bool:
        """Whether the engine refuses requests that can no longer be in time."""
        return self.scheduler.late == "shed"


class Admission:
    """Admission to the engines of one model."""

    def __init__(self, clock: Clock, rules: Rules | None = None, num_engines: int = 1) -> None:
        self.clock = clock
        self.rules = rules or Rules()
        lane_share = self.rules.scheduler.lane_share
        self.queues = EngineQueues(
            [
                EngineQueue(
                    Forecast(clock, order=self.rules.order, lane_share=lane_share),
                    ComputedPrefixes() if self.rules.prefix_cache else None,
                )
                for _ in range(num_engines)
            ]
        )
        self.num_admitted = 0
        """Number of open tickets: requests admitted that have not ended."""
        self._meters: dict[tuple[str, str], Meter] = {}
        self._last_refusal = -inf, 0.0

    def arrive(
        self, caller: Caller, service_class: ServiceClass, num_slots: int, num_bytes: int = 0
    ) -> "Ticket":
        """Admit a request to the queue before engines of `num_slots` slots each.

        Its body has `num_bytes`. Raises RequestError 429 or OverloadedError.
        """
        user, name = caller.principal.name, service_class.name
        self._check_limits(caller, service_class)
        most = max(QUEUE_PER_SLOT * num_slots * len(self.queues.by_engine), MIN_QUEUE_REQUESTS)
        most = self.rules.max_queue or most
        self._check_queue(user, service_class, most, "requests", lambda entry: entry.num_waiting)
        most = self.rules.max_queue_bytes
        self._check_queue(user, service_class, most, "bytes", lambda entry: entry.num_bytes)
        meter = self._meter(caller, service_class)
        meter.enter()
        entry = QueueEntry(
            user=user,
            weight=caller.weight or service_class.weight,
            service_class=name,
            idle_only=service_class.idle_only,
            num_bytes=num_bytes,
        )
        self.queues.enter(entry)
        return Ticket(self, entry, caller, service_class, meter)

    def _check_limits(self, caller: Caller, service_class: ServiceClass) -> None:
        """Raise where the key or the class has as many waiting requests as its row allows."""
        own = caller.meter.limits.queue_requests
        if own is not None and self.queues.count(user=caller.principal.name) >= own:
            raise rate_limit_error(
                f"{own} requests of this key wait already.", self._next_s(), "key_queue_requests"
            )
        most, name = service_class.limits.queue_requests, service_class.name
        if most is not None and self.queues.count(service_class=name) >= most:
            raise self._full(
                f"{most} requests of the class {name} wait already.",
                "class_queue_requests",
                self._next_s(),
            )

    def _check_queue(
        self,
        user: str,
        service_class: ServiceClass,
        most: int,
        unit: str,
        size: Callable[[QueueEntry], int],
    ) -> None:
        """Raise OverloadedError when the queue has `most` of `unit`, by `size` of each entry.

        Idle requests count only for other idle ones. One user cannot fill the queue for others:
        each may have `most` divided by the number of users that wait, up to twice `most` in all;
        what one user has beyond `most` does not count.
        """
        in_order = self.rules.order == QueueOrder.ARRIVAL
        counted = [
            entry
            for entry in self.queues.entries
            if in_order or service_class.idle_only or not entry.idle_only
        ]
        if sum([size(entry) for entry in counted]) < most:
            return
        users = Counter({user: 0})
        for entry in counted:
            users[entry.user] += size(entry)
        share = most / len(users)
        waiting = sum(min(count, most) for count in users.values())
        if in_order or users[user] >= share or waiting >= 2 * most:
            message = f"{most} {unit} wait already."
            raise self._full(message, f"queue_{unit}", self._next_s())

    def _meter(self, caller: Caller, service_class: ServiceClass) -> Meter:
        """Return the meter of this user's share of the class's limits, where its key has none."""
        own = caller.meter.limits
        limits = service_class.limits
        if own != UNLIMITED:
            names = KeyLimits.__struct_fields__
            shadowed = {name: None for name in names if getattr(own, name) is not None}
            limits = msgspec.structs.replace(limits, **shadowed)
        key = caller.principal.name, service_class.name
        meter = self._meters.get(key)
        if meter is None or meter.limits != limits:
            subject = f"Each user of the class {service_class.name}"
            meter = self._meters[key] = Meter(limits, self.clock, subject)
        return meter

    def _next_s(self) -> float:
        """Return the seconds until the next waiting request has a first token."""
        return min(
            forecast.backlog_s() / max(1, forecast.num_waiting)
            for forecast in (self.queues.by_engine[n].forecast for n in self.queues.accepting)
        )

    def _full(self, message: str, reason: str, wait_s: float) -> OverloadedError:
        wait_s = min(max(wait_s, 1.0), MAX_RETRY_S)
        return OverloadedError(message, reason=reason, retry_after_s=wait_s)

    def check_wait(
        self,
        entry: QueueEntry,
        service_class: ServiceClass,
        caller: Caller,
        slo: Slo,
        *,
        best_effort: bool = False,
    ) -> float:
        """Return the predicted seconds until the first token.

        Raises RequestError 429 or OverloadedError where that exceeds the maximum wait. A request
        that may be `best_effort` becomes best effort where it cannot be in time.
        """
        forecast, rules = self.queues.queue_of(entry).forecast, self.rules
        own = forecast.tokens(entry) * forecast.alone_s
        entry.long = own > rules.scheduler.long_prefill_s
        if best_effort and forecast.count(user=entry.user, best_effort=True):
            self._make_best_effort(entry)
        wait_s = forecast.wait_s(entry)
        if not any(forecast.requests_ahead(entry)):
            return wait_s
        longest = rules.max_long_queue
        if entry.long and self.queues.count(long=True) > longest:
            raise self._full(
                f"{longest} requests with long prompts wait already.", "long_queue", own
            )
        option_wait_s = None if best_effort else rules.max_queue_wait_s
        bound_s, reason = self._bound_s(service_class, slo, own, forecast.has_late, option_wait_s)
        if best_effort and wait_s > min(bound_s, rules.queue_wait_s):
            self._make_best_effort(entry)
            wait_s = forecast.wait_s(entry)
        bound_s = rules.queue_wait_s if entry.best_effort else bound_s
        self._check_bounds(entry, caller, wait_s, bound_s, reason)
        return wait_s

    def _make_best_effort(self, entry: QueueEntry) -> None:
        """Queue a request without an objective in the order of arrival."""
        entry.best_effort = True
        entry.due_s = entry.late_s = self.clock.now_s() + self.rules.best_effort_s

    def _check_bounds(
        self, entry: QueueEntry, caller: Caller, wait_s: float, bound_s: float, reason: str
    ) -> None:
        """Raise 429 where the wait exceeds the key's limit, 503 where it exceeds the bound."""
        key_s = caller.meter.limits.queue_seconds
        if key_s is not None and wait_s > key_s:
            raise rate_limit_error(
                f"The first token would take {wait_s:.1f} s; this key waits {key_s:g} s at most.",
                max(1.0, wait_s - key_s),
                "key_queue_seconds",
            )
        if wait_s <= bound_s:
            return
        if reason == "queue_seconds" and not entry.best_effort:
            self._last_refusal = self.clock.now_s(), wait_s
        message = f"this exceeds the maximum queue wait of {bound_s:.1f} s."
        message = f"The first token would take {wait_s:.1f} s; {message}"
        raise self._full(message, reason, wait_s - bound_s)

    def _bound_s(
        self,
        service_class: ServiceClass,
        slo: Slo,
        own_s: float,
        has_late: bool,
        option_wait_s: float | None,
    ) -> tuple[float, str]:
        """Return (maximum wait for the first token, name of the limit).

        The prefill of the request alone takes `own_s`. `option_wait_s` is `--max-queue-wait`, which
        holds for every objective. Example, an objective of 1.5 s under pressure: 1 s where the
        prompt takes 0.5 s, 3 s where it takes 2 s.
        """
        if service_class.limits.queue_seconds is not None:
            return service_class.limits.queue_seconds, "class_queue_seconds"
        if option_wait_s is not None:
            return option_wait_s, "queue_seconds"
        if slo.ttft_s is None:
            return inf, "queue_seconds"
        if own_s > slo.ttft_s:
            return MAX_WAIT_RATIO_UNREACHABLE * slo.ttft_s, "queue_seconds"
        if not (has_late or self._has_recent_refusal(slo.ttft_s)):
            return MAX_WAIT_RATIO * slo.ttft_s, "queue_seconds"
        return own_s + PRESSURE_SLACK_SHARE * (slo.ttft_s - own_s), "queue_seconds"

    def _has_recent_refusal(self, objective_s: float) -> bool:
        """Whether a request was refused less than `objective_s` ago, which means pressure.

        Refusals caused by a stricter class limit are ignored: the predicted wait of the refused
        request must be one that would be refused here too.
        """
        at_s, wait_s = self._last_refusal
        return (
            self.clock.now_s() - at_s < objective_s and wait_s > PRESSURE_SLACK_SHARE * objective_s
        )

    def check_integrity(self) -> None:
        """Assert the counts of the queues and of the meters."""
        self.queues.check_integrity()
        assert sum(queue.num_requests for queue in self.queues.by_engine) == self.num_admitted
        for meter in self._meters.values():
            assert meter.num_running >= 0
            if meter.tokens is not None:
                meter.tokens.check_integrity()


class Ticket:
    """An admitted request, until `close`."""

    __slots__ = (
        *("_admission", "_caller", "_reserved", "_open", "_pages", "_service_class"),
        *("late", "meter", "entry"),
    )

    def __init__(
        self,
        admission: Admission,
        entry: QueueEntry,
        caller: Caller,
        service_class: ServiceClass,
        meter: Meter,
    ) -> None:
        self._admission = admission
        self._caller = caller
        self._service_class = service_class
        self._reserved = [0, 0]
        self._pages: list[list[int]] | None = None
        """`page_hashes` by prompt, where they are known."""
        self._open = True
        admission.num_admitted += 1
        self.entry = entry
        self.meter = meter
        self.late = False
        """Whether the first token is predicted to miss its objective."""

    def set_prompts(self, request: AdmissionRequest) -> None:
        """Check the request now that its prompts are encoded, and choose its engine.

        May shorten an answer of no given length. Raises RequestError.
        """
        limits = self._caller.meter.limits.over(self._service_class.limits)
        check_prompt_lengths(request, limits.max_prompt_tokens)
        limit_answer(request, limits.max_output_tokens)
        self._reserve_tokens(request)
        entry = self.entry
        entry.n, entry.answer = request.sampling.n, longest_answer(request)
        queues = self._admission.queues
        if queues.has_prefixes and request.prompts is not None:
            self._pages = [page_hashes(request.salt, prompt) for prompt in request.prompts]
        queues.assign(entry, request.lengths, self._pages)
        queue = queues.queue_of(entry)
        longest = round(max(request.lengths) * queue.forecast.uncached)
        if self._pages is not None:
            longest = max(entry.remaining.values())
        class_slo = self._service_class.objectives(longest)
        slo = request.slo or class_slo
        given_s = inf if slo.ttft_s is None else slo.ttft_s
        entry.due_s = self._admission.clock.now_s() + given_s
        entry.late_s = max(entry.due_s, self._admission.clock.now_s() + (class_slo.ttft_s or 0.0))
        best_effort = self._service_class.best_effort and request.slo is None
        wait_s = self._admission.check_wait(
            entry, self._service_class, self._caller, slo, best_effort=best_effort
        )
        self.late = (
            isfinite(given_s) and wait_s > given_s and any(queue.forecast.requests_ahead(entry))
        )

    def _reserve_tokens(self, request: AdmissionRequest) -> None:
        """Reserve the most tokens it may take from the minute's tokens of its key and its class."""
        meters = self._caller.meter, self.meter
        for meter in meters:
            if meter.tokens is not None:
                shorten_answers(request, meter.tokens.per_minute)
        param = request.answer_param or request.prompt_param
        count = sum(request.lengths) + max_output_tokens(request)
        for index, meter in enumerate(meters):
            spare = self._caller.in_batch and meter is self._caller.meter
            self._reserved[index] = meter.hold(count, param, spare=spare)

    def terms(self, terms: Terms) -> Terms:
        """Return the terms for the engine: those of its class, or those of best effort."""
        if not self.entry.best_effort:
            return terms
        ttft_s = self._admission.rules.best_effort_s
        return msgspec.structs.replace(terms, ttft_s=ttft_s, ttft_per_token_s=0.0)

    @property
    def engine(self) -> int:
        """Index of the engine that answers it."""
        return self.entry.engine

    @property
    def _queue(self) -> EngineQueue:
        return self._admission.queues.queue_of(self.entry)

    def on_sent(self, number: int, engine_id: int) -> None:
        """Note that prompt `number` is sent to the engine as request `engine_id`."""
        self._queue.forecast.on_sent(self.entry, number, engine_id)

    def on_first_token(self, number: int) -> None:
        """Note the first token of prompt `number`."""
        queue = self._queue
        queue.forecast.on_first_token(self.entry, number)
        if queue.prefixes is not None and self._pages is not None:
            queue.prefixes.add(self._pages[number])

    def close(self, num_tokens: int = 0) -> None:
        """End the request, which took `num_tokens`; safe to call twice."""
        if not self._open:
            return
        self._open = False
        self._admission.num_admitted -= 1
        self._admission.queues.leave(self.entry)
        for meter, reserved in zip((self._caller.meter, self.meter), self._reserved, strict=True):
            meter.settle(reserved, num_tokens)
        self.meter.leave()
