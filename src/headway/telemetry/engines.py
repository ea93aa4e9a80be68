"""The engines of one model, by number: who is there, and what each told of its last step."""

from collections import Counter

import msgspec

from headway.core.records import BEFORE_ANY, StepRecord
from headway.perf.model import StepModel
from headway.telemetry.demand import Demand

BOTH = "both"
DISK = "disk"


class Engines:
    """`num` of them; those that are `ready`, and the last step of each that lives.

    `demand` is how many the traffic asks for; `roles` by engine where prompts and answers are
    computed apart.
    """

    def __init__(self, demand: Demand) -> None:
        self.num, self.demand = 1, demand
        self.roles: list[str] = []
        self.ready: set[int] = set()
        self.last_of: dict[int, StepRecord] = {}
        self.models: dict[int, StepModel] = {}
        """Each engine's cost model as of the last snapshot."""
        self._tier_bytes: dict[tuple[int, str], int] = {}

    @property
    def last(self) -> StepRecord:
        """The last step; of several engines what their last steps say together."""
        return together(list(self.last_of.values()))

    @property
    def last_steps(self) -> dict[int, StepRecord]:
        """By engine its last step; nothing runs in one that has made none, or is dead."""
        return {n: self.last_of.get(n, BEFORE_ANY) for n in range(self.num)}

    def role_of(self, engine: int) -> str:
        """What the server sends to this one: prompts, answers, or both."""
        return self.roles[engine] if self.roles else BOTH

    @property
    def num_by_role(self) -> dict[str, int]:
        """How many are ready of each role."""
        return dict(Counter(self.role_of(engine) for engine in self.ready))

    def on_record(self, record: StepRecord) -> int:
        """An engine made a step; returns how many preemptions it counts more than before.

        An engine that was started again counts from 0.
        """
        before = self.last_of.get(record.engine, BEFORE_ANY).num_preemptions
        self.last_of[record.engine] = record
        if record.model is not None:
            self.models[record.engine] = StepModel.of(record.model)
        self.demand.on_record(record, self.models.get(record.engine))
        for use in record.kv_tiers:
            self._tier_bytes[record.engine, use.tier] = use.num_bytes
        return max(record.num_preemptions - before, 0)

    def on_death(self, engine: int) -> None:
        """It is gone, and with it all that ran, waited or held a block there."""
        self.ready.discard(engine)
        self.last_of.pop(engine, None)
        self.models.pop(engine, None)
        for place in [place for place in self._tier_bytes if place[0] == engine]:
            if place[1] != DISK:  # a disk holds what it held
                del self._tier_bytes[place]

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of KV blocks that each tier holds for later prompts, over all engines."""
        found = dict.fromkeys((tier for _, tier in self._tier_bytes), 0)
        for (_, tier), num_bytes in self._tier_bytes.items():
            found[tier] += num_bytes
        return found


def together(records: list[StepRecord]) -> StepRecord:
    """What the last steps of several engines say at this moment: rows and blocks in all."""
    if len(records) < 2:
        return records[0] if records else BEFORE_ANY
    newest = max(records, key=lambda record: record.started_s)
    blocks = zip(*(record.group_blocks_used for record in records))
    return msgspec.structs.replace(
        newest,
        num_running=sum(record.num_running for record in records),
        num_waiting=sum(record.num_waiting for record in records),
        num_deferred=sum(record.num_deferred for record in records),
        kv_blocks_used=sum(record.kv_blocks_used for record in records),
        kv_usage=sum(record.kv_usage for record in records) / len(records),
        group_blocks_used=tuple(sum(used) for used in blocks),
    )
