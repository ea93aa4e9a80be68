"""The tuner's search space: options with `tunable` values that change a simulation.

The values are in the option table (`config.options.tables`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.config.options import EngineOptions
from headway.config.options.field import Multiple
from headway.config.options.read import fields_of
from headway.config.resolve import Settings
from headway.core.errors import UsageError

Changes = tuple[tuple[str, Any], ...]
"""Options and values that differ from the default, in the order of `KNOBS`; () is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option. `values` are those besides the present one; a knob with `changes_tokens` needs a
    gate."""

    name: str
    values: Callable[[Settings], list[Any]]
    now: Callable[[Settings], Any]
    changes_tokens: bool = False
    policy: str = ""
    """The only policy under which the option has an effect; "" for all."""


PRESENT_VALUES: dict[str, Callable[[Settings], Any]] = {
    "max_num_seqs": lambda s: s.max_num_seqs,
    "max_num_batched_tokens": lambda s: s.max_num_batched_tokens,
    "policy": lambda s: s.scheduler.policy,
    "late": lambda s: s.scheduler.late,
    "lane_share": lambda s: s.scheduler.lane_share,
    "long_prefill": lambda s: s.scheduler.long_prefill_s,
    "aging": lambda s: s.scheduler.aging_tokens,
    "prefix_cache_policy": lambda s: s.cache.prefix_cache,
    "block_size": lambda s: s.cache.block_size,
    "quantization": lambda s: str(s.quantization),
    "kv_cache_dtype": lambda s: s.cache.dtype,
}
"""Option that changes a simulation → its value in the settings."""
SLO_OPTIONS = ("late", "lane_share", "long_prefill", "aging")
"""Options of the policy slo alone."""
LOSSY_OPTIONS = ("quantization", "kv_cache_dtype")
"""Options that change answers."""


def other_values(name: str, settings: Settings) -> list[Any]:
    """Return the option's `tunable` values within its bounds, without the present one."""
    _, field = fields_of([EngineOptions])[name]
    now, rules, values = PRESENT_VALUES[name](settings), field.metadata, list[Any]()
    for value in rules["tunable"]:
        tried = round(now * value) if isinstance(value, Multiple) else value
        is_low = rules["low"] is not None and tried < rules["low"]
        is_high = rules["high"] is not None and tried > rules["high"]
        if tried != now and tried not in values and not (is_low or is_high):
            values.append(tried)
    return values


KNOBS = tuple(
    Knob(
        name=name,
        values=partial(other_values, name),
        now=now,
        changes_tokens=name in LOSSY_OPTIONS,
        policy="slo" if name in SLO_OPTIONS else "",
    )
    for name, now in PRESENT_VALUES.items()
)
NAMES = tuple(each.name for each in KNOBS)


def select_knobs(names: list[str], *, gate: bool) -> list[Knob]:
    """Return the knobs to tune, all where `names` is empty; UsageError for an unknown name."""
    for name in names:
        known = name.replace("-", "_")
        if known not in NAMES:
            raise UsageError(f"--knobs: {name} is none.", f"There are: {', '.join(NAMES)}.")
        row = KNOBS[NAMES.index(known)]
        if row.changes_tokens and not gate:
            raise UsageError(
                f"--knobs {name} changes what is answered.", "Give --gate: an evaluation judges it."
            )
    selected = {name.replace("-", "_") for name in names}
    return [
        row
        for row in KNOBS
        if (row.name in selected or not selected) and (gate or not row.changes_tokens)
    ]


def candidates(knobs: list[Knob], settings: Settings, count: int, seed: int) -> list[Changes]:
    """Return the default, each single change, and random combinations, `count` in all."""
    all_changes: dict[Changes, None] = {(): None}
    for changes in single_changes(knobs, settings):
        if len(all_changes) < count:
            all_changes[changes] = None
    rng, tries = random.Random(seed), 0
    while len(all_changes) < count and tries < 20 * count:
        tries += 1
        turned = rng.sample(knobs, min(rng.choice((2, 2, 3, 4)), len(knobs)))
        picked = [(k.name, rng.choice(v)) for k in turned if (v := k.values(settings))]
        all_changes[ordered(picked, settings)] = None
    return list(all_changes)


def single_changes(knobs: list[Knob], settings: Settings) -> Iterator[Changes]:
    """Yield each knob at each of its values, alone."""
    for row in knobs:
        for value in row.values(settings):
            changes = ordered([(row.name, value)], settings)
            if changes:
                yield changes


def ordered(picked: list[tuple[str, Any]], settings: Settings) -> Changes:
    """Return the changes in the order of `KNOBS`, without those that their policy ignores."""
    given = dict(picked)
    policy = given.get("policy", settings.scheduler.policy)
    return tuple(
        (row.name, given[row.name])
        for row in KNOBS
        if row.name in given and row.policy in ("", policy)
    )


def options_of(engine: EngineOptions, changes: Changes) -> EngineOptions:
    """Return the engine's options with the changes."""
    return replace(engine, **dict(changes))


def setting_name(changes: Changes) -> str:
    """Return `max_num_seqs=32 policy=fcfs`; "default" for no change."""
    return " ".join(f"{name}={value}" for name, value in changes) or "default"


def changes_tokens(changes: Changes) -> bool:
    """Return whether answers may differ from the default's."""
    return any(KNOBS[NAMES.index(name)].changes_tokens for name, _ in changes)
