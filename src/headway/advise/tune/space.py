"""What a tuner may change: a row for each option, with the values that are worth trying here."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from headway.core.errors import UsageError
from headway.core.options import EngineOptions
from headway.core.resolve import Settings

Changes = tuple[tuple[str, Any], ...]
"""Options and values beside the default's, in the order of `KNOBS`; () is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option. `values` besides the present one; `changes_tokens` wants a gate."""

    name: str
    values: Callable[[Settings], list[Any]]
    now: Callable[[Settings], Any]
    changes_tokens: bool = False
    policy: str = ""
    """Only under this policy it does anything."""


Values = Callable[[Settings], list[Any]]


def times(now: Callable[[Settings], int], least: int, most: int, *factors: float) -> Values:
    """So many times what is, rounded, within bounds."""

    def values(settings: Settings) -> list[Any]:
        found = [round(now(settings) * factor) for factor in factors]
        return [v for v in dict.fromkeys(found) if least <= v <= most and v != now(settings)]

    return values


def others(now: Callable[[Settings], Any], *choices: Any) -> Values:
    """The choices but for what is."""

    def values(settings: Settings) -> list[Any]:
        return [choice for choice in choices if choice != now(settings)]

    return values


def rows(settings: Settings) -> int:
    return settings.max_num_seqs


def batched(settings: Settings) -> int:
    return settings.max_num_batched_tokens


def aging(settings: Settings) -> int:
    return settings.scheduler.aging_tokens


def knob(name: str, now: Callable[[Settings], Any], *choices: Any, **more: Any) -> Knob:
    """An option with a list of choices."""
    return Knob(name=name, now=now, values=others(now, *choices), **more)


KNOBS = (
    Knob(name="max_num_seqs", now=rows, values=times(rows, 1, 4096, 1 / 8, 1 / 4, 1 / 2, 2, 4)),
    Knob(
        name="max_num_batched_tokens",
        now=batched,
        values=times(batched, 16, 65_536, 1 / 8, 1 / 4, 1 / 2, 2, 4),
    ),
    knob("policy", lambda s: s.scheduler.policy, "slo", "fair", "fcfs"),
    knob("late", lambda s: s.scheduler.late, "serve", "shed", policy="slo"),
    knob("lane_share", lambda s: s.scheduler.lane_share, 0.02, 0.1, 0.3, policy="slo"),
    knob("long_prefill", lambda s: s.scheduler.long_prefill_s, 0.25, 0.75, 1.5, 4.0, policy="slo"),
    Knob(name="aging", now=aging, values=times(aging, 1, 2**31, 1 / 8, 8), policy="slo"),
    knob("prefix_cache_policy", lambda s: s.cache.prefix_cache, "lru", "lfu", "cost"),
    knob("block_size", lambda s: s.cache.block_size, 8, 16, 32, 64),
    knob(
        "quantization", lambda s: str(s.quantization), "none", "int8", "int4", changes_tokens=True
    ),
    knob("kv_cache_dtype", lambda s: s.cache.dtype, "auto", "int8", changes_tokens=True),
)
"""Options of `EngineOptions` that a simulation tells apart."""
NAMES = tuple(each.name for each in KNOBS)


def chosen(names: list[str], *, gate: bool) -> list[Knob]:
    """The knobs that may be turned; UsageError names one that there is none of."""
    for name in names:
        known = name.replace("-", "_")
        if known not in NAMES:
            raise UsageError(f"--knobs: {name} is none.", f"There are: {', '.join(NAMES)}.")
        row = KNOBS[NAMES.index(known)]
        if row.changes_tokens and not gate:
            raise UsageError(
                f"--knobs {name} changes what is answered.", "Say --gate: an evaluation judges it."
            )
    wanted = {name.replace("-", "_") for name in names}
    return [
        row
        for row in KNOBS
        if (row.name in wanted or not wanted) and (gate or not row.changes_tokens)
    ]


def candidates(knobs: list[Knob], settings: Settings, count: int, seed: int) -> list[Changes]:
    """The default, each knob turned alone, and as many of all together as fit into `count`."""
    found: dict[Changes, None] = {(): None}
    for changes in alone(knobs, settings):
        if len(found) < count:
            found[changes] = None
    rng, tries = random.Random(seed), 0
    while len(found) < count and tries < 20 * count:
        tries += 1
        turned = rng.sample(knobs, min(rng.choice((2, 2, 3, 4)), len(knobs)))
        picked = [(k.name, rng.choice(v)) for k in turned if (v := k.values(settings))]
        found[ordered(picked, settings)] = None
    return list(found)


def alone(knobs: list[Knob], settings: Settings) -> Iterator[Changes]:
    """Each knob turned alone, to each of its values."""
    for row in knobs:
        for value in row.values(settings):
            changes = ordered([(row.name, value)], settings)
            if changes:
                yield changes


def ordered(picked: list[tuple[str, Any]], settings: Settings) -> Changes:
    """In the order of `KNOBS`, without what does nothing under the policy that they choose."""
    given = dict(picked)
    policy = given.get("policy", settings.scheduler.policy)
    return tuple(
        (row.name, given[row.name])
        for row in KNOBS
        if row.name in given and row.policy in ("", policy)
    )


def options_of(engine: EngineOptions, changes: Changes) -> EngineOptions:
    """The engine's options with the changes."""
    return replace(engine, **dict(changes))


def said(changes: Changes) -> str:
    """`max_num_seqs=32 policy=fcfs`; the default by that name."""
    return " ".join(f"{name}={value}" for name, value in changes) or "default"


def changes_tokens(changes: Changes) -> bool:
    """Whether answers may differ from the default's."""
    return any(KNOBS[NAMES.index(name)].changes_tokens for name, _ in changes)
