"""Settings that may change while a server runs, and within which bounds: a row each.

What was set aside at the start bounds two of them: 64 rows have their tables, 512 tokens a step
their memory, so a running server may have fewer of either and never more than it started with.

    started with  64 rows, 512 tokens a step, policy slo, lane_share 0.1
    may become    max_num_seqs 1 … 64, max_num_batched_tokens rows … 512, lane_share 0.01 … 0.99
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from headway.core.errors import UsageError
from headway.core.options import EngineOptions, ServerOptions
from headway.core.options.field import parse_value
from headway.core.resolve import Settings

Value = int | float | str
Changes = dict[str, Value]
"""Option → its new value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSetting:
    """One of them: where it stands in the settings. `capped` by what was started with; under
    another policy than `policy` it does nothing."""

    place: str
    capped: bool = False
    policy: str = ""
    needs: Callable[[Settings], bool] = lambda settings: True

    def now(self, settings: Settings) -> Any:
        """Its value."""
        return attrgetter(self.place)(settings)

    def put(self, settings: Settings, value: Any) -> Settings:
        """The settings with another value."""
        part, _, name = self.place.rpartition(".")
        if not part:
            return replace(settings, **{name: value})
        return replace(settings, **{part: replace(getattr(settings, part), **{name: value})})

    def does_something(self, settings: Settings) -> bool:
        """Whether a change of it can be felt."""
        return self.policy in ("", settings.scheduler.policy) and self.needs(settings)


LIVE = {
    "max_num_seqs": LiveSetting(place="max_num_seqs", capped=True),
    "max_num_batched_tokens": LiveSetting(place="max_num_batched_tokens", capped=True),
    "lane_share": LiveSetting(place="scheduler.lane_share", policy="slo"),
    "long_prefill": LiveSetting(place="scheduler.long_prefill_s", policy="slo"),
    "aging": LiveSetting(place="scheduler.aging_tokens", policy="slo"),
    "late": LiveSetting(place="scheduler.late", policy="slo"),
    "max_drafts": LiveSetting(
        place="speculation.max_drafts", capped=True, needs=lambda s: bool(s.speculation.sources)
    ),
}
"""Option of `EngineOptions` → where it stands."""
OPTIONS = {field.name: field for field in fields(EngineOptions)}


def live_values(settings: Settings) -> Changes:
    """What these are now."""
    return {name: row.now(settings) for name, row in LIVE.items() if row.does_something(settings)}


def with_changes(settings: Settings, changes: Changes, started: Settings) -> Settings:
    """`settings` with `changes`; UsageError for what cannot change, or not so far.

    `started` are those that the engine began with.
    """
    for name, value in changes.items():
        row = LIVE.get(name)
        if row is None:
            raise UsageError(
                f"{name} cannot change while a server runs.", f"There are: {', '.join(LIVE)}."
            )
        checked = parse_value(EngineOptions, OPTIONS[name], value, name)
        if row.capped and checked > row.now(started):
            raise UsageError(
                f"{name} {value} is more than the {row.now(started)} that it was started with.",
                "What it needs was set aside at the start; start with more.",
            )
        settings = row.put(settings, checked)
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens {settings.max_num_batched_tokens} is below "
            f"max_num_seqs {settings.max_num_seqs}.",
            "Each running sequence needs a token a step.",
        )
    return settings


def difference(old: Settings, new: Settings) -> Changes:
    """What makes `new` of `old`."""
    return {name: row.now(new) for name, row in LIVE.items() if row.now(new) != row.now(old)}


RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
"""The options that make ranks."""


def check_retunable(engine: EngineOptions, server: ServerOptions) -> None:
    """Raise UsageError for what `--retune` cannot stand beside."""
    for said, fix in left_out(engine, server):
        raise UsageError(f"--retune beside {said}: a simulation leaves that out.", fix)


def left_out(engine: EngineOptions, server: ServerOptions) -> Iterator[tuple[str, str]]:
    """(what is there, what to do) of each option that a simulation does not have."""
    for name in RANKS:
        if getattr(engine, name) != 1:
            yield (
                f"--{name.replace('_', '-')}",
                "Ranks are not simulated: leave one of the two out.",
            )
    if server.prefill_replicas or server.decode_replicas:
        yield "--prefill-replicas", "Use --replicas, or leave --retune out."
    if server.fallback_model:
        yield "--fallback-model", "What others answer is not simulated: leave one of the two out."
    if not engine.batching.startswith("continuous"):
        yield f"--batching {engine.batching}", "Only continuous batching is retuned."
    if engine.policy == "priority":
        yield "--policy priority", "Traffic is kept without priorities: use slo, fair or fcfs."
