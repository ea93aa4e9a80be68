"""Confirmation of the best settings and the default on real servers, in turns, on new arrivals.

A turn starts a server, runs one block of the traffic and stops the server. All settings get the
same arrivals in a round, and the order rotates from round to round, so a slow minute of the machine
meets each of them. The difference is judged pair by pair: the same request under a setting and
under the default; stretches of consecutive requests are resampled (paired block bootstrap, Künsch
1989), since neighbours wait in the same queue. A server that does not start, or dies, is a result
of its setting.
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

from headway.advise.tune.space import Changes, options_of, setting_name
from headway.bench.latency import latency
from headway.bench.report import misses
from headway.bench.run import Bench, measure, prepare
from headway.config.options import BenchOptions, EngineOptions, Seconds, to_arguments
from headway.core.errors import HeadwayError
from headway.core.slo import Slo
from headway.measure.record import Exchange
from headway.measure.server_process import ServerProcess

MAX_RUNS = 8
"""Servers that are started in all, a calibration's included."""
RESAMPLES, STRETCH_REQUESTS = 2000, 10
Z_95 = 1.96
"""Standard errors to the end of a 95% interval."""
MIN_GOODPUT_RATIO = 0.01
"""Lowest goodput over the default's that enters a logarithm."""
MIN_BLOCK_S = 5.0
Floats = NDArray[np.float64]


class MeasuredBlock(msgspec.Struct, kw_only=True):
    """One real run: the result of each request of the block; `died` is the reason why there is
    none."""

    changes: Changes
    round: int
    span_s: float = 0.0
    met: list[bool] = []
    ttft_s: list[float | None] = []
    tpot_s: list[float | None] = []
    num_tokens: int = 0
    died: str = ""


REPORT_KEYS = {"reason": "taken", "mean_round_goodput": "evened"}
"""Field → its key in the JSON report, where they differ."""


class ConfirmedSetting(msgspec.Struct, kw_only=True, rename=REPORT_KEYS):
    """A setting on the real server. `gain` is its share of goodput above the default, with a 95%
    interval."""

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
    """The simulated gain."""
    together: float = 0.0
    """The combined gain of simulation and real runs, with its 95% interval
    (`outcome.add_simulated_gains`)."""
    together_interval: tuple[float, float] = (0.0, 0.0)
    died: str = ""
    reason: str = ""
    """Why the setting ran."""
    mean_round_goodput: float = 0.0
    """`goodput` in a mean round, also of a setting that ran in some of the rounds only."""

    @property
    def name(self) -> str:
        return setting_name(self.changes)


@dataclass(slots=True, kw_only=True)
class Confirmation:
    """Real runs of some settings; the first of them is the default."""

    folder: Path
    engine: EngineOptions
    load: BenchOptions
    slo: Slo | None
    block_s: float
    remaining_runs: int
    until_s: float
    """Deadline on the clock of `time.monotonic`."""
    flags: tuple[str, ...] = ()
    """More flags of the server: objectives of its classes."""
    watch: Callable[[str], None] = lambda text: None
    after: Callable[[dict[Changes, float]], Changes | None] = lambda scores: None
    """Returns one more setting, by the goodput of each in the first round, or None."""
    blocks: list[MeasuredBlock] = field(default_factory=list)

    def run(self, settings: list[Changes]) -> list[ConfirmedSetting]:
        """Run rounds until runs or time end.

        After the first round the worst setting is dropped where not all can run again, or where
        another setting takes its place.
        """
        all_settings, active, number = list(settings), list(settings), 0
        while active and self.remaining_runs > 0:
            if number == 1:
                active = self.with_another(active)
                all_settings += [changes for changes in active if changes not in all_settings]
            if number and len(active) > self.remaining_runs:
                active = self.best(active, self.remaining_runs)
            if number and len(active) < 2:  # the default alone shows nothing more
                break
            shift = number % len(active)
            for changes in active[shift:] + active[:shift]:
                if self.remaining_runs <= 0 or not self.has_time():
                    return self.results(all_settings)
                self.blocks.append(self.block(changes, number))
                self.remaining_runs -= 1
                if self.blocks[-1].died and changes in active:
                    active = [each for each in active if each != changes]
            number += 1
        return self.results(all_settings)

    def has_time(self) -> bool:
        """Return whether another block of at least a few seconds ends in time."""
        return time.monotonic() + MIN_BLOCK_S < self.until_s

    def with_another(self, active: list[Changes]) -> list[Changes]:
        """Return the settings of the second round: `after` may replace the worst one.

        A replacement needs room for three: it runs beside the default and the best.
        """
        room = min(self.remaining_runs, len(active))
        if room < 3:
            return active
        another = self.after({each.changes: each.goodput for each in self.results(active)})
        return active if another is None else [*self.best(active, room - 1), another]

    def best(self, active: list[Changes], count: int) -> list[Changes]:
        """Return `count` settings: the default and those with the most goodput."""
        goodputs = {each.changes: each.mean_round_goodput for each in self.results(active)}
        order = sorted(active[1:], key=lambda changes: -goodputs[changes])
        return [active[0], *order[: max(count - 1, 0)]]

    def block(self, changes: Changes, number: int) -> MeasuredBlock:
        """Run one block of one setting."""
        self.watch(f"real run, {setting_name(changes)}")
        block = MeasuredBlock(changes=changes, round=number)
        flags = [*to_arguments(options_of(self.engine, changes)), *self.flags]
        try:
            with ServerProcess(self.folder, flags) as server:
                bench = self.traffic(server.url, number)
                exchanges = asyncio.run(measure(bench, drain_s=self.block_s))[0].exchanges
                server.check()
        except HeadwayError as error:
            block.died = f"{error.cause} {error.fix}".strip()
            return block
        fill_block(block, bench, exchanges, self.slo)
        return block

    def traffic(self, url: str, number: int) -> Bench:
        """Return the arrivals of a round: the same for all settings, others than the search's."""
        load = replace(
            self.load,
            seed=self.load.seed + 7919 * (number + 1),
            duration=Seconds(self.block_s),
            num_requests=None,
            warmup=Seconds(0),
            cooldown=Seconds(0),
        )
        return prepare(url, load)

    def results(self, settings: list[Changes]) -> list[ConfirmedSetting]:
        """Return the result of each setting, and its gain over the default in the rounds that both
        have."""
        default = {b.round: b for b in self.blocks if b.changes == settings[0] and not b.died}
        factors = round_factors(self.blocks)
        results = []
        for changes in settings:
            mine = [b for b in self.blocks if b.changes == changes]
            one = sum_blocks(changes, mine)
            good = [b for b in mine if not b.died]
            met = sum(sum(b.met) * factors[b.round] for b in good)
            one.mean_round_goodput = met / (sum(b.span_s for b in good) or 1.0)
            pairs = [(default[b.round], b) for b in mine if b.round in default and not b.died]
            if pairs and changes != settings[0]:
                one.gain, one.gain_interval = paired_gain(pairs)
            results.append(one)
        return results


def fill_block(
    block: MeasuredBlock, bench: Bench, exchanges: list[Exchange], slo: Slo | None
) -> None:
    """Judge each request of a block, in the order in which they were scheduled."""
    slos = {each.name: each.slo for each in bench.classes}
    block.span_s = float(bench.traffic.span_s)
    for x in sorted(exchanges, key=lambda x: (x.scheduled_s, x.id)):
        times, own = latency(x), slos.get(x.service_class) or slo
        block.met.append(times is not None and not (own and misses(own, x, times)))
        block.ttft_s.append(None if times is None else times.ttft_s)
        block.tpot_s.append(None if times is None else times.tpot_s)
        block.num_tokens += x.num_output if times is not None else 0


def round_factors(blocks: list[MeasuredBlock]) -> dict[int, float]:
    """Return round → the factor that makes its goodput that of a mean round.

    The factors follow from the settings that ran in all rounds. In two rounds the default meets 20
    and 40 requests, another 40 and 60: 60 and 100, 80 in the mean. A third setting that meets 50 in
    the second round alone is counted as 50 * 80 / 100 = 40.
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


def sum_blocks(changes: Changes, blocks: list[MeasuredBlock]) -> ConfirmedSetting:
    """Return a setting over all of its blocks."""
    good = [b for b in blocks if not b.died]
    span_s = sum(b.span_s for b in good) or 1.0
    met = [m for b in good for m in b.met]
    ttft = [t for b in good for t in b.ttft_s if t is not None]
    tpot = [t for b in good for t in b.tpot_s if t is not None]
    return ConfirmedSetting(
        changes=changes,
        runs=len(blocks),
        goodput=sum(met) / span_s,
        in_slo=sum(met) / max(len(met), 1),
        ttft_s=float(np.median(ttft)) if ttft else None,
        tpot_s=float(np.median(tpot)) if tpot else None,
        tokens_per_s=sum(b.num_tokens for b in good) / span_s,
        died=next((b.died for b in blocks if b.died), ""),
    )


def paired_gain(
    pairs: list[tuple[MeasuredBlock, MeasuredBlock]],
) -> tuple[float, tuple[float, float]]:
    """Return (gain in goodput as a share, its 95% interval) of the second of each pair over the
    first.

    The default meets 6 of 10 and a setting 9 of the same 10: a gain of 50%. The interval is no
    narrower than the differences between pairs: twice as much in one and half in the other is not
    certain.
    """
    counts = [stretches(first, second) for first, second in pairs]
    rng, all_counts = np.random.default_rng(0), np.concatenate(counts)
    if not len(all_counts):
        return 0.0, (0.0, 0.0)
    drawn = all_counts[rng.integers(len(all_counts), size=(RESAMPLES, len(all_counts)))].sum(axis=1)
    low, high = np.percentile(gain_share(drawn[:, 0], drawn[:, 1]), (2.5, 97.5)).tolist()
    gain = float(gain_share(*all_counts.sum(axis=0)[:, None])[0])
    gains = np.array([gain_share(*each.sum(axis=0)[:, None])[0] for each in counts])
    reach = exp(Z_95 * log_standard_error(gains))
    low = min(low, (1 + gain) / reach - 1)
    high = max(high, (1 + gain) * reach - 1)
    return round(gain, 4), (round(low, 4), round(high, 4))


def stretches(first: MeasuredBlock, second: MeasuredBlock) -> Floats:
    """Return [stretches, 2]: of each stretch of requests, how many both met."""
    count = min(len(first.met), len(second.met))
    return np.array(
        [
            (
                sum(first.met[at : at + STRETCH_REQUESTS]),
                sum(second.met[at : at + STRETCH_REQUESTS]),
            )
            for at in range(0, count, STRETCH_REQUESTS)
        ],
        dtype=float,
    ).reshape(-1, 2)


def log_standard_error(gains: Floats) -> float:
    """Return the standard error of the logarithm of a mean gain, by the spread of the gains of its
    pairs."""
    if len(gains) < 2:
        return 0.0
    return float(np.log(np.maximum(1 + gains, MIN_GOODPUT_RATIO)).std(ddof=1)) / sqrt(len(gains))


def gain_share(default: Floats, other: Floats) -> Floats:
    """Return the gain over the default; where the default meets no request, each request adds
    100%."""
    gains: Floats = (other - default) / np.maximum(default, 1.0)
    return gains
