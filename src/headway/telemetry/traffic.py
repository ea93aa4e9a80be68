"""What was asked lately, and of what kind of server: beside a calibration all that a simulation of
this traffic needs. Lengths and times; no text, no ids, nobody's name.

Worked example: at 2.0 s a prompt of 900 tokens came, 800 of which the cache held, and was answered
with 50; at 2.5 s one came that was refused, so how long its answer had been nobody knows:

    [2.0, 900, 800, 50, 1, 256, "default"]    [2.5, 300, 0, null, 1, 256, "default"]
"""

import msgspec

from headway.config.resolve import Settings
from headway.core.service import ServiceClass
from headway.spec import ModelSpec
from headway.telemetry.goodput import INVALID, LEFT, MOVED, OK, REFUSED
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S


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


def at_the_door(telemetry: Telemetry, since_s: float) -> list[Asked]:
    """Those that were refused before anybody knew more of them than their class."""
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    return [
        Asked(ended.ended_s, 0, 0, None, service_class=ended.service_class)
        for slot in slots
        for ended in slot.ended
        if ended.outcome == REFUSED and not ended.prompt_tokens and ended.ended_s >= since_s
    ]
