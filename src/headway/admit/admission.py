"""Who is let in: limits of a key and of a class, and of what the server can promise.

The server decides by itself, without a word to the engine, so a refusal comes at once. What needs
no prompt is asked before the prompt is rendered, the rest before it is sent:

    arrive    requests at once and per minute, requests in the queue          429, 503
    measure   length of prompt and answer, tokens per minute                  400, 429
              seconds until the first token, long jobs in the queue           503

429 is the caller's own limit, 503 the server being full. A server that has nobody waiting refuses
nobody for load, whatever it predicts.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import inf, isfinite

import msgspec

from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.lines import Line, Lines
from headway.admit.queue import QueueOrder
from headway.admit.seen import Seen, pages_of
from headway.core.clock import Clock
from headway.core.errors import OverloadedError, RequestError
from headway.core.request import SamplingParams
from headway.core.scheduler_config import SchedulerConfig
from headway.core.service import UNLIMITED, Limits, ServiceClass
from headway.core.slo import Slo
from headway.edge.keys import Caller
from headway.edge.rates import MAX_RETRY_S, Meter, too_many

QUEUE_OF_ENGINE = 4
"""Requests that may wait, for each that the engine runs at once."""
PUNCTUAL = 0.5
"""Under pressure, a request may wait this share of (objective − its own prefill). Predictions err,
and a late request that ages takes time from those in time; half is queue enough to keep every slot
busy (lab log, 2026-11-22)."""
LENIENT, LATENESS = 1.25, 2.0
"""Maximum wait as a multiple of the objective: normally; when it cannot be met even alone. A first
token that comes a little late is worth having (lab log, 2026-11-22)."""
UNKNOWN_ANSWER = 256
"""Tokens that an answer of no given length is held as, of a minute's worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the options say; None is derived: from the engine's size, or from the class."""

    max_queue: int | None = None
    max_queue_wait_s: float | None = None
    max_long_queue: int = 32
    scheduler: SchedulerConfig = SchedulerConfig()
    order: QueueOrder = QueueOrder.DEADLINE
    """Of the engine's policy."""
    prefix_cache: bool = True

    @property
    def sheds(self) -> bool:
        """Whether the engine refuses what can no longer be in time."""
        return self.scheduler.late == "shed"


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants, once its prompts are encoded.

    `prompt_param` and `answer_param` are the client's names for them; the second is None where it
    left the length of the answer to us.
    """

    lengths: list[int]
    sampling: SamplingParams
    max_model_len: int
    prompts: list[list[int]] | None = None
    salt: str = ""
    slo: Slo | None = None
    prompt_param: str = "prompt"
    answer_param: str | None = None


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

    def follow(self, scheduler: SchedulerConfig) -> None:
        """The engines schedule by these settings from now on."""
        self.rules = replace(self.rules, scheduler=scheduler)
        for line in self.lines.of:
            line.forecast.lane_share = scheduler.lane_share

    def arrive(self, caller: Caller, service_class: ServiceClass, num_rows: int) -> "Ticket":
        """Let a request into the queue before engines that run `num_rows` at once each.

        Raises RequestError 429 or OverloadedError.
        """
        user, name = caller.principal.name, service_class.name
        limits = service_class.limits
        own = caller.meter.limits.queue_requests
        if own is not None and self.lines.count(user=user) >= own:
            raise too_many(
                f"{own} requests of this key wait already.", self._next_s(), "key_queue_requests"
            )
        most = limits.queue_requests
        if most is not None and self.lines.count(service_class=name) >= most:
            raise self._full(
                f"{most} requests of the class {name} wait already.",
                "class_queue_requests",
                self._next_s(),
            )
        places = QUEUE_OF_ENGINE * num_rows * len(self.lines.of)
        self._find_room(user, service_class, self.rules.max_queue or places)
        meter = self._meter(caller, service_class)
        meter.enter()
        entry = QueueEntry(
            user=user,
            weight=caller.weight or service_class.weight,
            service_class=name,
            idle_only=service_class.idle_only,
        )
        self.lines.enter(entry)
        return Ticket(self, entry, caller, service_class, meter)

    def _find_room(self, user: str, service_class: ServiceClass, most: int) -> None:
        """Raise OverloadedError when the queue of `most` is full.

        Idle work fills no queue but its own. One user cannot fill it for the others: each may have
        its share of the places, `most` by the number of users who wait, up to twice `most` in all;
        what one of them has beyond `most` does not count.
        """
        in_order = self.rules.order == QueueOrder.ARRIVAL
        counted = [
            entry
            for entry in self.lines.entries
            if in_order or service_class.idle_only or not entry.idle_only
        ]
        if sum([entry.num_waiting for entry in counted]) < most:
            return
        users = Counter({user: 0})
        for entry in counted:
            users[entry.user] += entry.num_waiting
        share = most / len(users)
        waiting = sum(min(count, most) for count in users.values())
        if in_order or users[user] >= share or waiting >= 2 * most:
            raise self._full(f"{most} requests wait already.", "queue_requests", self._next_s())

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
        self, entry: QueueEntry, service_class: ServiceClass, caller: Caller, slo: Slo
    ) -> float:
        """Seconds until the first token; raises when that is beyond what may be waited."""
        forecast, rules = self.lines.line_of(entry).forecast, self.rules
        own = forecast.tokens(entry) * forecast.alone_s
        entry.long = own > rules.scheduler.long_prefill_s
        wait_s = forecast.wait_s(entry)
        if not any(forecast.before(entry)):
            return wait_s
        longest = rules.max_long_queue
        if entry.long and self.lines.count(long=True) > longest:
            raise self._full(
                f"{longest} requests with long prompts wait already.", "long_queue", own
            )
        key_s = caller.meter.limits.queue_seconds
        if key_s is not None and wait_s > key_s:
            raise too_many(
                f"The first token would take {wait_s:.1f} s; this key waits {key_s:g} s at most.",
                max(1.0, wait_s - key_s),
                "key_queue_seconds",
            )
        bound_s, reason = self._bound_s(service_class, slo, own, forecast.has_late)
        if wait_s > bound_s:
            if reason == "queue_seconds":
                self._refused = self.clock.now_s(), wait_s
            raise self._full(
                f"The first token would take {wait_s:.1f} s; this exceeds the maximum queue wait "
                f"of {bound_s:.1f} s.",
                reason,
                wait_s - bound_s,
            )
        return wait_s

    def _bound_s(
        self, service_class: ServiceClass, slo: Slo, own_s: float, has_late: bool
    ) -> tuple[float, str]:
        """(maximum wait for the first token, the limit's name); its own prefill takes `own_s`.

        An objective of 1.5 s under pressure: 1 s where the prompt takes 0.5 s, 3 s where that
        takes 2 s.
        """
        if service_class.limits.queue_seconds is not None:
            return service_class.limits.queue_seconds, "class_queue_seconds"
        if self.rules.max_queue_wait_s is not None:
            return self.rules.max_queue_wait_s, "queue_seconds"
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
        wait_s = self._admission.judge(entry, self._service_class, self._caller, slo)
        self.late = isfinite(given_s) and wait_s > given_s and any(line.forecast.before(entry))

    def _hold(self, asked: AdmissionRequest) -> None:
        """Keep what it may cost free of the minute's tokens of its key and its class."""
        sampling = asked.sampling
        answers = len(asked.lengths) * sampling.n
        given = asked.answer_param is not None
        longest = longest_answer(asked)
        param = asked.answer_param or asked.prompt_param
        for index, meter in enumerate((self._caller.meter, self.meter)):
            spare = self._caller.in_batch and meter is self._caller.meter
            self._held[index] = meter.hold(
                sum(asked.lengths), answers * longest, given, param, spare=spare
            )

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


def check_prompts(asked: AdmissionRequest, most: int | None) -> None:
    """Raise RequestError when a prompt is longer than `most`."""
    longest = max(asked.lengths)
    if most is not None and longest > most:
        raise RequestError(
            f"The prompt has {longest} tokens; max_prompt_tokens is {most} here. Shorten it.",
            param=asked.prompt_param,
            code="context_length_exceeded",
            reason="max_prompt_tokens",
        )


def longest_answer(asked: AdmissionRequest) -> int:
    """Tokens of an answer at most; where the client gave no length, what it is taken to be."""
    left = asked.max_model_len - max(asked.lengths)
    return asked.sampling.max_tokens or min(UNKNOWN_ANSWER, left)


def bound_answer(asked: AdmissionRequest, most: int | None) -> None:
    """Raise RequestError when the answer asked for is longer than `most`; cut one not asked for."""
    if most is None:
        return
    sampling = asked.sampling
    wanted = sampling.max_tokens
    if asked.answer_param is not None and wanted is not None and wanted > most:
        raise RequestError(
            f"{asked.answer_param} is {wanted}; max_output_tokens is {most} here. Lower it.",
            param=asked.answer_param,
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    left = max(1, asked.max_model_len - max(asked.lengths))
    longest = min(most, left) if wanted is None else min(wanted, most)
    if sampling.min_tokens > longest:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; max_output_tokens is {most} here, and the "
            f"context has room for {left}. Lower it.",
            param="min_tokens",
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    sampling.max_tokens = longest
