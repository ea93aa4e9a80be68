"""Admission to an engine of four slots on a virtual clock, and requests for it."""

from dataclasses import replace
from typing import Any

from headway.admit.admission import Admission, Rules, Ticket
from headway.admit.lengths import AdmissionRequest
from headway.core.clock import VirtualClock
from headway.core.errors import OverloadedError, RequestError
from headway.core.principal import Principal
from headway.core.records import StepRecord
from headway.core.request import SamplingParams
from headway.core.service import KeyLimits, ServiceClass, service_classes
from headway.core.slo import Slo
from headway.edge.keys import Caller
from headway.edge.rates import Meter

TOKEN_S = 0.001
CLASSES = service_classes()
PLAIN, DEFAULT = CLASSES["interactive"], CLASSES["default"]


def step(prefill: int, seconds: float, **more: Any) -> StepRecord:
    """A step that computed so many prompt tokens."""
    pace_s = seconds / prefill if prefill else TOKEN_S
    given = {"started_s": 0.0, "execute_s": seconds, "num_tokens": prefill}
    given |= {"prefill_s_per_token": pace_s, "alone_s_per_token": pace_s, **more}
    return StepRecord(
        step=0, num_running=1, num_waiting=0, num_sampled=0, kv_blocks_used=0, kv_usage=0.0,
        num_preemptions=0, **given,
    )  # fmt: skip


class House:
    """Admission to an engine of four slots where a prompt token takes 1 ms."""

    def __init__(self, **rules: Any) -> None:
        self.clock = VirtualClock()
        self.admission = Admission(self.clock, Rules(**rules))
        self.forecast = self.admission.queues.by_engine[0].forecast
        for _ in range(10):
            self.forecast.on_record(step(100, 100 * TOKEN_S))
        self.ids = iter(range(1, 10**6))

    def caller(self, name: str = "alice", **limits: Any) -> Caller:
        return Caller(principal=Principal(name), meter=Meter(KeyLimits(**limits), self.clock))

    def arrive(
        self,
        row: ServiceClass = PLAIN,
        caller: Caller | None = None,
        num_slots: int = 4,
        num_bytes: int = 0,
    ) -> Ticket:
        return self.admission.arrive(caller or self.caller(), row, num_slots, num_bytes)

    def ask(
        self,
        prompt: int = 100,
        row: ServiceClass = PLAIN,
        caller: Caller | None = None,
        slo: Slo | None = None,
        **sampling: Any,
    ) -> Ticket:
        """Admit and send a request; raises RequestError."""
        ticket = self.arrive(row, caller)
        request = request_of(prompt, slo, **sampling)
        try:
            ticket.set_prompts(request)
        except RequestError:
            ticket.close()
            raise
        ticket.on_sent(0, next(self.ids))
        self.admission.check_integrity()
        return ticket


def request_of(prompt: int = 100, slo: Slo | None = None, **sampling: Any) -> AdmissionRequest:
    return request_with([prompt], slo, **sampling)


def request_with(lengths: list[int], slo: Slo | None = None, **sampling: Any) -> AdmissionRequest:
    given = sampling.get("max_tokens") is not None
    return AdmissionRequest(
        lengths=lengths,
        sampling=SamplingParams(**{"max_tokens": None, **sampling}),
        max_model_len=32_000,
        slo=slo,
        prompt_param="messages",
        answer_param="max_tokens" if given else None,
    )


def with_limits(**limits: Any) -> ServiceClass:
    return replace(PLAIN, limits=KeyLimits(**limits))


def full(caught: Any, reason: str) -> OverloadedError:
    error = caught.value
    assert (error.status, error.code, error.reason) == (503, "overloaded", reason)
    assert 1 <= error.retry_after_s <= 120
    return error
