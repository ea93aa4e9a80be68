"""What was asked lately, and of what kind of server: beside a calibration all that a simulation of
this traffic needs. Lengths and times; no text, no ids, nobody's name.

Worked example: at 2.0 s a prompt of 900 tokens came, 800 of which the cache held, and was answered
with 50; at 2.5 s one came that was refused, so how long its answer had been nobody knows:

    [2.0, 900, 800, 50, 1, 256, "default"]    [2.5, 300, 0, null, 1, 256, "default"]

`--retune` is told what became of each besides, so that a simulation can begin with those that were
under way. The first had its first token after 0.2 s, its last after 1.7 s, and met its objectives:

    [2.0, 900, 800, 50, 1, 256, "default", 0.2, 1.7, true]
"""

from itertools import chain, islice

import msgspec

from headway.core.model_spec import ModelSpec
from headway.core.resolve import Settings
from headway.core.service import ServiceClass
from headway.telemetry.goodput import INVALID, LEFT, MOVED, OK, REFUSED, Ended
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S
from headway.telemetry.timeline import Timeline


class Asked(msgspec.Struct, array_like=True):
    """A request. `at_s` from the first of them; `prompt` tokens, of which `cached` were there;
    `answer` tokens of each of `n` sequences, None where it did not come to its end; 0 tokens of
    prompt where it was refused before they were counted."""

    at_s: float
    prompt: int
    cached: int
    answer: int | None
    n: int = 1
    limit: int | None = None
    service_class: str = ""


class Followed(Asked, array_like=True):
    """A request, and what became of it so far: seconds from its arrival to its first token, and to
    its end, None where that has not come; whether it has missed nothing, None where that says
    nothing of a server. Of one that runs, `answer` is what it has by now."""

    ttft_s: float | None = None
    took_s: float | None = None
    met: bool | None = None


class Stretch(msgspec.Struct, kw_only=True):
    """All requests that were not over at `from_s` or came from then until `until_s`, now; both, as
    the requests' `at_s`, on a scale of its own, whose 0 is `clock_s` on the clock of the steps.
    Where nothing is said it is from the first of the requests to the last, and no server was there
    before."""

    requests: list[Followed] = []
    from_s: float | None = None
    until_s: float | None = None
    clock_s: float | None = None


class Origin(msgspec.Struct, kw_only=True):
    """What a server was started with, as far as a simulation of it goes."""

    spec: ModelSpec
    settings: Settings
    classes: dict[str, ServiceClass]
    replicas: int = 1
    max_queue: int | None = None
    max_queue_wait_s: float | None = None


def take_traffic(telemetry: Telemetry, since_s: float = 0.0) -> tuple[list[Asked], float | None]:
    """(the requests that have come since then and are over, in the order in which they came; when
    the first of them did, None of none). Of the last seconds these are the short ones.
    """
    found = [*at_the_door(telemetry, since_s)]
    for timeline in telemetry.finished:
        ended = timeline.ended
        if timeline.arrived_s < since_s or ended is None or ended.outcome in (INVALID, MOVED):
            continue
        choices = max(len(timeline.times), 1)
        answer = ended.output_tokens // choices if ended.outcome in (OK, LEFT) else None
        found.append(
            Asked(
                timeline.arrived_s,
                timeline.num_prompt,
                min(timeline.cached_tokens, timeline.num_prompt),
                answer or None,
                choices,
                timeline.max_tokens,
                timeline.service_class.name,
            )
        )
    found.sort(key=lambda asked: asked.at_s)
    begin_s = found[0].at_s if found else None
    for asked in found:
        asked.at_s = round(asked.at_s - (begin_s or 0.0), 6)
    return found, begin_s


MOST_ENDED = 6000
"""Of the newest requests that are over: half a minute of a server that has 200 a second."""


def stretch_since(telemetry: Telemetry, since_s: float) -> Stretch:
    """What has come since then, and what was under way then; less where that is too much."""
    now_s = telemetry.clock.now_s()
    slots, _ = telemetry.slots.last(max(WINDOWS_S), now_s)
    ended = chain.from_iterable(reversed(slot.ended) for slot in reversed(slots))
    newest = list(islice(ended, MOST_ENDED + 1))
    if len(newest) > MOST_ENDED:
        since_s = max(since_s, newest.pop().ended_s)
    found = [
        over(each, since_s)
        for each in newest
        if each.ended_s >= since_s and each.outcome not in (INVALID, MOVED)
    ]
    found += [under_way(timeline, since_s, now_s) for timeline in telemetry.live]
    found.sort(key=lambda asked: asked.at_s)
    return Stretch(requests=found, from_s=0.0, until_s=now_s - since_s, clock_s=since_s)


def over(ended: Ended, from_s: float) -> Followed:
    """A request that is over."""
    answer = ended.output_tokens // ended.n if ended.outcome in (OK, LEFT) else None
    return Followed(
        at_s=round(ended.arrived_s - from_s, 6),
        prompt=ended.prompt_tokens,
        cached=min(ended.cached_tokens, ended.prompt_tokens),
        answer=answer or None,
        n=ended.n,
        limit=ended.limit,
        service_class=ended.service_class,
        ttft_s=ended.ttft_s,
        took_s=ended.e2e_s or 0.0,
        met=None if ended.missed is None else ended.met,
    )


def under_way(timeline: Timeline, from_s: float, now_s: float) -> Followed:
    """One that waits, or is being answered."""
    n, age_s = max(len(timeline.times), 1), now_s - timeline.arrived_s
    ttft_s = age_s if timeline.ttft_s is None else timeline.ttft_s
    missed = timeline.slo.missed(ttft_s, timeline.tpot_s, None, age_s)
    return Followed(
        at_s=round(timeline.arrived_s - from_s, 6),
        prompt=timeline.num_prompt,
        cached=min(timeline.cached_tokens, timeline.num_prompt),
        answer=timeline.num_generated // n or None,
        n=n,
        limit=timeline.max_tokens,
        service_class=timeline.service_class.name,
        ttft_s=timeline.ttft_s,
        met=not missed,
    )


def at_the_door(telemetry: Telemetry, since_s: float) -> list[Asked]:
    """Those that were refused before anybody knew more of them than their class."""
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    return [
        Asked(ended.ended_s, 0, 0, None, service_class=ended.service_class)
        for slot in slots
        for ended in slot.ended
        if ended.outcome == REFUSED and not ended.prompt_tokens and ended.ended_s >= since_s
    ]
