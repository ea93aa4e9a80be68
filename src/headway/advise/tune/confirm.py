"""The best settings and the default on real servers, in turns, on arrivals nobody was chosen by.

A turn starts a server, puts one block of the traffic on and stops it. All settings get the same
arrivals in a round and the order turns from round to round, so a slow minute of the machine meets
each of them. What differs is judged pair by pair: the same request under a setting and under the
default; stretches of requests in a row are drawn anew (paired block bootstrap, Künsch 1989), for
neighbours share their fate. A server that does not start, or dies, is a result of its setting.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.advise.tune.space import Changes, options_of, said
from headway.bench.latency import latency
from headway.bench.report import misses
from headway.bench.run import Bench, measure, prepare
from headway.config.options import BenchOptions, EngineOptions, Seconds, to_arguments
from headway.core.errors import HeadwayError
from headway.core.slo import Slo
from headway.measure.record import Exchange
from headway.measure.started import Started

MOST_RUNS = 8
"""Servers that are started in all, a calibration's included."""
WARM_S = 1.0
RESAMPLES, STRETCH = 2000, 10
SURE = 1.96
"""Standard errors to the end of a 95% interval."""
LEAST = 0.01
"""Of a goodput beside the default's; the logarithm of nothing is none."""
LEAST_BLOCK_S = 5.0
Floats = NDArray[np.float64]


class Block(msgspec.Struct, kw_only=True):
    """One real run: what each request of the block came to; `died` says why there is none."""

    changes: Changes
    round: int
    span_s: float = 0.0
    met: list[bool] = []
    ttft_s: list[float | None] = []
    tpot_s: list[float | None] = []
    num_tokens: int = 0
    died: str = ""


class Confirmed(msgspec.Struct, kw_only=True):
    """A setting on the real server. `gain` in goodput over the default, a share, with its 95%."""

    changes: Changes
    runs: int
    goodput: float
    in_slo: float
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float
    gain: float = 0.0
    gain_interval: tuple[float, float] = (0.0, 0.0)
    simulated: float | None = None
    """The gain that was simulated."""
    together: float = 0.0
    """What simulation and real runs say together, with its 95% (together.py)."""
    together_interval: tuple[float, float] = (0.0, 0.0)
    died: str = ""
    taken: str = ""
    """Why it was run."""
    evened: float = 0.0
    """`goodput` in a mean round, also of a setting that was in some of the rounds alone."""

    @property
    def name(self) -> str:
        return said(self.changes)


@dataclass(slots=True, kw_only=True)
class Confirmation:
    """Real runs of some settings; the first of them is the default."""

    folder: Path
    engine: EngineOptions
    load: BenchOptions
    slo: Slo | None
    block_s: float
    runs_left: int
    until_s: float
    """On the clock of `time.monotonic`."""
    flags: tuple[str, ...] = ()
    """More flags of the server: what it is told of classes."""
    watch: Callable[[str], None] = lambda text: None
    after: Callable[[dict[Changes, float]], Changes | None] = lambda scores: None
    """One more setting, by the goodput of each in the first round; None: there is none."""
    blocks: list[Block] = field(default_factory=list)

    def run(self, settings: list[Changes]) -> list[Confirmed]:
        """Rounds until runs or time end. After the first the least promising leaves where not all
        can come again, or where another setting comes in its place."""
        asked, left, number = list(settings), list(settings), 0
        while left and self.runs_left > 0:
            if number == 1:
                left = self.with_another(left)
                asked += [changes for changes in left if changes not in asked]
            if number and len(left) > self.runs_left:
                left = self.best(left, self.runs_left)
            if number and len(left) < 2:  # the default alone shows nothing more
                break
            shift = number % len(left)
            for changes in left[shift:] + left[:shift]:
                if self.runs_left <= 0 or not self.has_time():
                    return self.results(asked)
                self.blocks.append(self.block(changes, number))
                self.runs_left -= 1
                if self.blocks[-1].died and changes in left:
                    left = [each for each in left if each != changes]
            number += 1
        return self.results(asked)

    def has_time(self) -> bool:
        """Whether another block of at least a few seconds ends in time."""
        return time.monotonic() + LEAST_BLOCK_S < self.until_s

    def with_another(self, left: list[Changes]) -> list[Changes]:
        """Those of the first round, or in the place of the least promising what it makes worth a
        try; only where it runs beside the default and the best."""
        room = min(self.runs_left, len(left))
        if room < 3:
            return left
        another = self.after({each.changes: each.goodput for each in self.results(left)})
        return left if another is None else [*self.best(left, room - 1), another]

    def best(self, left: list[Changes], count: int) -> list[Changes]:
        """So many of them: the default and those with the most goodput so far."""
        found = {each.changes: each.evened for each in self.results(left)}
        order = sorted(left[1:], key=lambda changes: -found[changes])
        return [left[0], *order[: max(count - 1, 0)]]

    def block(self, changes: Changes, number: int) -> Block:
        """One run of one setting."""
        self.watch(f"real run, {said(changes)}")
        found = Block(changes=changes, round=number)
        flags = [*to_arguments(options_of(self.engine, changes)), *self.flags]
        try:
            with Started(self.folder, flags) as server:
                bench = self.traffic(server.url, number)
                exchanges = asyncio.run(measure(bench, drain_s=self.block_s))[0].exchanges
                server.check()
        except HeadwayError as error:
            found.died = f"{error.cause} {error.fix}".strip()
            return found
        fill(found, bench, exchanges, self.slo)
        return found

    def traffic(self, url: str, number: int) -> Bench:
        """The arrivals of a round: the same for all settings, others than the search's."""
        load = replace(
            self.load,
            seed=self.load.seed + 7919 * (number + 1),
            duration=Seconds(self.block_s),
            num_requests=None,
            warmup=Seconds(0),
            cooldown=Seconds(0),
        )
        return prepare(url, load)

    def results(self, settings: list[Changes]) -> list[Confirmed]:
        """What each came to, and its gain over the default in the rounds that both have."""
        default = {b.round: b for b in self.blocks if b.changes == settings[0] and not b.died}
        factors = evening(self.blocks)
        found = []
        for changes in settings:
            mine = [b for b in self.blocks if b.changes == changes]
            one = summed(changes, mine)
            good = [b for b in mine if not b.died]
            met = sum(sum(b.met) * factors[b.round] for b in good)
            one.evened = met / (sum(b.span_s for b in good) or 1.0)
            pairs = [(default[b.round], b) for b in mine if b.round in default and not b.died]
            if pairs and changes != settings[0]:
                one.gain, one.gain_interval = paired_gain(pairs)
            found.append(one)
        return found


def fill(block: Block, bench: Bench, exchanges: list[Exchange], slo: Slo | None) -> None:
    """Judge each request of a block, in the order in which they were scheduled."""
    slos = {each.name: each.slo for each in bench.classes}
    block.span_s = float(bench.traffic.span_s)
    for x in sorted(exchanges, key=lambda x: (x.scheduled_s, x.id)):
        times, own = latency(x), slos.get(x.service_class) or slo
        block.met.append(times is not None and not (own and misses(own, x, times)))
        block.ttft_s.append(None if times is None else times.ttft_s)
        block.tpot_s.append(None if times is None else times.tpot_s)
        block.num_tokens += x.num_output if times is not None else 0


def evening(blocks: list[Block]) -> dict[int, float]:
    """Round → what makes its goodput that of a mean round, by the settings that ran in all of them.

    In two rounds the default meets 20 and 40 requests, another 40 and 60: 60 and 100, 80 in the
    mean. A third that meets 50 in the second round alone is counted 50 * 80 / 100 = 40.
    """
    met: dict[Changes, dict[int, int]] = {}
    for block in blocks:
        if not block.died:
            met.setdefault(block.changes, {})[block.round] = sum(block.met)
    rounds = {number for each in met.values() for number in each}
    always = [each for each in met.values() if each.keys() == rounds]
    level = {number: sum(each[number] for each in always) for number in rounds}
    mean = sum(level.values()) / max(len(level), 1)
    return {number: mean / level[number] if level[number] else 1.0 for number in rounds}


def summed(changes: Changes, blocks: list[Block]) -> Confirmed:
    """A setting over all of its blocks."""
    good = [b for b in blocks if not b.died]
    span_s = sum(b.span_s for b in good) or 1.0
    met = [m for b in good for m in b.met]
    ttft = [t for b in good for t in b.ttft_s if t is not None]
    tpot = [t for b in good for t in b.tpot_s if t is not None]
    return Confirmed(
        changes=changes,
        runs=len(blocks),
        goodput=sum(met) / span_s,
        in_slo=sum(met) / max(len(met), 1),
        ttft_s=float(np.median(ttft)) if ttft else None,
        tpot_s=float(np.median(tpot)) if tpot else None,
        tokens_per_s=sum(b.num_tokens for b in good) / span_s,
        died=next((b.died for b in blocks if b.died), ""),
    )


def paired_gain(pairs: list[tuple[Block, Block]]) -> tuple[float, tuple[float, float]]:
    """(share of goodput gained, its 95%): the second of each pair beside the first.

    The default meets 6 of 10 and a setting 9 of the same 10: a gain of 50%. The 95% are no
    narrower than what the pairs differ by: twice as much in one and half in the other is not sure.
    """
    counts = [stretches(first, second) for first, second in pairs]
    rng, all_counts = np.random.default_rng(0), np.concatenate(counts)
    if not len(all_counts):
        return 0.0, (0.0, 0.0)
    drawn = all_counts[rng.integers(len(all_counts), size=(RESAMPLES, len(all_counts)))].sum(axis=1)
    low, high = np.percentile(share(drawn[:, 0], drawn[:, 1]), (2.5, 97.5)).tolist()
    gain = float(share(*all_counts.sum(axis=0)[:, None])[0])
    gains = np.array([share(*each.sum(axis=0)[:, None])[0] for each in counts])
    reach = exp(SURE * between(gains))
    low = min(low, (1 + gain) / reach - 1)
    high = max(high, (1 + gain) * reach - 1)
    return round(gain, 4), (round(low, 4), round(high, 4))


def stretches(first: Block, second: Block) -> Floats:
    """[stretches, 2]: of each stretch of requests, how many both met."""
    count = min(len(first.met), len(second.met))
    return np.array(
        [
            (sum(first.met[at : at + STRETCH]), sum(second.met[at : at + STRETCH]))
            for at in range(0, count, STRETCH)
        ],
        dtype=float,
    ).reshape(-1, 2)


def between(gains: Floats) -> float:
    """The standard error of the logarithm of a mean gain, by what the gains of its pairs differ."""
    if len(gains) < 2:
        return 0.0
    return float(np.log(np.maximum(1 + gains, LEAST)).std(ddof=1)) / sqrt(len(gains))


def share(default: Floats, other: Floats) -> Floats:
    """Gained beside the default; of a default that meets nothing each is worth one more."""
    found: Floats = (other - default) / np.maximum(default, 1.0)
    return found
