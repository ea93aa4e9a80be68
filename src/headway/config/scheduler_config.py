"""What the options say of scheduling: handed to the engine, to admission and to a simulation.

The numbers stand in the option table (`config.options.tables`) and nowhere else.
"""

from dataclasses import dataclass
from typing import Self

from headway.config.batching_rule import WINDOW_S, batching_rule
from headway.config.options import EngineOptions

DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fields of `EngineOptions` that policies and admission read; each is described there."""

    batching: str = DEFAULTS.batching
    batch_window_s: float = WINDOW_S
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
        rule = batching_rule(options.batching)
        return cls(
            batching=rule.name,
            batch_window_s=rule.window_s,
            policy=options.policy,
            late=options.late,
            long_prefill_s=float(options.long_prefill),
            lane_share=options.lane_share,
            aging_tokens=options.aging,
        )
