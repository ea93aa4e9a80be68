"""Neighbours of the present settings: one of them changed, or all back to what it started with."""

from collections.abc import Callable, Iterator
from typing import Any

from headway.core.errors import UsageError
from headway.core.live_settings import LIVE, Changes, Value, difference, with_changes
from headway.core.resolve import Settings

Ladder = Callable[[Any, Any], list[Value]]
"""(what is, what it started with) → values worth trying."""


def times(*factors: float, least: float = 1) -> Ladder:
    """So many times what is, and what it started with, as whole numbers."""

    def ladder(now: Any, started: Any) -> list[Value]:
        return [max(round(now * factor), int(least)) for factor in factors] + [started]

    return ladder


def stretched(*factors: float) -> Ladder:
    """The same of seconds."""

    def ladder(now: Any, started: Any) -> list[Value]:
        return [round(now * factor, 4) for factor in factors] + [started]

    return ladder


def of(*choices: Value) -> Ladder:
    """These."""

    def ladder(now: Any, started: Any) -> list[Value]:
        return [*choices, started]

    return ladder


LADDERS: dict[str, Ladder] = {
    "max_num_seqs": times(1 / 8, 1 / 4, 1 / 2, 2, 4, 8),
    "max_num_batched_tokens": times(1 / 8, 1 / 4, 1 / 2, 2, 4, least=16),
    "late": of("serve", "shed"),
    "lane_share": of(0.02, 0.1, 0.3, 0.6),
    "long_prefill": stretched(1 / 3, 3),
    "aging": times(1 / 8, 8),
    "max_drafts": times(1 / 2, 2),
}
FINER = times(3 / 4, 4 / 3)
"""Between the steps of a ladder, around what was best on it."""
COUNTED = ("max_num_seqs", "max_num_batched_tokens", "max_drafts")
OF_LONG = ("lane_share", "long_prefill", "aging")
"""Where no prompt is nearly long they do nothing."""


def candidates(
    now: Settings, started: Settings, left_alone: list[Changes], longest: int, longest_s: float
) -> list[Changes]:
    """Changes that may be tried, each once; none that is among those `left_alone`.

    The longest prompt of late has so many tokens, which take so long alone.
    """
    found: list[Changes] = []
    for changes in neighbours(now, started):
        if len(changes) == 1 and any(
            idle(name, value, now, longest, longest_s) for name, value in changes.items()
        ):
            continue
        if can_be(changes, now, started) and changes not in [*found, *left_alone]:
            found.append(changes)
    return found


def idle(name: str, value: Value, now: Settings, longest: int, longest_s: float) -> bool:
    """Whether such a change would do nothing to prompts of that length."""
    if name in OF_LONG:
        return longest_s < now.scheduler.long_prefill_s / 3
    if name == "max_num_batched_tokens":
        least = min(int(value), now.max_num_batched_tokens)
        return least >= longest + now.max_num_seqs
    return False


def finer(
    best: Changes, now: Settings, started: Settings, left_alone: list[Changes]
) -> list[Changes]:
    """The values beside the best of a ladder."""
    found: list[Changes] = []
    for name, value in best.items() if len(best) == 1 else ():
        for between in FINER(value, value) if name in COUNTED else ():
            changes: Changes = {name: between}
            if can_be(changes, now, started) and changes not in [best, *found, *left_alone]:
                found.append(changes)
    return found


def can_be(changes: Changes, now: Settings, started: Settings) -> bool:
    """Whether these are other settings, and possible ones."""
    try:
        return with_changes(now, changes, started) != now
    except UsageError:
        return False


def neighbours(now: Settings, started: Settings) -> Iterator[Changes]:
    """Everything as it started, and each setting alone."""
    back = difference(now, started)
    if len(back) > 1:
        yield back
    for name, row in LIVE.items():
        if row.does_something(now):
            for value in LADDERS[name](row.now(now), row.now(started)):
                yield {name: value}
