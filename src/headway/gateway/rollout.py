"""Rollout of a new version: a growing share of requests, up to all of them, or back to none.

    copies ─► 1% ─► 5% ─► 25% ─► 50% ─► promoted     each step: `requests` judged in both arms
       └───────┴─────┴──────┴─────┴──► rolled back   once a guard's evidence passes 1 / its alpha

Five guards compare the canary with the control, each by the frequency of a bad event (`evidence`):
errors; goodput (missed objectives, or without objectives an answer token slower than 1.5 times the
control's median); validity; quality (outcomes of tasks); cost (above 1.5 times the median). They
share `alpha`, the probability of rolling back a version that is no worse. An unknown value counts
for no arm: it neither rolls back nor completes a step. With a `target` no step ends while both arms
together burn the model's error budget (`burn`).
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import msgspec

from headway.core.clock import Clock
from headway.core.slo import Slo
from headway.gateway.burn import ErrorBudget, Minute
from headway.gateway.config import RolloutRow
from headway.gateway.evidence import CanaryEvidence

ALPHA_SHARES = {"errors": 0.6, "goodput": 0.15, "validity": 0.05, "quality": 0.15, "cost": 0.05}
RUNNING = ("shadow", "canary")
COPY_GUARDS = ("errors", "validity", "cost")
"""Guards that copies can feed; a copy has no client whose objectives it could miss."""
MAX_EVIDENCE_AT_STEP_END = 1.0
"""Maximum evidence of each guard at the end of a step."""
MEDIAN_MULTIPLE = 1.5
"""Multiple of the control's median from which on a request is slow or expensive."""
MEDIAN_WINDOW, MIN_MEDIAN_SAMPLES = 200, 20
MAX_TASKS = 10_000
REQUESTS_PER_SAVE = 5
"""Requests between two saves of the evidence: a kill loses fewer."""


class ArmSample(NamedTuple):
    """Result of one request for its arm; None is unknown."""

    error: bool | None = None
    missed: bool | None = None
    """Whether it missed an objective."""
    token_s: float | None = None
    """Seconds per answer token."""
    invalid: bool | None = None
    wrong: bool | None = None
    dollars: float | None = None


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """New state of a rollout, as the ledger records it."""

    state: str
    step: int
    reason: str


class RolloutState(msgspec.Struct, kw_only=True):
    """Saved state of a rollout; `known` are the judged requests of the step in each arm."""

    state: str
    step: int
    known: dict[str, list[int]]
    evidence: dict[str, CanaryEvidence]
    minutes: list[Minute] = []
    """Minutes of the error budget."""


class Rollout:
    """One rollout: in shadow, canary, promoted or rolled back; `on_change` gets each change."""

    def __init__(
        self,
        row: RolloutRow,
        slo: Slo | None,
        on_change: Callable[[RolloutChange], None] | None = None,
        on_save: Callable[[bytes], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.row = row
        self.slo = slo
        self.budget = ErrorBudget(row.target, clock) if row.target else None
        self.state = "shadow" if row.shadow else "canary"
        self.step, self.reason = 0, ""
        self.evidence = {name: CanaryEvidence(self.bound(name)) for name in ALPHA_SHARES}
        self._on_change = on_change or (lambda change: None)
        self._on_save = on_save or (lambda data: None)
        self._num_added = 0
        self._known = {name: [0, 0] for name in ALPHA_SHARES}
        """Guard → judged requests of this step, in the control and in the canary."""
        self._medians: dict[str, deque[float]] = {
            name: deque(maxlen=MEDIAN_WINDOW) for name in ("goodput", "cost")
        }
        self._tasks: OrderedDict[tuple[str, str], bool] = OrderedDict()

    # ── assignment ──────────────────────────────────────────────────────────────────────────

    @property
    def share(self) -> float:
        """Return the canary's share of the requests."""
        if self.state == "canary":
            return self.row.steps[self.step] / 100
        return 1.0 if self.state == "promoted" else 0.0

    def is_canary(self, identity: str) -> bool:
        """Return whether the canary answers this identity; as the share grows, members stay."""
        digest = hashlib.sha256(f"{self.row.name}\0{identity}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.share * 2**64

    def is_copied(self, request_id: str) -> bool:
        """Return whether the canary gets a copy of this request."""
        digest = hashlib.sha256(f"{self.row.name}\0copy\0{request_id}".encode()).digest()
        copied = int.from_bytes(digest[:8]) < self.row.shadow / 100 * 2**64
        return self.state == "shadow" and copied

    def record_task(self, owner: str, task: str, canary: bool) -> None:
        """Remember the arm of a task until its outcome is reported."""
        self._tasks[owner, task] = canary
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)

    def add_outcome(self, owner: str, task: str, success: bool) -> None:
        """Add the outcome of a task; only the first one counts."""
        canary = self._tasks.pop((owner, task), None)
        if canary is not None:
            self.add(canary, ArmSample(wrong=not success))

    # ── decisions ───────────────────────────────────────────────────────────────────────────

    def add(self, canary: bool, sample: ArmSample) -> None:
        """Add a request of an arm: roll back, advance or stay."""
        if self.state not in RUNNING:
            return
        self._add(canary, sample)
        self._num_added += 1
        if self._num_added % REQUESTS_PER_SAVE == 0 or self.state not in RUNNING:
            self._on_save(self.encode_state())

    def _add(self, canary: bool, sample: ArmSample) -> None:
        slow = sample.missed
        if self.budget is not None and slow is not None:
            self.budget.add(slow)
        if slow is None and self.slo is None:
            slow = self._is_more("goodput", canary, sample.token_s)
        events = {
            "errors": sample.error,
            "goodput": slow,
            "validity": sample.invalid,
            "quality": sample.wrong,
            "cost": self._is_more("cost", canary, sample.dollars),
        }
        for name, bad in events.items():
            if bad is None:
                continue
            self.evidence[name].add(canary, bad)
            self._known[name][canary] += 1
            if self.evidence[name].value >= self.bound(name):
                self._roll_back(name)
                return
        if self._is_step_over():
            self._advance()

    def bound(self, guard: str) -> float:
        """Return the evidence at which this guard rolls back."""
        return 1 / (self.row.alpha * ALPHA_SHARES[guard])

    def _is_more(self, name: str, canary: bool, value: float | None) -> bool | None:
        """Return whether a value is far above the median of the control's values before it."""
        if value is None:
            return None
        samples = self._medians[name]
        bad = (
            value > MEDIAN_MULTIPLE * median(samples)
            if len(samples) >= MIN_MEDIAN_SAMPLES
            else None
        )
        if not canary:
            samples.append(value)
        return bad

    def _is_step_over(self) -> bool:
        """Return whether both arms have enough judged requests, no guard suspects the canary, and
        the error budget does not burn."""
        enough = all(min(self._known[name]) >= self.row.requests for name in self._needs)
        leans = any(each.value > MAX_EVIDENCE_AT_STEP_END for each in self.evidence.values())
        return enough and not leans and not self._alert_text()

    def _alert_text(self) -> str:
        return "" if self.budget is None else self.budget.alert_text()

    @property
    def _needs(self) -> list[str]:
        """Return the guards that need enough judged requests before this step ends."""
        if self.state != "shadow":
            return list(self.row.needs)
        return [name for name in COPY_GUARDS if name in ("errors", *self.row.needs)]

    def _advance(self) -> None:
        for counts in self._known.values():
            counts[:] = [0, 0]
        if self.state == "shadow":
            self.state = "canary"
            self._tell(f"{self.row.requests} copies at the canary are no worse")
        elif self.step + 1 < len(self.row.steps):
            self.step += 1
            self._tell(f"{self.row.requests} requests of the canary are no worse")
        else:
            self.state = "promoted"
            self._tell("no guard speaks against it")

    def _roll_back(self, guard: str) -> None:
        self.state = "rolled back"
        sums = self.evidence[guard].sums
        self._tell(
            f"{guard}: {sums.canary_bad} of {sums.canary} bad in the canary, "
            f"{sums.control_bad} of {sums.control} in the control"
        )

    def _tell(self, reason: str) -> None:
        self.reason = reason
        self._on_change(RolloutChange(self.state, self.step, reason))

    # ── persistence and reporting ───────────────────────────────────────────────────────────

    def set_by_operator(self, state: str, reason: str) -> None:
        """Set the state by an operator's decision: promoted or rolled back."""
        assert state in ("promoted", "rolled back")
        self.state = state
        self._tell(f"by hand: {reason}" if reason else "by hand")

    def restore(self, state: str, step: int, reason: str, data: bytes | None = None) -> None:
        """Continue from the state and the evidence that the ledger has of this version."""
        self.state, self.reason = state, reason
        self.step = min(step, len(self.row.steps) - 1)
        if data is None:
            return
        previous = msgspec.json.decode(data, type=RolloutState)
        self.evidence |= {
            name: each for name, each in previous.evidence.items() if name in ALPHA_SHARES
        }
        if self.budget is not None:
            self.budget.minutes.extend(previous.minutes)
        for name, each in self.evidence.items():
            each.bound = self.bound(name)
        if (previous.state, previous.step) == (state, step):
            self._known |= {n: each for n, each in previous.known.items() if n in ALPHA_SHARES}

    def encode_state(self) -> bytes:
        """Return the evidence and the progress of this step, for `restore`."""
        minutes = [] if self.budget is None else list(self.budget.minutes)
        return msgspec.json.encode(
            RolloutState(
                state=self.state,
                step=self.step,
                known=self._known,
                evidence=self.evidence,
                minutes=minutes,
            )
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the rollout's part of `/stats`."""
        alert_text = self._alert_text() if self.state in RUNNING else ""
        waits = [name for name in self._needs if min(self._known[name]) < self.row.requests]
        return {
            "name": self.row.name,
            "version": self.row.version,
            "model": self.row.model,
            "canary": list(self.row.canary),
            "state": self.state,
            "share": self.share,
            "reason": self.reason,
            "waits_for": waits + ["budget"] * bool(alert_text) if self.state in RUNNING else [],
            "burns": alert_text,
            "guards": {
                name: {
                    "evidence": each.value,
                    "bound": self.bound(name),
                    "canary": [each.sums.canary_bad, each.sums.canary],
                    "control": [each.sums.control_bad, each.sums.control],
                }
                for name, each in self.evidence.items()
            },
        }

    def check_integrity(self) -> None:
        """Check that an ended rollout has a reason, and that evidence at its bound ended it."""
        assert self.state in (*RUNNING, "promoted", "rolled back")
        assert 0 <= self.step < len(self.row.steps) and 0 <= self.share <= 1
        if self.budget is not None:
            self.budget.check_integrity()
        for name, each in self.evidence.items():
            each.check_integrity()
            assert self.state not in RUNNING or each.value < self.bound(name)
        assert self.state in RUNNING or self.reason
