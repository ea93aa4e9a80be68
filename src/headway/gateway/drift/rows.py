"""The row of the gateway's file that says how often upstreams are compared, and by what."""

import msgspec

from headway.core.slo import parse_duration
from headway.gateway.cascade.rows import duration


class DriftRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`probes` is a file of JSON lines with `messages`; without one, questions of the skills."""

    every: str = "60m"
    probes: str = ""
    number: int = 200

    @property
    def every_s(self) -> float:
        return parse_duration(self.every, "every")

    def __post_init__(self) -> None:
        duration("drift.every", self.every)
        if not 20 <= self.number <= 10_000:
            raise ValueError("drift.number must be between 20 and 10000")
