"""Requests with objectives, answered with guesses and without: a part of `speculation_control`.

Two engines in one process get the same requests at the same times, each on a clock of its own that
runs only while that engine computes. The one whose clock is behind has the next step, so both are
measured in the same seconds of the machine, and the time in which an engine waits for somebody to
come takes none. HTTP and admission are not in it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from common import markdown
from headway.assemble import CALIBRATION_S, GUESSES_S, assemble
from headway.bench.comparison import drawn
from headway.core.request import Request, SamplingParams
from headway.core.slo import Slo
from headway.core.terms import Terms
from headway.engine.calibration import calibrate, calibrate_guesses
from headway.engine.engine import Engine
from headway.llm import make_options
from judged import Data, interval, share_text
from lanes import Prompt
from served import poisson_times


class TurnClock:
    """Seconds in which its engine had the machine, and those it had nothing to do."""

    def __init__(self) -> None:
        self._had_s, self._since_s = 0.0, None

    def begin(self) -> None:
        """Its engine has the machine."""
        self._since_s = time.perf_counter()

    def end(self) -> None:
        """Another engine has it."""
        self._had_s, self._since_s = self.now_s(), None

    def skip_to(self, now_s: float) -> None:
        """Nothing happens until then."""
        self._had_s = max(self._had_s, now_s)

    def now_s(self) -> float:
        since_s = self._since_s
        return self._had_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    def wall_s(self) -> float:
        return self.now_s()


@dataclass(slots=True)
class Asked:
    """One request and when its tokens came."""

    request: Request
    kind: str
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)

    def is_met(self, slo: Slo) -> bool:
        """Whether its first token and the mean of the others came in time."""
        if self.first_s is None:
            return False
        more = self.num_tokens - 1
        tpot_s = (self.last_s - self.first_s) / more if more else None
        return not slo.missed(self.first_s - self.request.arrived_s, tpot_s, None, None)


class Side:
    """One engine, and how far it is with the requests."""

    def __init__(self, folder: Path, options: dict[str, object]) -> None:
        self.clock = TurnClock()
        self.clock.begin()
        self.engine: Engine = assemble(folder, make_options(options), clock=self.clock).engine
        calibrate(self.engine, CALIBRATION_S)
        calibrate_guesses(self.engine, GUESSES_S)
        self.clock.end()
        self.asked: list[Asked] = []
        self.next = self.seconds = 0

    def ask(self, prompts: Sequence[Prompt], times: Sequence[float], slo: Slo, most: int) -> None:
        """Requests to come, at so many seconds from now."""
        begin_s, first = self.clock.now_s(), len(self.asked)
        terms = Terms(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
        for number, (prompt, at_s) in enumerate(zip(prompts, times, strict=True), first):
            sampling = SamplingParams(temperature=prompt.temperature, seed=number, max_tokens=most)
            request = Request(
                number + 1, prompt.token_ids, sampling, arrived_s=begin_s + at_s, terms=terms
            )
            self.asked.append(Asked(request, prompt.kind))

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered."""
        return self.next == len(self.asked) and not self.engine.has_work

    def step(self) -> None:
        """One step, with who has come until now; or the time until the next one comes."""
        if not self.engine.has_work and self.next < len(self.asked):
            self.clock.skip_to(self.asked[self.next].request.arrived_s)
        while self.next < len(self.asked):
            if self.asked[self.next].request.arrived_s > self.clock.now_s():
                break
            self.engine.add(self.asked[self.next].request)
            self.next += 1
        self.clock.begin()
        updates, _ = self.engine.step()
        self.clock.end()
        now_s = self.clock.now_s()
        for update in updates:
            asked = self.asked[update.request_id - 1]
            asked.first_s = asked.first_s or now_s
            asked.last_s = now_s
            asked.num_tokens += len(update.token_ids)
            asked.token_ids += update.token_ids


def race(sides: Sequence[Side]) -> None:
    """Run all to the end of their requests, side by side."""
    begun_s = [side.clock.now_s() for side in sides]
    while not all(side.is_done for side in sides):
        pairs = [(s.clock.now_s() - b, s) for s, b in zip(sides, begun_s) if not s.is_done]
        min(pairs, key=lambda pair: pair[0])[1].step()


def block(
    sides: Sequence[Side],
    prompts: Iterator[Prompt],
    rate: float,
    count: int,
    seed: int,
    slo: Slo,
    most: int,
) -> list[Data]:
    """So many requests at a rate: for each what both sides made of it."""
    chosen, times = list(islice(prompts, count)), poisson_times(rate, count, seed)
    first = len(sides[0].asked)
    for side in sides:
        side.ask(chosen, times, slo, most)
    race(sides)
    return [
        {
            "kind": a.kind,
            "same": a.token_ids == b.token_ids,
            "met": [x.is_met(slo) for x in (a, b)],
            "ttft_s": [x.first_s - x.request.arrived_s for x in (a, b)],
            "tpot_s": [(x.last_s - x.first_s) / max(x.num_tokens - 1, 1) for x in (a, b)],
            "tokens": a.num_tokens,
        }
        for a, b in zip(*(side.asked[first:] for side in sides), strict=True)
    ]


def objectives_table(cells: Sequence[Data]) -> str:
    """By rate: shares within the objectives, their difference in pairs, goodput."""
    rows = []
    for rate in sorted({cell["rate"] for cell in cells}):
        asked = [row for cell in cells if cell["rate"] == rate for row in cell["rows"]]
        off, on = (np.array([float(row["met"][side]) for row in asked]) for side in (0, 1))
        low, high = interval(drawn(on - off, np.random.default_rng(0)).mean(axis=1))
        tpot = [np.median([row["tpot_s"][side] for row in asked]) for side in (0, 1)]
        ttft = [np.percentile([row["ttft_s"][side] for row in asked], 95) for side in (0, 1)]
        rows.append(
            [
                f"{rate:g}",
                len(asked),
                share_text(off.tolist()),
                share_text(on.tolist()),
                f"{100 * (on - off).mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
                f"{rate * off.mean():.2f}, {rate * on.mean():.2f}",
                f"{1e3 * tpot[0]:.0f}, {1e3 * tpot[1]:.0f}",
                f"{ttft[0]:.2f}, {ttft[1]:.2f}",
                "yes" if all(row["same"] for row in asked) else "NO",
            ]
        )
    columns = ["requests/s", "pairs", "in SLO off", "in SLO auto", "difference, points"]
    more = ["goodput off, auto", "TPOT p50, ms", "TTFT p95, s", "same"]
    return markdown([*columns, *more], rows)
