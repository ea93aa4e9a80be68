"""Settings of scheduling: handed to the engine, to admission and to a simulation.

The numbers stand in the option table (`config.options.tables`) and nowhere else.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from headway.config.options import EngineOptions
from headway.config.options.field import parse_seconds
from headway.core.errors import UsageError

BATCH_WINDOW_S = 0.05
"""Seconds that the first request of a dynamic batch waits for others, by default."""
RULES = ("continuous", "dynamic", "static")


class BatchingRule(NamedTuple):
    """The rule's name, and the seconds that `dynamic` waits."""

    name: str
    window_s: float


def parse_batching(text: str) -> BatchingRule:
    """Parse `--batching`: continuous, dynamic, dynamic:80ms or static; raises UsageError."""
    name, colon, window = text.partition(":")
    if name not in RULES:
        raise UsageError(
            f"--batching: {name!r} is not one of {', '.join(RULES)}.",
            "Dynamic batching may say how long the first waits: dynamic:80ms.",
        )
    if not colon:
        return BatchingRule(name, BATCH_WINDOW_S)
    if name != "dynamic":
        raise UsageError(f"--batching {text}: {name} has no time to wait.", f"Write {name}.")
    try:
        window_s = float(parse_seconds(window))
    except ValueError:
        window_s = -1.0
    if window_s < 0:
        raise UsageError(f"--batching {text}: {window!r} is no time.", "Write dynamic:80ms.")
    return BatchingRule(name, window_s)


DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fields of `EngineOptions` that policies and admission read; each is described there."""

    batching: str = DEFAULTS.batching
    batch_window_s: float = BATCH_WINDOW_S
    policy: str = DEFAULTS.policy
    late: str = DEFAULTS.late
    long_prefill_s: float = float(DEFAULTS.long_prefill)
    lane_share: float = DEFAULTS.lane_share
    aging_tokens: int = DEFAULTS.aging
    overlap: int = 0
    """Steps that are submitted beside the one that runs; derived from the device."""

    @classmethod
    def of(cls, options: EngineOptions) -> Self:
        """What these options say; UsageError for a rule of batching that there is none of."""
        rule = parse_batching(options.batching)
        return cls(
            batching=rule.name,
            batch_window_s=rule.window_s,
            policy=options.policy,
            late=options.late,
            long_prefill_s=float(options.long_prefill),
            lane_share=options.lane_share,
            aging_tokens=options.aging,
        )
