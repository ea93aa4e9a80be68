"""Who asked lately and met what: what `--retune` goes by. Times and lengths, no text, no names."""

from collections.abc import Iterable
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S


class Judged(NamedTuple):
    """A request of late: when it came, whether it met its objectives, its lengths and times."""

    at_s: float
    met: bool
    service_class: str = ""
    prompt: int = 0
    answer: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None


class Shape(NamedTuple):
    """Traffic of some seconds: what a setting is right for."""

    num: int
    per_s: float
    prompt: float
    answer: float
    classes: dict[str, float]
    """Class → its share of the requests."""

    def differs(self, other: "Shape") -> bool:
        """Whether it is other traffic, beyond what chance does to so few requests.

        90 requests in 30 s where there were 60: half as many more, and three of their standard
        errors are a third.
        """
        least = min(self.num, other.num)
        chance = 3.0 / max(least, 1) ** 0.5
        ratios = (
            (self.per_s, other.per_s),
            (self.prompt, other.prompt),
            (self.answer, other.answer),
        )
        if any(max(a, b) > min(a, b) * (1 + max(0.3, chance)) for a, b in ratios):
            return True
        mine, theirs = self.classes, other.classes
        moved = [abs(mine.get(n, 0.0) - theirs.get(n, 0.0)) for n in mine.keys() | theirs.keys()]
        return any(by > max(0.15, chance / 2) for by in moved)


def shape_of(found: Iterable[Judged], seconds: float) -> Shape:
    """The shape of what came in so many seconds; of those refused nobody knows the lengths."""
    all_of = list(found)
    known = [each for each in all_of if each.prompt and each.answer]
    names = [each.service_class for each in all_of]
    return Shape(
        num=len(all_of),
        per_s=len(all_of) / max(seconds, 1e-9),
        prompt=fmean([each.prompt for each in known]) if known else 0.0,
        answer=fmean([each.answer for each in known]) if known else 0.0,
        classes={name: names.count(name) / len(names) for name in set(names)},
    )


class Kept(NamedTuple):
    """How many of some requests met their objectives: a share, its standard error, and medians."""

    num: int
    share: float
    error: float
    ttft_s: float | None
    tpot_s: float | None


BLOCK_S = 5.0
"""Requests that come together share their fate: the error is that of so long blocks."""


def kept_of(found: Iterable[Judged]) -> Kept:
    """The share of those that met, with its error over blocks of `BLOCK_S`.

    Blocks with 5 of 5, 0 of 5, 5 of 5 and 0 of 5: the share is 50 ± 29%, not ± 11% as of 20 alone.
    """
    all_of = list(found)
    if not all_of:
        return Kept(0, 0.0, 1.0, None, None)
    blocks: dict[int, list[bool]] = {}
    for each in all_of:
        blocks.setdefault(int(each.at_s // BLOCK_S), []).append(each.met)
    share = sum(each.met for each in all_of) / len(all_of)
    count = len(blocks)
    squares = sum((sum(met) - share * len(met)) ** 2 for met in blocks.values())
    spread = (squares * count / max(count - 1, 1)) ** 0.5 / len(all_of)
    least = (max(share * (1 - share), 0.25 / len(all_of)) / len(all_of)) ** 0.5
    return Kept(
        len(all_of),
        share,
        max(spread, least),
        middle([each.ttft_s for each in all_of]),
        middle([each.tpot_s for each in all_of]),
    )


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that there are."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def judged_lately(telemetry: Telemetry, since_s: float) -> list[Judged]:
    """The requests that have come since then and whose fate is known: those that are over, were
    refused at the door, or wait for a first token that is late already. At most five minutes of
    them, however many they are."""
    now_s, found = telemetry.clock.now_s(), list[Judged]()
    slots, _ = telemetry.slots.last(max(WINDOWS_S), now_s)
    for ended in chain.from_iterable(s.ended for s in slots if s.second >= int(since_s)):
        if ended.missed is None or ended.arrived_s < since_s:
            continue
        found.append(
            Judged(
                ended.arrived_s,
                ended.met,
                ended.service_class,
                ended.prompt_tokens,
                ended.output_tokens,
                ended.ttft_s,
                ended.tpot_s,
            )
        )
    for timeline in telemetry.live:
        late = timeline.first_s is None and timeline.slo.missed(
            now_s - timeline.arrived_s, None, None, now_s - timeline.arrived_s
        )
        if late and timeline.arrived_s >= since_s:
            found.append(Judged(timeline.arrived_s, False, timeline.service_class.name))
    return sorted(found, key=lambda each: each.at_s)
