"""Cascade of one model: the evidence in force, and counts of its outcomes."""

from collections import Counter
from typing import Any

from headway.core.clock import Clock
from headway.gateway.cascade.evidence import DAY_S, EvidenceFile, TaskEvidence
from headway.gateway.cascade.rows import CascadeRow
from headway.gateway.upstream import Upstream

ANY_TASK = "other"
OUTCOMES = ("accepted", "rejected", "failed", "dear")


class Cascade:
    """Cascade of one model row; without valid evidence no request uses the cheap route."""

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
        """Return why the evidence is not valid; "" if it is."""
        if not self._void and self.evidence is not None:
            age_s = self._clock.wall_s() - self.evidence.made_at
            if age_s > self.row.days * DAY_S:
                return f"it is {age_s / DAY_S:.0f} days old"
        return self._void

    def evidence_for(self, task: str) -> TaskEvidence | None:
        """Return how the cheap route answers this task; None if only the expensive route may."""
        evidence = self._tasks.get(task)
        return evidence if evidence is not None and evidence.use and not self.void else None

    def count(self, task: str, outcome: str) -> None:
        """Count an outcome of a request of this task."""
        assert outcome in OUTCOMES
        self.counts[task if task in self._tasks else ANY_TASK, outcome] += 1

    def invalidate(self, why: str) -> None:
        """Invalidate the evidence, because other models answer now."""
        self._void = self._void or why

    def matches_fingerprint(self, side: str, upstream: Upstream) -> bool:
        """Return whether an upstream has a fingerprint that the evidence was made with.

        `side` is "cheap" or "dear".
        """
        known = self.evidence.fingerprints.get(side) if self.evidence is not None else None
        if not known or not upstream.fingerprint or upstream.fingerprint in known:
            return True
        self.invalidate(f"{upstream.name} is another one: its fingerprint has changed")
        return False

    def snapshot(self) -> dict[str, Any]:
        """Return the cascade's part of `/stats`."""
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
