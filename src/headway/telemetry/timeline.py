"""Timestamps of one request on the server's clock: arrival, first schedule, each sent token.

Example: arrived at 0, tokens sent at 2, at 3 and two together at 5: TTFT 2, gaps 1, 2, 0, e2e 5,
TPOT (5 − 2) / 3 = 1. The gaps add up to e2e − TTFT, and there is one less than tokens. All figures
of a request are derived from these timestamps.
"""

from array import array
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from headway.core.errors import RequestError
from headway.core.request_source import RequestSource
from headway.core.service import ServiceClass
from headway.core.slo import Slo
from headway.telemetry.formulas import p99
from headway.telemetry.goodput import DISCONNECTED, FAILED, MOVED, OK, EndedRequest, judge
from headway.telemetry.snapshot import LiveRequest
from headway.telemetry.windows import Slots


class Listener(Protocol):
    """Callbacks for the first token and the end of a request; other tokens have none."""

    def on_first_token(self, timeline: "RequestTimeline") -> None: ...

    def on_end(self, timeline: "RequestTimeline", ended: EndedRequest) -> None: ...


class RequestTimeline:
    """One HTTP request: its prompts, and the sequences (by choice) that answer them."""

    __slots__ = (
        *(
            "_listener",
            "_now_s",
            "_slots",
            "arrived_s",
            "cached_tokens",
            "computed",
            "ended",
            "error",
            "source",
        ),
        *(
            "first_s",
            "max_tokens",
            "n",
            "num_drafts",
            "num_forced",
            "num_kept_drafts",
            "num_preemptions",
            "num_prompt",
            "objectives",
            "parent",
            "preempted_after",
        ),
        *("last_prefill_s", "preempted_s", "published_s", "request_id", "scheduled_s"),
        *("service_class", "times"),
    )

    def __init__(
        self,
        now_s: Callable[[], float],
        slots: Slots,
        listener: Listener,
        *,
        request_id: str,
        arrived_s: float,
        num_prompt: int,
        num_choices: int,
        service_class: ServiceClass,
        slo: Slo | None = None,
        parent: str | None = None,
        source: RequestSource | None = None,
    ) -> None:
        self._now_s, self._slots, self._listener = now_s, slots, listener
        self.request_id = request_id
        self.arrived_s = arrived_s
        self.num_prompt = num_prompt
        self.service_class = service_class
        self.objectives = slo
        self.parent = parent
        """Trace context of the request (`traceparent`), for spans."""
        self.source = source
        """Origin of the request, for its log line."""
        self.n = 1
        self.max_tokens: int | None = None
        """Parameters of the request, for the metrics."""
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.published_s: float | None = None
        """Time at which the first text for the user was sent: no reasoning, no tool call."""
        self.last_prefill_s = self.preempted_s = 0.0
        """Times of the last step that computed its prompt, and of its last preemption."""
        self.cached_tokens = 0
        self.num_preemptions = self.preempted_after = 0
        self.num_drafts = self.num_kept_drafts = self.num_forced = 0
        """Draft tokens, accepted ones, and tokens forced by the grammar."""
        self.computed: dict[tuple[int, int], int] = {}
        self.times = [array("d") for _ in range(num_choices)]
        self.ended: EndedRequest | None = None
        self.error: RequestError | None = None
        """Error of a failed or refused request."""

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def on_scheduled(self, first_scheduled_s: float, num_cached_tokens: int) -> None:
        """Note the first step of one of the sequences, as reported by the engine."""
        if self.scheduled_s is None or first_scheduled_s < self.scheduled_s:
            self.scheduled_s = max(first_scheduled_s, self.arrived_s)
        self.cached_tokens += num_cached_tokens

    def on_preempted(self, num_made: int) -> None:
        """Note the preemption of a sequence that had generated `num_made` tokens."""
        self.num_preemptions += 1
        self.preempted_s, self.preempted_after = self._now_s(), num_made

    def add_tokens(self, choice: int, count: int) -> None:
        """Note that `count` tokens of a choice were sent now, in one piece."""
        if count == 0:
            return
        now_s = self._now_s()
        times = self.times[choice]
        gaps = self._slots.current.gaps.get(self.service_class.name)
        if gaps is None:
            gaps = self._slots.current.gaps[self.service_class.name] = array("d")
        if times:
            gaps.append(now_s - times[-1])
        else:
            self._slots.current.first_tokens += 1
            if self.first_s is None:
                self.first_s = now_s
                self._listener.on_first_token(self)
        times.append(now_s)
        for _ in range(count - 1):
            gaps.append(0.0)
            times.append(now_s)

    def on_publish(self) -> None:
        """Note that text for the user is sent now; only the first call counts."""
        if self.published_s is None:
            self.published_s = self._now_s()

    def end(self, outcome: str) -> None:
        """End the request with an outcome and judge it; only the first call counts."""
        if self.ended is not None:
            return
        now_s = self._now_s()
        last_s = max((times[-1] for times in self.times if times), default=now_s)
        e2e_s = (last_s if outcome == OK else now_s) - self.arrived_s
        slo, ttft_s, tpot_s = self.slo, self.ttft_s, self.tpot_s
        itl_p99_s = None if slo.itl_p99_s is None else p99(self.gaps())
        missed = judge(slo, outcome, ttft_s=ttft_s, tpot_s=tpot_s, itl_p99_s=itl_p99_s, e2e_s=e2e_s)
        self.ended = EndedRequest(
            service_class=self.service_class.name,
            outcome=outcome,
            ended_s=now_s,
            prompt_tokens=self.num_prompt,
            output_tokens=self.num_generated,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            itl_p99_s=itl_p99_s,
            e2e_s=e2e_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_time_s,
            missed=missed,
        )
        self._listener.on_end(self, self.ended)

    def complete(self) -> None:
        """End the request after all sequences finished."""
        self.end(OK)

    def fail(self) -> None:
        """End the request by a fault of the server."""
        self.end(FAILED)

    def move(self) -> None:
        """End the request here before anything was sent: the fallback model counts it."""
        self.end(MOVED)

    def disconnect(self) -> None:
        """End the request because its client disconnected."""
        self.end(DISCONNECTED)

    # ── derived figures ─────────────────────────────────────────────────────────────────────

    @property
    def slo(self) -> Slo:
        """Return the objectives of the request, or those of its class."""
        if self.objectives is not None:
            return self.objectives
        return self.service_class.objectives(self.num_prompt - self.cached_tokens)

    @property
    def num_generated(self) -> int:
        return sum(map(len, self.times))

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def publish_s(self) -> float | None:
        """Return the time to the first text for the user; None for tool calls alone."""
        return None if self.published_s is None else self.published_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrived_s

    @property
    def prefill_time_s(self) -> float | None:
        """Return first token − first scheduled."""
        if self.first_s is None or self.scheduled_s is None:
            return None
        return max(self.first_s - self.scheduled_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Return (last − first) / (n − 1) of the slowest sequence; None below two tokens."""
        values = [(t[-1] - t[0]) / (len(t) - 1) for t in self.times if len(t) > 1]
        return max(values, default=None)

    def gaps(self) -> np.ndarray:
        """Return all gaps between consecutive tokens, sequence by sequence."""
        parts = [np.diff(np.frombuffer(times)) for times in self.times if len(times) > 1]
        return np.concatenate(parts) if parts else np.empty(0)

    def timings(self) -> dict[str, Any]:
        """Return `timings` of an answer (`timings: true`), in seconds.

        Draft tokens and forced tokens are included only where there were some.
        """
        drafts = {"draft_n": self.num_drafts, "draft_n_accepted": self.num_kept_drafts}
        last_s = max((times[-1] for times in self.times if times), default=self.arrived_s)
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_time_s,
            "ttft_s": self.ttft_s,
            "publish_s": self.publish_s,
            "tpot_s": self.tpot_s,
            "e2e_s": last_s - self.arrived_s,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.num_preemptions,
            **(drafts if self.num_drafts else {}),
            **({"jump_forward_n": self.num_forced} if self.num_forced else {}),
        }

    def state(self) -> str:
        """Return waiting, prefill, decode or preempted.

        Tokens generated before a preemption are sent after its notice, so their number is compared.
        `scheduled_s` arrives with the first token, prefill chunks of a long prompt before it.
        """
        if (
            self.preempted_s > self.last_prefill_s
            and max(map(len, self.times)) <= self.preempted_after
        ):
            return "preempted"
        last_s = max((times[-1] for times in self.times if times), default=0.0)
        if last_s > self.last_prefill_s:
            return "decode"
        started = self.scheduled_s is not None or self.last_prefill_s > 0
        return "prefill" if started else "waiting"

    def live(self, now_s: float) -> LiveRequest:
        """Return the request as listed in `/stats`."""
        started = self.first_s is not None
        computed = self.num_prompt if started else min(sum(self.computed.values()), self.num_prompt)
        return LiveRequest(
            id=self.request_id,
            service_class=self.service_class.name,
            age_s=now_s - self.arrived_s,
            state=self.state(),
            num_sequences=len(self.times),
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            computed_tokens=computed + sum(len(times) - 1 for times in self.times if times),
            generated_tokens=self.num_generated,
            ttft_s=self.ttft_s,
            num_preemptions=self.num_preemptions,
        )
