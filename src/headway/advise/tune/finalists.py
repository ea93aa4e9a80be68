"""Which settings run for real: the best, and those that show where the simulation is wrong.

The first finalist is the best of the simulated ranking. Each further one is the first with one
option turned: what it changes goes back to the default's value, another option to that of its other
values that simulates best. Names (a policy) are turned before numbers, since a number near the best
tells little; then what changes the simulation most, since there a mistake costs most; what changes
it by less than 2% is not turned. Where no option is left the next of the ranking follow. The first
round of real runs adds one: the best of the round, with each value replaced that lost by 2% in a
pair of settings that differ in it alone. Where that is nothing new and the best is the first with a
number turned, the number goes on to the end of its direction; else the next option is turned.

The default has 64 rows under `slo`; simulated are 8 rows at 50/s, 8 rows with 128 tokens a step at
48, 16 rows at 47, 8 rows under `fcfs` at 41. The finalists are 8 rows, 8 rows under `fcfs` (-18%)
and 8 rows with 128 tokens (-4%); of rows the default tells. In the first round the default has
23/s, and the three 26, 34 and 28: both turns beat the first. So 8 rows with 128 tokens under `fcfs`
run in the second round, beside the default and the best of the first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from headway.advise.tune.outcome import MIN_GAIN
from headway.advise.tune.search import RUNGS, Point, SettingSearch
from headway.advise.tune.space import KNOBS, Changes, Knob, ordered, setting_name
from headway.config.resolve import Settings

TRIAL_CONVERSATIONS = RUNGS[1][0]
"""Conversations that are simulated to estimate the effect of an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """One option of the first finalist at another value; None is the default's."""

    name: str
    value: Any
    effect: float
    """Change of the first's score in simulation, as a share of the larger of both."""
    is_name: bool

    def __str__(self) -> str:
        return f"{self.name} turned: {self.effect:+.1%} in simulation"


@dataclass(slots=True, kw_only=True)
class Finalists:
    """The settings that run for real; `reasons` has the reason of each."""

    search: SettingSearch
    knobs: list[Knob]
    passes: Callable[[Changes], bool] = lambda changes: True
    """Whether the gate accepts the answers of a setting."""
    reasons: dict[Changes, str] = field(default_factory=dict)
    first: Changes = ()
    turns: list[OptionChange] = field(default_factory=list)
    """Changes of the first finalist that have not run, the most telling ones first."""

    @property
    def settings(self) -> Settings:
        """Return the default's settings."""
        return self.search.plan.machinery.settings

    def choose(self, points: list[Point], count: int) -> list[Changes]:
        """Return at most `count` settings beside the default, of the ranked points of a search."""
        ranking = [point.changes for point in points]
        self.first = next((c for c in ranking if not c or self.passes(c)), ())
        self.add(self.first, "the best in simulation")
        if len(self.reasons) < count:
            self.turns = self.rank_changes()
        while self.turns and len(self.reasons) < count:
            change = self.turns.pop(0)
            made = with_value(self.first, change.name, change.value, self.settings)
            self.add(made, f"{setting_name(self.first)}, {change}")
        for changes in ranking:
            if len(self.reasons) < count:
                self.add(changes, "the next in simulation")
        return list(self.reasons)[:count]

    def after(self, scores: dict[Changes, float]) -> Changes | None:
        """Return one more setting, by the goodput of each in the first round of real runs, or
        None."""
        best = max(scores, key=lambda changes: scores[changes])
        why = f"{setting_name(best)}, the best of the first round"
        made = best
        for name, lost, won in lost_values(scores):
            if dict(made).get(name) == lost:
                made = with_value(made, name, won, self.settings)
        if self.add(made, f"{why}, with what won there alone"):
            return made
        made = self.extrapolate(best)
        if self.add(made, f"{why}, further in the same direction"):
            return made
        while self.turns:
            change = self.turns.pop(0)
            mine = dict(self.first).get(change.name)
            value = change.value if dict(best).get(change.name) == mine else mine
            made = with_value(best, change.name, value, self.settings)
            if self.add(made, f"{why}, {change}"):
                return made
        return None

    def add(self, changes: Changes, why: str) -> bool:
        """Add a setting and return True where it is new, not the default, possible and accepted by
        the gate."""
        if not changes or changes in self.reasons or self.search.machine(changes) is None:
            return False
        if not self.passes(changes):
            return False
        self.reasons[changes] = why
        return True

    def rank_changes(self) -> list[OptionChange]:
        """Return each option of the first finalist changed alone, the most telling first."""
        self.search.watch("each option of the best is turned")
        score = self.score(self.first)
        changes = [change for row in self.knobs if (change := self.best_change(row, score))]
        relevant = [change for change in changes if abs(change.effect) >= MIN_GAIN]
        return sorted(relevant, key=lambda change: (not change.is_name, -abs(change.effect)))

    def best_change(self, row: Knob, score: float) -> OptionChange | None:
        """Return this option changed in the first finalist with its score; None where no such
        setting exists."""
        values = row.values(self.settings)
        is_changed = row.name in dict(self.first)
        scores = []
        for value in [None] if is_changed else values:
            made = with_value(self.first, row.name, value, self.settings)
            if made not in ((), self.first) and self.search.machine(made) is not None:
                scores.append((self.score(made), value))
        if not scores:
            return None
        best, value = max(scores, key=lambda pair: pair[0])
        return OptionChange(
            name=row.name,
            value=value,
            effect=(best - score) / (max(best, score) or 1.0),
            is_name=isinstance(values[0], str),
        )

    def extrapolate(self, best: Changes) -> Changes:
        """Return `best` with the one number in which it differs from the first at the end of its
        direction.

        64 rows lost to 32, and 8 are the fewest that may be tried: 8 rows.
        """
        name = single_difference(self.first, best)
        row = next((row for row in self.knobs if row.name == name), None)
        if row is None or isinstance(row.values(self.settings)[0], str):
            return best
        now = row.now(self.settings)
        ladder = sorted({now, *row.values(self.settings)})
        lost, won = (dict(each).get(name, now) for each in (self.first, best))
        end = ladder[-1] if won > lost else ladder[0]
        return with_value(best, name, None if end == now else end, self.settings)

    def score(self, changes: Changes) -> float:
        """Return the preferred figure on a stretch of the traffic; more is better."""
        return self.search.score(self.search.point(changes, TRIAL_CONVERSATIONS, 1))

    def simulated(self, points: list[Point]) -> list[Point]:
        """Return the points with those of the finalists that are not among them, ranked."""
        known = {point.changes for point in points}
        more = [self.search.final(changes) for changes in self.reasons if changes not in known]
        return self.search.ranked([*points, *more])


def with_value(changes: Changes, name: str, value: Any, settings: Settings) -> Changes:
    """Return a setting with one option at another value; None is the default's."""
    given = {each: its for each, its in changes if each != name}
    if value is not None:
        given[name] = value
    return ordered(list(given.items()), settings)


def lost_values(scores: dict[Changes, float]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (option, the value that lost, the one that won) of each two settings that differ in it
    alone.

    The difference is 2% at least; the clearest comes last. 8 rows have 26/s and 8 rows under `fcfs`
    34/s: ("policy", None, "fcfs").
    """
    pairs = [sorted(pair, key=lambda c: scores[c]) for pair in combinations(scores, 2)]
    pairs.sort(key=lambda pair: scores[pair[1]] / max(scores[pair[0]], 1e-9))
    for lost, won in pairs:
        name = single_difference(lost, won)
        if name and scores[won] > scores[lost] * (1 + MIN_GAIN):
            yield name, dict(lost).get(name), dict(won).get(name)


def single_difference(first: Changes, second: Changes) -> str:
    """Return the one option in which two settings differ, "" where there are several.

    An option that has an effect under one policy alone is counted with the policy.
    """
    one, other = dict(first), dict(second)
    rows = [row for row in KNOBS if one.get(row.name) != other.get(row.name)]
    if "policy" in [row.name for row in rows]:
        rows = [row for row in rows if not row.policy]
    return rows[0].name if len(rows) == 1 else ""
