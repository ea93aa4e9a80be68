"""One model's cascade: which evidence holds now, and what became of the requests."""

from collections import Counter
from typing import Any

from headway.core.clock import Clock
from headway.gateway.cascade.evidence import DAY_S, EvidenceFile, TaskEvidence
from headway.gateway.cascade.rows import CascadeRow
from headway.gateway.upstream import Upstream

ANY_TASK = "other"
OUTCOMES = ("accepted", "rejected", "failed", "dear")


class Cascade:
    """The evidence of one model row; without evidence that holds no request is asked cheaply."""

    def __init__(self, row: CascadeRow, evidence: EvidenceFile | None, clock: Clock) -> None:
        self.row = row
        self.evidence = evidence
        self.counts: Counter[tuple[str, str]] = Counter()
        """(task, outcome) → requests."""
        self._clock = clock
        self._tasks = {each.task: each for each in evidence.tasks} if evidence else {}
        self._void = (
            "" if evidence else f"{row.evidence} is not there; headway gateway calibrate writes it"
        )

    @property
    def void(self) -> str:
        """Why no evidence holds, "" where it does."""
        if not self._void and self.evidence is not None:
            age_s = self._clock.wall_s() - self.evidence.made_at
            if age_s > self.row.days * DAY_S:
                return f"it is {age_s / DAY_S:.0f} days old"
        return self._void

    def way_for(self, task: str) -> TaskEvidence | None:
        """How the cheap route answers this task, None where only the dear one may."""
        evidence = self._tasks.get(task)
        return evidence if evidence is not None and evidence.use and not self.void else None

    def count(self, task: str, outcome: str) -> None:
        """A request of this task has had this outcome."""
        assert outcome in OUTCOMES
        self.counts[task if task in self._tasks else ANY_TASK, outcome] += 1

    def set_void(self, why: str) -> None:
        """The evidence is about other models than those that answer now."""
        self._void = self._void or why

    def knows(self, side: str, upstream: Upstream) -> bool:
        """Whether an upstream of the cheap or the dear side is what the evidence was made with."""
        known = self.evidence.fingerprints.get(side) if self.evidence is not None else None
        if not known or not upstream.fingerprint or upstream.fingerprint in known:
            return True
        self.set_void(f"{upstream.name} is another one: its fingerprint has changed")
        return False

    def snapshot(self) -> dict[str, Any]:
        """What `/stats` shows of it."""
        return {
            "cheap": self.row.cheap,
            "void": self.void,
            "made_at": self.evidence.made_at if self.evidence is not None else None,
            "tolerance": self.evidence.tolerance if self.evidence is not None else None,
            "tasks": [
                {
                    **{name: getattr(each, name) for name in each.__struct_fields__},
                    "accepted_now": self.counts[task, "accepted"],
                    **{outcome: self.counts[task, outcome] for outcome in ("rejected", "failed")},
                }
                for task, each in self._tasks.items()
            ],
            "unknown": self.counts[ANY_TASK, "dear"],
        }
