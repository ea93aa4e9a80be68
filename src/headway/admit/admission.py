"""Who is let in: limits of a key and of a class, and of what the server can promise.

The server decides by itself, without a word to the engine, so a refusal comes at once. What needs
no prompt is asked before the prompt is rendered, the rest before it is sent:

    arrive    requests at once and per minute, requests in the queue          429, 503
    measure   length of prompt and answer, tokens per minute                  400, 429
              seconds until the first token, long jobs in the queue           503

429 is the caller's own limit, 503 the server being full. A server that has nobody waiting refuses
nobody for load, whatever it predicts.

A request that asks for no objective (the default class, where no operator states its objectives)
is judged as others are while it can meet those of its class. Beyond that it is not refused but
queued, best effort: in the order of arrival behind its user's others, with `--max-queue-wait` as
its deadline, so that requests that ask for an objective go before it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

import msgspec

from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lengths import (
    AdmissionRequest,
    bound_answer,
    check_prompts,
    longest_answer,
    max_output_tokens,
    shorten_answers,
)
from headway.admit.lines import Line, Lines
from headway.admit.queue import QueueOrder
from headway.admit.seen import Seen, pages_of
from headway.config.scheduler_config import SchedulerConfig
from headway.core.clock import Clock
from headway.core.errors import OverloadedError
from headway.core.service import UNLIMITED, Limits, ServiceClass
from headway.core.slo import Slo
from headway.core.terms import Terms
from headway.edge.keys import Caller
from headway.edge.rates import MAX_RETRY_S, Meter, too_many

QUEUE_OF_ENGINE, LEAST_QUEUE = 4, 256
"""Requests that may wait, for each that the engine runs at once; and in all, at the least."""
QUEUE_WAIT_S = 60.0
"""Maximum predicted wait of a best-effort request, unless the options say another: with it a
client's own timeout, often one to ten minutes, leaves time for the answer."""
BEST_EFFORT_DEADLINE_WAITS = 10.0
"""Deadline of a best-effort request, in maximum waits: behind those of all objectives, and so far
away that a wrong forecast makes none late. One that is late would be overtaken by those that came
after it: with deadlines of one wait, p95 of the wait was 10.7 s where 4 s are allowed."""
QUEUE_BYTES = 128 * 1024**2
"""Bodies of requests that wait; a chat of 10,000 tokens has 40 kB."""
PUNCTUAL = 0.5
"""Under pressure, a request may wait this share of (objective − its own prefill). Predictions err,
and a late request that ages takes time from those in time; half is queue enough to keep every slot
busy (lab log, 2026-11-22)."""
LENIENT, LATENESS = 1.25, 2.0
"""Maximum wait as a multiple of the objective: normally; when it cannot be met even alone. A first
token that comes a little late is worth having (lab log, 2026-11-22)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the options say; None is derived: from the engine's size, or from the class."""

    max_queue: int | None = None
    max_queue_bytes: int = QUEUE_BYTES
    max_queue_wait_s: float | None = None
    max_long_queue: int = 32
    scheduler: SchedulerConfig = SchedulerConfig()
    order: QueueOrder = QueueOrder.DEADLINE
    """Of the engine's policy."""
    prefix_cache: bool = True

    @property
    def best_effort_s(self) -> float:
        """Seconds from arrival to the deadline of a request that asks for no objective."""
        return BEST_EFFORT_DEADLINE_WAITS * self.queue_wait_s

    @property
    def queue_wait_s(self) -> float:
        """The longest predicted wait of a request that asks for no objective."""
        return QUEUE_WAIT_S if self.max_queue_wait_s is None else self.max_queue_wait_s

    @property
    def sheds(self) -> bool:
        """Whether the engine refuses what can no longer be in time."""
        return self.scheduler.late == "shed"


class Admission:
    """The doorkeeper of one model's engines."""

    def __init__(self, clock: Clock, rules: Rules | None = None, num_engines: int = 1) -> None:
        self.clock = clock
        self.rules = rules or Rules()
        lane_share = self.rules.scheduler.lane_share
        self.lines = Lines(
            [
                Line(
                    Forecast(clock, order=self.rules.order, lane_share=lane_share),
                    Seen() if self.rules.prefix_cache else None,
                )
                for _ in range(num_engines)
            ]
        )
        self.num_admitted = 0
        """Tickets that are open: requests let in that are not over."""
        self._meters: dict[tuple[str, str], Meter] = {}
        self._refused = -inf, 0.0

    def arrive(
        self, caller: Caller, service_class: ServiceClass, num_rows: int, num_bytes: int = 0
    ) -> "Ticket":
        """Let a request into the queue before engines that run `num_rows` at once each.

        Its body has `num_bytes`. Raises RequestError 429 or OverloadedError.
        """
        user, name = caller.principal.name, service_class.name
        self._check_limits(caller, service_class)
        places = max(QUEUE_OF_ENGINE * num_rows * len(self.lines.of), LEAST_QUEUE)
        places = self.rules.max_queue or places
        self._find_room(user, service_class, places, "requests", lambda entry: entry.num_waiting)
        most = self.rules.max_queue_bytes
        self._find_room(user, service_class, most, "bytes", lambda entry: entry.num_bytes)
        meter = self._meter(caller, service_class)
        meter.enter()
        entry = QueueEntry(
            user=user,
            weight=caller.weight or service_class.weight,
            service_class=name,
            idle_only=service_class.idle_only,
            num_bytes=num_bytes,
        )
        self.lines.enter(entry)
        return Ticket(self, entry, caller, service_class, meter)

    def _check_limits(self, caller: Caller, service_class: ServiceClass) -> None:
        """Raise where as many requests of the key, or of the class, wait as its row allows."""
        own = caller.meter.limits.queue_requests
        if own is not None and self.lines.count(user=caller.principal.name) >= own:
            raise too_many(
                f"{own} requests of this key wait already.", self._next_s(), "key_queue_requests"
            )
        most, name = service_class.limits.queue_requests, service_class.name
        if most is not None and self.lines.count(service_class=name) >= most:
            raise self._full(
                f"{most} requests of the class {name} wait already.",
                "class_queue_requests",
                self._next_s(),
            )

    def _find_room(
        self,
        user: str,
        service_class: ServiceClass,
        most: int,
        unit: str,
        size: Callable[[QueueEntry], int],
    ) -> None:
        """Raise OverloadedError when the queue has `most` of `unit`, by `size` of each entry.

        Idle work fills no queue but its own. One user cannot fill it for the others: each may have
        its share of `most` by the number of users who wait, up to twice `most` in all; what one of
        them has beyond `most` does not count.
        """
        in_order = self.rules.order == QueueOrder.ARRIVAL
        counted = [
            entry
            for entry in self.lines.entries
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
        """What this user uses of the class's limits, where its key has none of its own."""
        own = caller.meter.limits
        limits = service_class.limits
        if own != UNLIMITED:
            names = Limits.__struct_fields__
            shadowed = {name: None for name in names if getattr(own, name) is not None}
            limits = msgspec.structs.replace(limits, **shadowed)
        whose = caller.principal.name, service_class.name
        meter = self._meters.get(whose)
        if meter is None or meter.limits != limits:
            who = f"Each user of the class {service_class.name}"
            meter = self._meters[whose] = Meter(limits, self.clock, who)
        return meter

    def _next_s(self) -> float:
        """Seconds until somebody who waits has a first token."""
        return min(
            forecast.backlog_s() / max(1, forecast.num_waiting)
            for forecast in (self.lines.of[n].forecast for n in self.lines.taking)
        )

    def _full(self, message: str, reason: str, wait_s: float) -> OverloadedError:
        wait_s = min(max(wait_s, 1.0), MAX_RETRY_S)
        return OverloadedError(message, reason=reason, retry_after_s=wait_s)

    def judge(
        self,
        entry: QueueEntry,
        service_class: ServiceClass,
        caller: Caller,
        slo: Slo,
        *,
        best_effort: bool = False,
    ) -> float:
        """Seconds until the first token; raises when that is beyond what may be waited.

        One that may be `best_effort` becomes so where it cannot be in time.
        """
        forecast, rules = self.lines.line_of(entry).forecast, self.rules
        own = forecast.tokens(entry) * forecast.alone_s
        entry.long = own > rules.scheduler.long_prefill_s
        if best_effort and forecast.count(user=entry.user, best_effort=True):
            self._queue(entry)
        wait_s = forecast.wait_s(entry)
        if not any(forecast.before(entry)):
            return wait_s
        longest = rules.max_long_queue
        if entry.long and self.lines.count(long=True) > longest:
            raise self._full(
                f"{longest} requests with long prompts wait already.", "long_queue", own
            )
        said_s = None if best_effort else rules.max_queue_wait_s
        bound_s, reason = self._bound_s(service_class, slo, own, forecast.has_late, said_s)
        if best_effort and wait_s > min(bound_s, rules.queue_wait_s):
            self._queue(entry)
            wait_s = forecast.wait_s(entry)
        bound_s = rules.queue_wait_s if entry.best_effort else bound_s
        self._check_wait(entry, caller, wait_s, bound_s, reason)
        return wait_s

    def _queue(self, entry: QueueEntry) -> None:
        """Serve a request that asks for no objective in the order of arrival."""
        entry.best_effort = True
        entry.due_s = entry.late_s = self.clock.now_s() + self.rules.best_effort_s

    def _check_wait(
        self, entry: QueueEntry, caller: Caller, wait_s: float, bound_s: float, reason: str
    ) -> None:
        """Raise where the key's row allows no such wait, 429, or the bound does not, 503."""
        key_s = caller.meter.limits.queue_seconds
        if key_s is not None and wait_s > key_s:
            raise too_many(
                f"The first token would take {wait_s:.1f} s; this key waits {key_s:g} s at most.",
                max(1.0, wait_s - key_s),
                "key_queue_seconds",
            )
        if wait_s <= bound_s:
            return
        if reason == "queue_seconds" and not entry.best_effort:
            self._refused = self.clock.now_s(), wait_s
        message = f"this exceeds the maximum queue wait of {bound_s:.1f} s."
        message = f"The first token would take {wait_s:.1f} s; {message}"
        raise self._full(message, reason, wait_s - bound_s)

    def _bound_s(
        self,
        service_class: ServiceClass,
        slo: Slo,
        own_s: float,
        has_late: bool,
        said_s: float | None,
    ) -> tuple[float, str]:
        """(maximum wait for the first token, the limit's name); its own prefill takes `own_s`.

        `said_s` is the option's, which holds whatever the objective is.
        An objective of 1.5 s under pressure: 1 s where the prompt takes 0.5 s, 3 s where that
        takes 2 s.
        """
        if service_class.limits.queue_seconds is not None:
            return service_class.limits.queue_seconds, "class_queue_seconds"
        if said_s is not None:
            return said_s, "queue_seconds"
        if slo.ttft_s is None:
            return inf, "queue_seconds"
        if own_s > slo.ttft_s:
            return LATENESS * slo.ttft_s, "queue_seconds"
        if not (has_late or self._refused_lately(slo.ttft_s)):
            return LENIENT * slo.ttft_s, "queue_seconds"
        return own_s + PUNCTUAL * (slo.ttft_s - own_s), "queue_seconds"

    def _refused_lately(self, given_s: float) -> bool:
        """Whether one was refused less than `given_s` ago; that one waits makes pressure as well.

        Refusals caused by a stricter class limit are ignored: the refused request must have
        faced a wait that would be refused here too.
        """
        at_s, wait_s = self._refused
        return self.clock.now_s() - at_s < given_s and wait_s > PUNCTUAL * given_s

    def check_integrity(self) -> None:
        """Counts of the queue and of the meters."""
        self.lines.check_integrity()
        assert sum(line.num_requests for line in self.lines.of) == self.num_admitted
        for meter in self._meters.values():
            assert meter.num_running >= 0
            if meter.tokens is not None:
                meter.tokens.check_integrity()


class Ticket:
    """One request that was let in, until `close`."""

    __slots__ = (
        *("_admission", "_caller", "_held", "_open", "_pages", "_service_class"),
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
        self._held = [0, 0]
        self._pages: list[list[int]] | None = None
        """By prompt, where they are known."""
        self._open = True
        admission.num_admitted += 1
        self.entry = entry
        self.meter = meter
        self.late = False
        """Whether its first token is predicted to come after its objective."""

    def measure(self, asked: AdmissionRequest) -> None:
        """Check what is known now that there are prompts; may shorten an answer of no given length.

        Raises RequestError.
        """
        limits = self._caller.meter.limits.over(self._service_class.limits)
        check_prompts(asked, limits.max_prompt_tokens)
        bound_answer(asked, limits.max_output_tokens)
        self._hold(asked)
        entry = self.entry
        entry.n, entry.answer = asked.sampling.n, longest_answer(asked)
        lines = self._admission.lines
        if lines.remember and asked.prompts is not None:
            self._pages = [pages_of(asked.salt, prompt) for prompt in asked.prompts]
        lines.place(entry, asked.lengths, self._pages)
        line = lines.line_of(entry)
        longest = round(max(asked.lengths) * line.forecast.uncached)
        if self._pages is not None:
            longest = max(entry.left.values())
        usual = self._service_class.objectives(longest)
        slo = asked.slo or usual
        given_s = inf if slo.ttft_s is None else slo.ttft_s
        entry.due_s = self._admission.clock.now_s() + given_s
        entry.late_s = max(entry.due_s, self._admission.clock.now_s() + (usual.ttft_s or 0.0))
        best_effort = self._service_class.best_effort and asked.slo is None
        wait_s = self._admission.judge(
            entry, self._service_class, self._caller, slo, best_effort=best_effort
        )
        self.late = isfinite(given_s) and wait_s > given_s and any(line.forecast.before(entry))

    def _hold(self, asked: AdmissionRequest) -> None:
        """Keep what it may take free of the minute's tokens of its key and its class."""
        meters = self._caller.meter, self.meter
        for meter in meters:
            if meter.tokens is not None:
                shorten_answers(asked, meter.tokens.per_minute)
        param = asked.answer_param or asked.prompt_param
        count = sum(asked.lengths) + max_output_tokens(asked)
        for index, meter in enumerate(meters):
            spare = self._caller.in_batch and meter is self._caller.meter
            self._held[index] = meter.hold(count, param, spare=spare)

    def terms(self, terms: Terms) -> Terms:
        """What the request carries into the engine: `terms` of its class, or as best effort."""
        if not self.entry.best_effort:
            return terms
        ttft_s = self._admission.rules.best_effort_s
        return msgspec.structs.replace(terms, ttft_s=ttft_s, ttft_per_token_s=0.0)

    @property
    def engine(self) -> int:
        """The engine that is to answer."""
        return self.entry.engine

    @property
    def _line(self) -> Line:
        return self._admission.lines.line_of(self.entry)

    def sent(self, number: int, engine_id: int) -> None:
        """One of its prompts goes to the engine."""
        self._line.forecast.sent(self.entry, number, engine_id)

    def began(self, number: int) -> None:
        """One of its prompts has its first token."""
        line = self._line
        line.forecast.began(self.entry, number)
        if line.seen is not None and self._pages is not None:
            line.seen.add(self._pages[number])

    def close(self, num_tokens: int = 0) -> None:
        """The request is over and took `num_tokens`; safe to call twice."""
        if not self._open:
            return
        self._open = False
        self._admission.num_admitted -= 1
        self._admission.lines.leave(self.entry)
        for meter, held in zip((self._caller.meter, self.meter), self._held, strict=True):
            meter.settle(held, num_tokens)
        self.meter.leave()
