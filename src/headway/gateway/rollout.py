"""A new version beside the old one: some requests, more of them, all of them, or none again.

    copies ─► 1% ─► 5% ─► 25% ─► 50% ─► promoted     each step: `requests` of both, with data
       └───────┴─────┴──────┴─────┴──► rolled back   once a guard's evidence passes 1 / its alpha

Five guards compare the canary with the control at the same time, each by how often something bad
happens (`evidence`): errors; goodput (objectives missed, or without any an answer token slower
than half more than the control's median); validity; quality (outcomes of tasks); cost (dearer than
half more than the median). They share `alpha`, the chance that a version which is no worse is ever
rolled back. What is not known counts for nobody: it neither rolls back nor lets a step end. With a
`target` no step ends while both arms together burn the model's error budget (`burn`).
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
from headway.gateway.evidence import Evidence

ALPHA_SHARES = {"errors": 0.6, "goodput": 0.15, "validity": 0.05, "quality": 0.15, "cost": 0.05}
RUNNING = ("shadow", "canary")
COPIES_TELL = ("errors", "validity", "cost")
"""Guards that know copies; a copy has no client whose objectives it could miss."""
LEANING = 1.0
"""A step does not end while a guard's evidence is above this."""
MORE = 1.5
"""So many times the control's median is slow, or dear."""
MEDIAN_OF, MEDIAN_LEAST = 200, 20
MAX_TASKS = 10_000
REQUESTS_PER_SAVE = 5
"""Requests after which the evidence is written down: a kill costs fewer."""


class Sample(NamedTuple):
    """What one request says of its arm; None is not known."""

    error: bool | None = None
    missed: bool | None = None
    """Whether it missed an objective."""
    token_s: float | None = None
    """Seconds an answer token took."""
    invalid: bool | None = None
    wrong: bool | None = None
    dollars: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The rollout is in another state: what the ledger keeps of it."""

    state: str
    step: int
    reason: str


class RolloutState(msgspec.Struct, kw_only=True):
    """What a restart goes on from; `known` are the requests of the step in each arm."""

    state: str
    step: int
    known: dict[str, list[int]]
    evidence: dict[str, Evidence]
    minutes: list[Minute] = []
    """Of the error budget."""


class Rollout:
    """One rollout: in shadow, canary, promoted or rolled back; `on_change` hears of each step."""

    def __init__(
        self,
        row: RolloutRow,
        slo: Slo | None,
        on_change: Callable[[Change], None] | None = None,
        on_save: Callable[[bytes], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.row = row
        self.slo = slo
        self.budget = ErrorBudget(row.target, clock) if row.target else None
        self.state = "shadow" if row.shadow else "canary"
        self.step, self.reason = 0, ""
        self.evidence = {name: Evidence(self.bound(name)) for name in ALPHA_SHARES}
        self._on_change = on_change or (lambda change: None)
        self._on_save = on_save or (lambda data: None)
        self._num_added = 0
        self._known = {name: [0, 0] for name in ALPHA_SHARES}
        """Requests of this step that say something: of the control, of the canary."""
        self._medians: dict[str, deque[float]] = {
            name: deque(maxlen=MEDIAN_OF) for name in ("goodput", "cost")
        }
        self._tasks: OrderedDict[tuple[str, str], bool] = OrderedDict()

    # ── who is asked ────────────────────────────────────────────────────────────────────────

    @property
    def share(self) -> float:
        """The canary's share of the requests."""
        if self.state == "canary":
            return self.row.steps[self.step] / 100
        return 1.0 if self.state == "promoted" else 0.0

    def takes(self, identity: str) -> bool:
        """Whether the canary answers this one: the same until the share changes, and while it
        grows who is in it stays in it."""
        digest = hashlib.sha256(f"{self.row.name}\0{identity}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.share * 2**64

    def copies(self, request_id: str) -> bool:
        """Whether the canary is sent a copy of this request."""
        digest = hashlib.sha256(f"{self.row.name}\0copy\0{request_id}".encode()).digest()
        copied = int.from_bytes(digest[:8]) < self.row.shadow / 100 * 2**64
        return self.state == "shadow" and copied

    def note_task(self, owner: str, task: str, canary: bool) -> None:
        """Remember which arm works at a task, until its outcome is told."""
        self._tasks[owner, task] = canary
        while len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)

    def judged(self, owner: str, task: str, success: bool) -> None:
        """The outcome of a task; the first one counts."""
        canary = self._tasks.pop((owner, task), None)
        if canary is not None:
            self.add(canary, Sample(wrong=not success))

    # ── what is seen ────────────────────────────────────────────────────────────────────────

    def add(self, canary: bool, sample: Sample) -> None:
        """A request of an arm has ended: go back, go on or stay."""
        if self.state not in RUNNING:
            return
        self._add(canary, sample)
        self._num_added += 1
        if self._num_added % REQUESTS_PER_SAVE == 0 or self.state not in RUNNING:
            self._on_save(self.encode_state())

    def _add(self, canary: bool, sample: Sample) -> None:
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
                self._go_back(name)
                return
        if self._is_step_over():
            self._go_on()

    def bound(self, guard: str) -> float:
        """The evidence at which this guard rolls back."""
        return 1 / (self.row.alpha * ALPHA_SHARES[guard])

    def _is_more(self, name: str, canary: bool, value: float | None) -> bool | None:
        """Whether a value is far above the median of the control's before it."""
        if value is None:
            return None
        samples = self._medians[name]
        bad = value > MORE * median(samples) if len(samples) >= MEDIAN_LEAST else None
        if not canary:
            samples.append(value)
        return bad

    def _is_step_over(self) -> bool:
        """Whether both arms have told enough of all that is needed, nothing leans and the error
        budget does not burn."""
        enough = all(min(self._known[name]) >= self.row.requests for name in self._needs)
        leans = any(each.value > LEANING for each in self.evidence.values())
        return enough and not leans and not self._burns()

    def _burns(self) -> str:
        return "" if self.budget is None else self.budget.burns()

    @property
    def _needs(self) -> list[str]:
        """The guards that must have been told enough before this step ends."""
        if self.state != "shadow":
            return list(self.row.needs)
        return [name for name in COPIES_TELL if name in ("errors", *self.row.needs)]

    def _go_on(self) -> None:
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

    def _go_back(self, guard: str) -> None:
        self.state = "rolled back"
        sums = self.evidence[guard].sums
        self._tell(
            f"{guard}: {sums.canary_bad} of {sums.canary} bad in the canary, "
            f"{sums.control_bad} of {sums.control} in the control"
        )

    def _tell(self, reason: str) -> None:
        self.reason = reason
        self._on_change(Change(self.state, self.step, reason))

    # ── what is kept and told ───────────────────────────────────────────────────────────────

    def by_hand(self, state: str, reason: str) -> None:
        """An operator's word: promoted, or rolled back, from whatever it was."""
        assert state in ("promoted", "rolled back")
        self.state = state
        self._tell(f"by hand: {reason}" if reason else "by hand")

    def restore(self, state: str, step: int, reason: str, data: bytes | None = None) -> None:
        """Go on from what the ledger has kept of this version, its evidence with it."""
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
        """What `restore` takes: the evidence, and how far this step is."""
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
        """What `/stats` shows of it."""
        burns = self._burns() if self.state in RUNNING else ""
        waits = [name for name in self._needs if min(self._known[name]) < self.row.requests]
        return {
            "name": self.row.name,
            "version": self.row.version,
            "model": self.row.model,
            "canary": list(self.row.canary),
            "state": self.state,
            "share": self.share,
            "reason": self.reason,
            "waits_for": waits + ["budget"] * bool(burns) if self.state in RUNNING else [],
            "burns": burns,
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
        """A rollout that has ended has a reason; evidence above its bound ends one."""
        assert self.state in (*RUNNING, "promoted", "rolled back")
        assert 0 <= self.step < len(self.row.steps) and 0 <= self.share <= 1
        if self.budget is not None:
            self.budget.check_integrity()
        for name, each in self.evidence.items():
            each.check_integrity()
            assert self.state not in RUNNING or each.value < self.bound(name)
        assert self.state in RUNNING or self.reason
