"""What keeping KV for later prompts costs: tokens times hours, by tier, and the price of a disk's.

Between two records a tier holds what the first has told. Worked example, 2 million tokens of 12 KiB
on a disk of 0.08 dollars a GB and month (730 hours), kept for half an hour:

    1 million token hours      2e6 x 12,288 bytes = 24.6 GB, half an hour: 0.0013 dollars
"""

from dataclasses import dataclass, field

import msgspec

from headway.telemetry.records import StepRecord, TierUse
from headway.telemetry.registry import Registry

HOURS_A_MONTH, GB = 730, 1e9
PAID = "disk"
"""The tier that costs more than the machine, whose price per hour has its memory in it."""


class StorageCost(msgspec.Struct, kw_only=True):
    """What a tier keeps for later prompts, and the tokens times hours that it kept since the start.

    The device's and the host's memory are in the price per hour; a disk's `usd` and what a million
    token hours cost there need `--storage-price`.
    """

    tier: str
    num_bytes: int
    num_tokens: int
    token_hours: float
    usd: float | None
    usd_per_million_token_hours: float | None


@dataclass(slots=True)
class Held:
    """What one tier of an engine holds, since when nobody has added it up."""

    use: TierUse
    since_s: float


@dataclass(slots=True)
class Storage:
    """Token hours and dollars since the start; `price` is of a GB a month, None for none."""

    price: float | None = None
    token_hours: dict[str, float] = field(default_factory=dict)
    usd: float = 0.0
    _held: dict[tuple[int, str], Held] = field(default_factory=dict)

    def take(self, record: StepRecord, now_s: float) -> None:
        """From now on its engine's tiers hold what the record tells."""
        self.add_up(now_s)
        for use in record.kv_tiers:
            self._held[record.engine, use.tier] = Held(use, now_s)

    def lose(self, engine: int, now_s: float) -> None:
        """An engine is gone: its memory holds nothing; a disk holds what it held."""
        self.add_up(now_s)
        for place in [place for place in self._held if place[0] == engine and place[1] != PAID]:
            del self._held[place]

    def add_up(self, now_s: float) -> None:
        """Count what was held until now."""
        for (_, tier), held in self._held.items():
            hours = (now_s - held.since_s) / 3600
            counted = self.token_hours.get(tier, 0.0) + held.use.num_tokens * hours
            self.token_hours[tier], held.since_s = counted, now_s
            if tier == PAID:
                self.usd += held.use.num_bytes / GB * hours / HOURS_A_MONTH * (self.price or 0.0)

    def told(self, now_s: float) -> list[StorageCost]:
        """By tier what is held, and what that took since the start."""
        self.add_up(now_s)
        found = []
        for tier, token_hours in self.token_hours.items():
            uses = [held.use for (_, name), held in self._held.items() if name == tier]
            num_bytes = sum(use.num_bytes for use in uses)
            num_tokens = sum(use.num_tokens for use in uses)
            usd = each = None
            if tier == PAID and self.price is not None:
                usd = self.usd
                if num_tokens:
                    each = self.price / HOURS_A_MONTH / GB * num_bytes / num_tokens * 1e6
            found.append(
                StorageCost(
                    tier=tier,
                    num_bytes=num_bytes,
                    num_tokens=num_tokens,
                    token_hours=token_hours,
                    usd=usd,
                    usd_per_million_token_hours=each,
                )
            )
        return found

    def show(self, registry: Registry, now_s: float) -> None:
        """Set what `/metrics` says of it."""
        for stored in self.told(now_s):
            registry.set("kv_tier_bytes", stored.num_bytes, stored.tier)
            registry.set("kv_token_hours", stored.token_hours, stored.tier)
        registry.set("kv_storage_usd", self.usd)
