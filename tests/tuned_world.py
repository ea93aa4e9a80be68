"""Landscapes whose settings score what a formula says: a search without simulation, and real runs
without a server, of the same truth or of another."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes import make_settings
from headway.advise.tune.confirm import Confirmation, MeasuredBlock
from headway.advise.tune.search import Point, SettingSearch
from headway.advise.tune.space import Changes
from headway.config.options import BenchOptions, EngineOptions

SETTINGS = make_settings(
    num_blocks=(1251,), block_size=16, max_num_seqs=64, budget=512, max_model_len=2048, policy="slo"
)
Worth = dict[tuple[str, Any], float]
"""(option, value) → what it multiplies the default's goodput by."""


def worth_of(changes: Changes, worth: Worth) -> float:
    """Goodput; the default has 10/s."""
    return 10 * math.prod(worth.get(each, 1.0) for each in changes)


@dataclass(slots=True)
class Landscape(SettingSearch):
    """Points by formula: `worth` of each (option, value) is multiplied."""

    worth: Worth = field(default_factory=dict)
    impossible: frozenset[tuple[str, Any]] = frozenset()
    asked: list[tuple[Changes, int, int]] = field(default_factory=list)

    def machine(self, changes: Changes):
        hit = self.impossible & set(changes)
        if hit:
            self.refused[str(sorted(hit))] = "planted"
        return None if hit else SimpleNamespace(settings=SETTINGS, label="planted")

    def point(self, changes: Changes, conversations: int, cases: int) -> Point:
        self.asked.append((changes, conversations, cases))
        self.num_simulated += 1
        return point(changes, worth_of(changes, self.worth))


def landscape(worth: Worth, **more: Any) -> Landscape:
    known = SimpleNamespace(machinery=SimpleNamespace(settings=SETTINGS))
    return Landscape(
        folder=Path(), engine=EngineOptions(), calibration=None, plan=known, worth=worth, **more
    )


def point(changes: Changes, goodput: float, **more: float) -> Point:
    fields = {"in_slo": 0.9, "ttft_s": 0.2, "tpot_s": 0.03, "tokens_per_s": 100.0} | more
    return Point(changes=changes, goodput=goodput, **fields)


GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples are spread evenly between whole numbers."""


@dataclass(slots=True, kw_only=True)
class Truth(Confirmation):
    """Real runs by formula: who meets a request meets it under each better setting too."""

    worth: Worth
    most: float
    """Goodput at which all are met."""

    def block(self, changes: Changes, number: int) -> MeasuredBlock:
        share = worth_of(changes, self.worth) / self.most
        met = [n * GOLDEN % 1 < share for n in range(1000)]
        times: list[float | None] = [0.1] * len(met)
        return MeasuredBlock(
            changes=changes, round=number, span_s=1000 / self.most, met=met, ttft_s=times,
            tpot_s=times,
        )  # fmt: skip


def truth(worth: Worth, most: float, runs: int = 7, **more: Any) -> Truth:
    """`runs`: of the eight one is a calibration's."""
    return Truth(
        folder=Path(), engine=EngineOptions(), load=BenchOptions(), slo=None, block_s=1.0,
        remaining_runs=runs, until_s=float("inf"), worth=worth, most=most, **more,
    )  # fmt: skip
