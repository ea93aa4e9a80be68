"""When one request arrived, was scheduled, and each of its tokens left, on the server's clock.

Worked example, arrived at 0, tokens leave at 2, 3 and two together at 5: TTFT 2, gaps 1, 2, 0,
e2e 5, TPOT (5 − 2) / 3 = 1; the gaps add up to e2e − TTFT and there is one less than tokens. All
that is reported later is derived from these timestamps.
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
from headway.telemetry.goodput import FAILED, LEFT, MOVED, OK, Ended, judge
from headway.telemetry.snapshot import LiveRequest
from headway.telemetry.windows import Slots


class Listener(Protocol):
    """Who is told of a request's turning points; every other token goes by unheard."""

    def on_first_token(self, timeline: "Timeline") -> None: ...

    def on_end(self, timeline: "Timeline", ended: Ended) -> None: ...


class Timeline:
    """One HTTP request: its prompts, and the sequences that answer them, told apart by choice."""

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
        *("preempted_s", "prefill_s", "published_s", "request_id", "scheduled_s"),
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
        """The trace context that came with the request, for spans."""
        self.source = source
        """Where it came from, for its line in the log."""
        self.n = 1
        self.max_tokens: int | None = None
        """What the request asked for, for the metrics."""
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.published_s: float | None = None
        """When the first text for the user left, neither reasoning nor a tool call."""
        self.prefill_s = self.preempted_s = 0.0
        self.cached_tokens = 0
        self.num_preemptions = self.preempted_after = 0
        self.num_drafts = self.num_kept_drafts = self.num_forced = 0
        """Guesses of its tokens, those that were right, and tokens that its grammar forced."""
        self.computed: dict[tuple[int, int], int] = {}
        self.times = [array("d") for _ in range(num_choices)]
        self.ended: Ended | None = None
        self.error: RequestError | None = None
        """Why it failed or was refused."""

    # ── as it happens ───────────────────────────────────────────────────────────────────────

    def scheduled(self, first_scheduled_s: float, num_cached_tokens: int) -> None:
        """One of its sequences was in a step for the first time, as the engine tells."""
        if self.scheduled_s is None or first_scheduled_s < self.scheduled_s:
            self.scheduled_s = max(first_scheduled_s, self.arrived_s)
        self.cached_tokens += num_cached_tokens

    def preempted(self, num_made: int) -> None:
        """One of its sequences was sent back to the queue when it had made so many tokens."""
        self.num_preemptions += 1
        self.preempted_s, self.preempted_after = self._now_s(), num_made

    def tokens_left(self, choice: int, count: int) -> None:
        """`count` tokens of a choice left now, in one piece."""
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

    def published(self) -> None:
        """Text for the user leaves now; only the first call counts."""
        if self.published_s is None:
            self.published_s = self._now_s()

    def end(self, outcome: str) -> None:
        """The request is over; only the first call counts."""
        if self.ended is not None:
            return
        now_s = self._now_s()
        last_s = max((times[-1] for times in self.times if times), default=now_s)
        e2e_s = (last_s if outcome == OK else now_s) - self.arrived_s
        slo, ttft_s, tpot_s = self.slo, self.ttft_s, self.tpot_s
        itl_p99_s = None if slo.itl_p99_s is None else p99(self.gaps())
        missed = judge(slo, outcome, ttft_s=ttft_s, tpot_s=tpot_s, itl_p99_s=itl_p99_s, e2e_s=e2e_s)
        self.ended = Ended(
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
        """Every sequence came to its end."""
        self.end(OK)

    def failed(self) -> None:
        """It ended by our own fault."""
        self.end(FAILED)

    def moved(self) -> None:
        """It was given up before anything was sent: whoever takes it, or refuses it, counts it."""
        self.end(MOVED)

    def left(self) -> None:
        """The client went away."""
        self.end(LEFT)

    # ── what follows from it ────────────────────────────────────────────────────────────────

    @property
    def slo(self) -> Slo:
        """Its own objectives, or those of its class."""
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
        """Time to publish: TTFT, but without reasoning and tool calls; None for a call alone."""
        return None if self.published_s is None else self.published_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrived_s

    @property
    def prefill_time_s(self) -> float | None:
        """First token − first scheduled."""
        if self.first_s is None or self.scheduled_s is None:
            return None
        return max(self.first_s - self.scheduled_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """(last − first) / (n − 1); of several sequences the slowest one's."""
        found = [(t[-1] - t[0]) / (len(t) - 1) for t in self.times if len(t) > 1]
        return max(found, default=None)

    def gaps(self) -> np.ndarray:
        """Every gap between consecutive tokens of one sequence."""
        parts = [np.diff(np.frombuffer(times)) for times in self.times if len(times) > 1]
        return np.concatenate(parts) if parts else np.empty(0)

    def timings(self) -> dict[str, Any]:
        """What `timings: true` puts into the answer; seconds. Drafts and forced tokens where there
        were some."""
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
        """waiting, prefill, decode or preempted; tokens made before leave after the news of it.

        `scheduled_s` comes with the first token; the chunks of a long prompt are told before.
        """
        if self.preempted_s > self.prefill_s and max(map(len, self.times)) <= self.preempted_after:
            return "preempted"
        last_s = max((times[-1] for times in self.times if times), default=0.0)
        if last_s > self.prefill_s:
            return "decode"
        started = self.scheduled_s is not None or self.prefill_s > 0
        return "prefill" if started else "waiting"

    def live(self, now_s: float) -> LiveRequest:
        """The request as `/stats` lists it."""
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
